"""Cuts an engine's output into lines of bounded length."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

#: A longer line is cut here, and the cut is marked.
MAX_LINE_BYTES = 16 * 1024
_CUT = " [cut]"
#: How SGLang begins a line: `[2026-11-29 16:30:00 DP0 TP1] ...`; a rank is a TP rank.
_STAMP = re.compile(r"\[\d{4}-\d\d-\d\d [\d:.]+(?P<names>(?: [A-Z]+\d+)*)\] ?")
_RANK = re.compile(r" TP(\d+)")
#: How uvicorn begins one.
_LEVEL = re.compile(r"(?P<level>INFO|WARNING|ERROR): +")


class LineCutter:
    """Bytes in, lines out; what stands beyond `MAX_LINE_BYTES` of a line is dropped."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._cut = False

    def feed(self, data: bytes) -> Iterator[str]:
        """Yields each line completed by `data`, without its end."""
        *complete, rest = data.split(b"\n")
        for part in complete:
            self._add(part)
            yield self._take()
        self._add(rest)

    def end(self) -> Iterator[str]:
        """Yields the last line if it had no end."""
        if self._line:
            yield self._take()

    def _add(self, part: bytes) -> None:
        room = MAX_LINE_BYTES - len(self._line)
        self._cut = self._cut or len(part) > room
        self._line += part[:room]

    def _take(self) -> str:
        line = self._line.decode("utf-8", "replace").rstrip("\r") + (_CUT if self._cut else "")
        self._line.clear()
        self._cut = False
        return line


def fields_of(line: str) -> dict[str, Any]:
    """An engine's JSON line as its fields (`event` becomes `engine_event`), anything else as `line`."""
    if line.startswith("{"):
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            return {"line": line}
        fields.pop("ts", None)
        if "event" in fields:
            fields["engine_event"] = fields.pop("event")
        return fields
    stamp = _STAMP.match(line)
    line = line[stamp.end() :] if stamp else line
    level = _LEVEL.match(line)
    if level:
        return {"level": level["level"].lower(), "line": line[level.end() :]}
    return {"line": line}


def rank_of(line: str) -> int | None:
    """The rank that a line of SGLang names itself after."""
    stamp = _STAMP.match(line)
    named = _RANK.search(stamp["names"]) if stamp else None
    return int(named[1]) if named else None
