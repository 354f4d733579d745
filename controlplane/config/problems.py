"""What is wrong with a configuration: where, what was expected, what was found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """One thing wrong at `key` (a path such as `engines[1].hicache.pages`; empty: the file as a whole)."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


class ConfigError(Exception):
    """A configuration that is refused; nothing was started. One line a problem."""

    def __init__(self, file: str, problems: Sequence[Problem]) -> None:
        self.file = file
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{file}: {problem}" for problem in self.problems))


def expected(what: str, found: Any) -> str:
    return f"expected {what}, found {show(found)}"


def unknown(kind: str, found: str, valid: Iterable[str]) -> str:
    """`found` is not one of `valid`: the nearest of them if one is near, and all of them."""
    names = sorted(valid)
    near = nearest(found, names)
    hint = f" Did you mean {near}?" if near else ""
    return f"unknown {kind} {show(found)}.{hint} Expected one of: {', '.join(names) or '(none)'}"


def nearest(found: str, valid: Iterable[str]) -> str | None:
    close = get_close_matches(found, list(valid), n=1, cutoff=0.5)
    return close[0] if close else None


def show(value: Any) -> str:
    """A value as TOML writes it, cut to a readable length."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    text = '"' + value + '"' if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
