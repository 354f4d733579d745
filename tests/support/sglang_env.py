"""The real SGLang wheels for contract tests: fetched once, unpacked beside the interpreter, run in a subprocess.

The test process itself never imports SGLang.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent
#: What SGLang imports that is no stub: its bookkeeping calls it.
NEEDS = ("pyzmq",)
_CACHE = Path(sys.prefix) / "sglang-wheels"
_FETCH_SECONDS = 300
_RUN_SECONDS = 400


def folder(version: str) -> Path:
    """A folder that holds the package `sglang` of that release and `NEEDS`."""
    target = _CACHE / version
    done = target / ".complete"
    if not done.exists():
        wheels = _CACHE / f"{version}.wheels"
        _pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(wheels), f"sglang=={version}")
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
            wheel.unlink()
        _pip("install", "--no-deps", "--target", str(target), *NEEDS)
        done.touch()
    return target


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", *arguments[1:]]
    subprocess.run(command, check=True, timeout=_FETCH_SECONDS)


def run(version: str, module: str, *arguments: str) -> dict[str, Any]:
    """Runs `module` of tests/support against a release; its last line on stdout is the JSON answer."""
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": os.pathsep.join((*inherited, str(SUPPORT), str(folder(version)))),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_RUN_SECONDS,
    )
    assert done.returncode == 0, f"{module} on sglang {version} ended with {done.returncode}:\n{done.stderr[-4000:]}"
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer
