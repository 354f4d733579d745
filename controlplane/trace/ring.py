"""The event trace of one rank: a bounded ring of tuples, cheap enough to leave on."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol

#: Events kept; the oldest go first.
CAPACITY = 65_536


class TraceEvent(NamedTuple):
    """One event. What `where` and `note` hold for each kind is the table in docs/trace.md."""

    seq: int  #: counts the events of this rank from 0, without gaps
    at_ns: int  #: monotonic nanoseconds of this rank's clock
    agent: str  #: the thread that recorded it
    kind: str  #: allocate, lease, landed, verified, failed, ended, seal, request, grant, read, release, free, ...
    room: Any
    who: str  #: consumer, load kind, or the peer's incarnation
    subject: int  #: names the load, or the ticket, from its `lease` or `request` to its end; 0: neither
    where: Any  #: extents, or (space, pages) pairs, or (pool, layer, extents) of a read
    note: Any


class Record(Protocol):
    """Keeps what it is given; `events` makes it readable."""

    def __call__(
        self, kind: str, room: Any, who: Enum | str, where: Any = None, note: object = "", subject: int = 0
    ) -> None: ...


class Ring:
    """`record` may be called from any thread. The gate's calls come under its lock, in its order."""

    def __init__(self, clock_ns: Callable[[], int], capacity: int = CAPACITY) -> None:
        self._events: deque[tuple[Any, ...]] = deque(maxlen=capacity)
        self.record: Record = _recorder(self._events.append, clock_ns)

    def events(self, begin: int = 0, limit: int = CAPACITY) -> list[TraceEvent]:
        """Up to `limit` of those from number `begin` on, in order and without a gap.

        Two threads may append in another order than they were numbered: it ends before a number still on its way.
        """
        threads = {thread.ident: thread.name for thread in threading.enumerate()}
        found: list[TraceEvent] = []
        kept = sorted((event for event in self._events.copy() if event[0] >= begin), key=lambda event: event[0])
        for seq, at, thread, kind, room, who, *rest in kept[:limit]:
            if found and seq != found[-1].seq + 1:
                break
            name = threads.get(thread, f"thread-{thread}")
            found.append(TraceEvent(seq, at, name, kind, room, who.value if isinstance(who, Enum) else who, *rest))
        return found


def _recorder(append: Callable[[tuple[Any, ...]], None], clock_ns: Callable[[], int]) -> Record:
    """A closure: it is called several times a token, and attributes of an instance would be a third of its time.

    `append` and `copy` of a deque, and the next number of a count, are atomic.
    """
    numbers, thread = itertools.count(), threading.get_ident

    def record(kind: str, room: Any, who: Enum | str, where: Any = None, note: object = "", subject: int = 0) -> None:
        append((next(numbers), clock_ns(), thread(), kind, room, who, subject, where, note))

    return record
