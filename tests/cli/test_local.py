"""Commands that need no control plane, and the experiments that may not be installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

import dsv4ctl.controlplane.cli.start as start
from dsv4ctl.controlplane.cli.main import INCIDENT

GOOD = """
[[engines]]
name = "one"
role = "single"
"""


def test_version(dsv4ctl: Any) -> None:
    assert json.loads(dsv4ctl("version", "--json").stdout).keys() == {"version", "wire", "python"}
    assert dsv4ctl("version").stdout.startswith("version  ")


def test_a_good_file(dsv4ctl: Any, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(GOOD)
    result = dsv4ctl("config", "check", str(file))
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{file}: ok: one (single)\n", "")


def test_a_file_that_switches_guards_off_is_warned_of(dsv4ctl: Any, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(GOOD + '[unsafe]\noff = ["quiesce"]\n')
    result = dsv4ctl("config", "check", str(file))
    assert result.exit_code == 0
    assert result.stderr == "WARNING: [unsafe] switches off quiesce: output WILL be corrupted\n"


def test_every_problem_of_a_bad_file_is_a_line(dsv4ctl: Any, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[gatway]\n" + GOOD + "ranks = 0\n")
    result = dsv4ctl("config", "check", str(file))
    assert result.exit_code == 2
    first, second = result.stderr.splitlines()
    assert first.startswith(f'dsv4ctl: {file}: gatway: unknown key "gatway". Did you mean gateway? Expected one of: ')
    assert second == f"dsv4ctl: {file}: engines[0].ranks: expected an integer of at least 1, found 0"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("ranks = 3", "ranks: expected one of 1, 2, 4, 8, 16, 32, 64, 128 (equal parts of the model), found 3"),
        (
            "adapter = 'sglang'",
            'sglang.model: expected a folder with a model, or its Hugging Face name, found ""',
        ),
        (
            "adapter = 'sglang'\nsglang.model = 'm'\nsurvive = true",
            "survive: expected false: a server of SGLang ends with its control plane",
        ),
    ],
)
def test_what_an_adapter_refuses_on_any_machine_is_a_bad_file(
    dsv4ctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, problem: str
) -> None:
    """`config check` and `start` say the same, and `start` has not looked at the machine yet."""
    monkeypatch.setattr(start, "preflight", lambda config: pytest.fail("the file was taken"))
    file = tmp_path / "cluster.toml"
    file.write_text(f"{GOOD}{line}\n")
    for command in (("config", "check"), ("start",)):
        result = dsv4ctl(*command, str(file))
        assert (result.exit_code, result.stderr) == (2, f"dsv4ctl: {file}: engines[0].{problem}\n")


def test_experiments_that_are_not_installed(dsv4ctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, INCIDENT, None)  # as if it were not there
    result = dsv4ctl("incident", "--quick", "--seed", "3")
    assert result.exit_code == 1
    assert "pip install 'dsv4ctl[reference]'" in result.stderr
    assert dsv4ctl("--help").exit_code == 0


def test_experiments_that_are_installed(dsv4ctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(INCIDENT)
    module.command = click.Command("incident", callback=lambda: click.echo("ran"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, INCIDENT.rpartition(".")[0], ModuleType("parent"))
    monkeypatch.setitem(sys.modules, INCIDENT, module)
    assert dsv4ctl("incident").output == "ran\n"
