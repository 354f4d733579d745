"""The event trace of one rank: a bounded ring of tuples, cheap enough to leave on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

#: Events kept; the oldest go first.
CAPACITY = 65_536


class TraceEvent(NamedTuple):
    at_ns: int  #: monotonic nanoseconds of this rank's clock
    kind: str  #: lease, landed, verified, failed, ended, request, grant, read, release, free, quarantine, ...
    room: Any
    who: str  #: consumer or load kind
    where: Any  #: extents, or (pool, layer)
    note: str


class Ring:
    def __init__(self, clock_ns: Callable[[], int], capacity: int = CAPACITY) -> None:
        self._clock_ns = clock_ns
        self._events: deque[tuple[Any, ...]] = deque(maxlen=capacity)

    def record(self, kind: str, room: Any, who: str, where: Any = None, note: str = "") -> None:
        self._events.append((self._clock_ns(), kind, room, who, where, note))

    def events(self) -> list[TraceEvent]:
        return [TraceEvent(*event) for event in list(self._events)]
