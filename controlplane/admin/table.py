"""Answers as text for people: aligned columns, short values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], empty: str) -> str:
    """Columns as wide as their widest cell, numbers to the right; `empty` where there is no row."""
    cells = [[cell(value) for value in row] for row in rows]
    if not cells:
        return empty
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = [all(_numeric(text) for text in column) for column in zip(*cells, strict=True)]
    lines = []
    for row in (list(header), *cells):
        padded = (
            text.rjust(width) if numeric else text.ljust(width)
            for text, width, numeric in zip(row, widths, right, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def pairs(values: Mapping[str, Any]) -> str:
    """One `name  value` a line."""
    width = max(map(len, values), default=0)
    return "\n".join(f"{name.ljust(width)}  {cell(value)}".rstrip() for name, value in values.items())


def cell(value: Any) -> str:
    if value is None or value == {} or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={cell(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return " ".join(cell(one) for one in value)
    return str(value)


def seconds(value: float | None) -> str:
    """A duration: `0.42s`, `12s`, `3m07s`, `2h05m`."""
    if value is None:
        return "-"
    if value < 10:
        return f"{value:.2f}s"
    if value < 60:
        return f"{value:.0f}s"
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def size(value: int | None) -> str:
    """Bytes: `512 B`, `16.0 KiB`, `3.2 MiB`."""
    if value is None:
        return "-"
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            return f"{value} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("the loop ends at GiB")


def _numeric(text: str) -> bool:
    return text == "-" or text.rstrip("smhKMGiB ").replace(".", "").replace(",", "").isdigit()
