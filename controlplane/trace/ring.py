"""The event trace of one rank: a bounded ring of tuples, cheap enough to leave on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

#: Events kept; the oldest go first.
CAPACITY = 65_536


class TraceEvent(NamedTuple):
    at_ns: int  #: monotonic nanoseconds of this rank's clock
    kind: str  #: allocate, lease, landed, verified, failed, ended, seal, request, grant, read, release, free, ...
    room: Any
    who: str  #: consumer or load kind
    where: Any  #: extents, or (space, pages), or (pool, layer) of a read
    note: str


class Ring:
    def __init__(self, clock_ns: Callable[[], int], capacity: int = CAPACITY) -> None:
        self._clock_ns = clock_ns
        self._events: deque[tuple[Any, ...]] = deque(maxlen=capacity)

    def record(self, kind: str, room: Any, who: Enum | str, where: Any = None, note: object = "") -> None:
        """Keeps what it is given; `events` makes it readable. `append` and `copy` of a deque are atomic."""
        self._events.append((self._clock_ns(), kind, room, who, where, note))

    def events(self) -> list[TraceEvent]:
        return [
            TraceEvent(at, kind, room, who.value if isinstance(who, Enum) else who, where, str(note))
            for at, kind, room, who, where, note in self._events.copy()
        ]
