"""The table of reports: every event file stands in it, and every test that it names exists and names the report."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import event_file

HERE = Path(__file__).parent
ROWS = re.findall(r"^\| (\d+) \| [^|]* \| ([^|]*) \| ([^|]*)\|$", (HERE / "README.md").read_text(), re.MULTILINE)


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def test_every_event_file_stands_in_its_reports_row() -> None:
    table = {(int(report), name) for report, files, _ in ROWS for name in named(files)}
    assert table == {(event_file.load(path).report, path.stem) for path in HERE.glob("*.toml")}


@pytest.mark.parametrize(("report", "files", "also"), ROWS, ids=[row[0] for row in ROWS])
def test_the_tests_of_a_row_exist_and_name_the_report(report: str, files: str, also: str) -> None:
    assert named(files) or named(also)
    for name in named(also):
        file, _, test = name.partition("::")
        module = ast.parse((HERE.parent / file).read_text())
        found = {n.name: n for n in ast.walk(module) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert test in found, name
        told = " ".join(filter(None, (ast.get_docstring(found[test]), ast.get_docstring(module))))
        assert re.search(rf"\bReports? (\d+[,:]? (and )?)*{report}\b", told), f"{name} does not name report {report}"
