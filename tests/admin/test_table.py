"""Answers for people: short values in aligned columns."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4ctl.controlplane.admin import table


def test_columns_are_as_wide_as_their_widest_cell_and_numbers_stand_right() -> None:
    shown = table.table(("name", "pages", "note"), [("p0", 5, None), ("decode0", 1200, {})], "none")
    assert shown == "name     pages  note\np0           5  -\ndecode0   1200  -"
    assert table.table(("name",), [], "none") == "none"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (True, "yes"), (0.12345, "0.123"), ([1, 2], "1 2"), ({"a": 1, "b": None}, "a=1 b=-"), ([], "-")],
)
def test_cells(value: Any, text: str) -> None:
    assert table.cell(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.256, "0.26s"), (42.2, "42s"), (187.4, "3m07s"), (7500.0, "2h05m")]
)
def test_durations(value: float | None, text: str) -> None:
    assert table.seconds(value) == text
