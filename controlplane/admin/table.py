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
    right = [_numeric(column) for column in zip(*cells, strict=True)]
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


def state(value: str, *, paused: bool) -> str:
    """An engine's state; one that was told to pause is not in another for it."""
    return f"{value} (paused)" if paused else value


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


def _numeric(column: Iterable[str]) -> bool:
    values = [text for text in column if text != "-"]
    return bool(values) and all(text.rstrip("smhKMGiB ").replace(".", "").isdigit() for text in values)
