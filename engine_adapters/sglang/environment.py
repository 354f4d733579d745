"""What is installed in an engine's Python environment: asked of its own interpreter, which imports nothing heavy."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dsv4ctl.engine_adapters.gpu import no_gpu
from dsv4ctl.engine_adapters.protocol import AdapterError

#: Entry point group and name by which SGLang finds our hooks.
PLUGIN_GROUP, PLUGIN_NAME = "sglang.srt.plugins", "dsv4ctl"
#: Oldest Python that this package runs on.
PYTHON = (3, 11)
#: Seconds for an interpreter to say what is installed: it starts and reads metadata, nothing more.
_ANSWER = 60.0
_ASK = f"""
import json, sys
from importlib import metadata, util
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
spec = util.find_spec("sglang")
plugins = [point.name for point in metadata.entry_points(group="{PLUGIN_GROUP}")]
json.dump({{
    "python": list(sys.version_info[:2]),
    "sglang": version("sglang"),
    "folder": list(spec.submodule_search_locations or [None])[0] if spec else None,
    "nixl": util.find_spec("nixl") is not None,
    "plugins": plugins,
}}, sys.stdout)
"""
#: Keeps the working directory out of the import path: a folder `kernels` there would hide what transformers imports.
PATH_GUARD = {"PYTHONSAFEPATH": "1"}


class Installed(msgspec.Struct, frozen=True):
    """What the interpreter found; None where it found nothing."""

    python: tuple[int, int]
    sglang: str | None
    folder: str | None  #: the package `sglang`
    nixl: bool
    plugins: tuple[str, ...]

    @property
    def package(self) -> Path:
        assert self.folder is not None
        return Path(self.folder)


def ask(python: str, env: Mapping[str, str]) -> Installed:
    """Raises AdapterError with one line if `python` is no interpreter that can say."""
    try:
        answer = subprocess.run(
            [python, "-c", _ASK],
            capture_output=True,
            env={**os.environ, **PATH_GUARD, **env},
            timeout=_ANSWER,
            check=False,
        )
    except OSError as error:
        raise AdapterError(f"{python!r} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise AdapterError(f"{python!r} did not say what is installed within {_ANSWER:g} s") from error
    try:
        return msgspec.json.decode(answer.stdout, type=Installed)
    except msgspec.DecodeError as error:
        said = answer.stderr.decode(errors="replace").strip().splitlines()
        last = said[-1] if said else f"exit code {answer.returncode}"
        raise AdapterError(f"{python!r} is no Python that can be asked what is installed: {last}") from error


def missing(installed: Installed, python: str, *, transfers: bool, gpu: bool) -> str | None:
    """One line on the first thing that an engine needs and has not, or None."""
    if installed.python < PYTHON:
        found, needed = (".".join(map(str, version)) for version in (installed.python, PYTHON))
        return f"{python} is Python {found}; an engine needs {needed} or newer"
    if installed.sglang is None or installed.folder is None:
        return f"SGLang is not installed in the environment of {python}: {python} -m pip install sglang"
    if PLUGIN_NAME not in installed.plugins:
        return (
            f"dsv4ctl is not installed in the environment of {python}, so SGLang would run without its hooks: "
            f"{python} -m pip install dsv4ctl"
        )
    if transfers and not installed.nixl:
        return f"NIXL is not installed in the environment of {python}: {python} -m pip install nixl"
    if gpu and (lacking := no_gpu()):
        return f"{lacking} (--device in sglang.extra_args names another device)"
    return None
