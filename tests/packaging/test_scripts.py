"""The scripts on machines that lack something, and that a second run installs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

OLD_PYTHON = "case $* in -V) echo Python 3.9.2;; *version_info*) exit 1;; *) exit 99;; esac"
BARE_PYTHON = "case $* in *ensurepip*) exit 1;; *version_info*) exit 0;; *) exit 99;; esac"
SCRIPTS = ("scripts/run", "scripts/test", "scripts/lint", ".ci/run")


def write_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def call(script: Path, *args: str, cwd: Path, path: str, venv: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(script), *args],
        cwd=cwd,
        env={"PATH": path, "DSV4CTL_VENV": str(venv), "CI": "true"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with what the scripts may expect of a bare machine, and no Python."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for tool in ("bash", "cat", "cksum", "dirname", "env", "grep", "head", "sed"):
        (folder / tool).symlink_to(str(shutil.which(tool)))
    return folder


@pytest.mark.parametrize("script", [*SCRIPTS, "scripts/venv.sh"])
def test_syntax(script: str, root: Path) -> None:
    check = subprocess.run(["bash", "-n", root / script], capture_output=True, text=True, timeout=10)
    assert (check.returncode, check.stderr) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS)
def test_executable(script: str, root: Path) -> None:
    assert os.access(root / script, os.X_OK)


@pytest.mark.parametrize(
    ("python", "said"),
    [
        (None, "[run] no python3 on PATH: install Python 3.11 or newer"),
        (OLD_PYTHON, "[run] Python 3.9.2 is too old: Python 3.11 or newer is needed"),
        (
            BARE_PYTHON,
            "[run] python3 cannot make a virtual environment (no ensurepip): apt-get install python3-venv",
        ),
    ],
    ids=["no-python", "old-python", "no-ensurepip"],
)
def test_a_missing_python_is_one_clear_line(
    python: str | None, said: str, root: Path, tools: Path, tmp_path: Path
) -> None:
    if python is not None:
        write_program(tools / "python3", python)
    result = call(root / "scripts/run", "--once", cwd=tmp_path, path=str(tools), venv=tmp_path / "venv")
    assert result.returncode == 1
    assert (result.stdout, result.stderr.splitlines()) == ("", [said])
    assert not (tmp_path / "venv").exists()


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose Python writes down how it was called; its pip fails while `pip-fails` exists."""
    folder = tmp_path / "some where" / "venv"
    write_program(
        folder / "bin/python",
        f'echo "$*" >>"{folder}/calls"; case $* in *"pip install"*) [ ! -e "{folder}/pip-fails" ];; esac',
    )
    return folder


def calls(venv: Path) -> list[str]:
    """What the environment's Python was called with since the last look."""
    lines = (venv / "calls").read_text().splitlines()
    (venv / "calls").unlink()
    return lines


def test_a_second_run_installs_nothing(root: Path, tools: Path, venv: Path, tmp_path: Path) -> None:
    for expected in (3, 1):
        result = call(
            root / "scripts/run",
            "--once",
            "a b",
            cwd=tmp_path,
            path=str(tools),
            venv=venv.relative_to(tmp_path),
        )
        assert result.returncode == 0, result.stderr
        said = calls(venv)
        assert len(said) == expected
        assert said[-1] == "-m dsv4ctl.controlplane.demo --once a b"
    assert result.stderr == ""


def test_a_failed_install_fails_and_is_tried_again(root: Path, tools: Path, venv: Path, tmp_path: Path) -> None:
    (venv / "pip-fails").touch()
    for _ in range(2):
        result = call(root / "scripts/run", cwd=tmp_path, path=str(tools), venv=venv)
        assert result.returncode == 1
        assert result.stderr.splitlines()[-1] == "[run] pip install of .[reference] failed"
        assert [line for line in calls(venv) if "demo" in line] == []


def test_other_extras_are_installed_once_more(root: Path, tools: Path, venv: Path, tmp_path: Path) -> None:
    call(root / "scripts/run", cwd=tmp_path, path=str(tools), venv=venv)
    calls(venv)
    for tool in ("mypy", "ruff", "lint-imports"):
        write_program(venv / "bin" / tool, "exit 0")
    tools.joinpath("ln").symlink_to(str(shutil.which("ln")))
    tools.joinpath("mkdir").symlink_to(str(shutil.which("mkdir")))
    result = call(root / "scripts/lint", cwd=tmp_path, path=str(tools), venv=venv)
    assert result.returncode == 0, result.stderr
    assert [line for line in calls(venv) if line.endswith(".[reference,kernels,dev]")]
    write_program(venv / "bin" / "ruff", "exit 1")
    result = call(root / "scripts/lint", cwd=tmp_path, path=str(tools), venv=venv)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "[lint] failed: ruff check,ruff format"
    assert not (venv / "calls").exists()
