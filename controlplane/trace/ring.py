"""The event trace of one rank: a bounded ring of tuples, cheap enough to leave on."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple, Protocol

import msgspec

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


class Subject(Protocol):
    """A ticket or a load: its events name it alone, from its `request` or `lease` to its end."""

    @property
    def room(self) -> Any: ...

    @property
    def who(self) -> Enum: ...


class Record(Protocol):
    """Keeps what it is given; `events` makes it readable."""

    def __call__(
        self, kind: str, room: Any, who: Enum | str, where: Any = None, note: object = "", subject: int = 0
    ) -> object: ...


class RecordOf(Protocol):
    """The same, of a ticket or a load, which is kept as long as its events are."""

    def __call__(self, kind: str, of: Subject, where: Any = None, note: object = "") -> object: ...


class Ring:
    """`record` and `record_of` may be called from any thread. The gate's calls come under its lock, in its order."""

    def __init__(self, clock_ns: Callable[[], int], capacity: int = CAPACITY) -> None:
        self._events: deque[Any] = deque(maxlen=capacity)
        stamps = {"seq": itertools.count().__next__, "at_ns": clock_ns, "thread": threading.get_ident}
        notes = [("where", Any, None), ("note", object, "")]
        self.record: Record = _recorder(["kind", "room", "who", *notes, ("subject", int, 0)], {}, stamps, self._events)
        self.record_of: RecordOf = _recorder(["kind", "of", *notes], _OF, stamps, self._events)

    def events(self, begin: int = 0, limit: int = CAPACITY) -> list[TraceEvent]:
        """Up to `limit` of those from number `begin` on, in order and without a gap.

        Two threads may append in another order than they were numbered: it ends before a number still on its way.
        """
        threads = {thread.ident: thread.name for thread in threading.enumerate()}
        found: list[TraceEvent] = []
        kept = sorted((event for event in self._events.copy() if event.seq >= begin), key=lambda event: event.seq)
        for event in kept[:limit]:
            if found and event.seq != found[-1].seq + 1:
                break
            agent = threads.get(event.thread, f"thread-{event.thread}")
            who = event.who.value if isinstance(event.who, Enum) else event.who
            what = (event.kind, event.room, who, event.subject, event.where, event.note)
            found.append(TraceEvent(event.seq, event.at_ns, agent, *what))
        return found


#: What an event of a ticket or a load has from it, once it is read.
_OF = {
    "room": property(lambda event: event.of.room),
    "who": property(lambda event: event.of.who),
    "subject": property(lambda event: id(event.of)),
}


def _recorder(
    given: list[Any], derived: Mapping[str, property], stamps: Mapping[str, Callable[[], int]], events: deque[Any]
) -> Any:
    """A struct that stamps itself when it is made, and appends itself: recording is one call into C.

    `append` and `copy` of a deque, and the next number of a count, are atomic.
    """
    fields = [*given, *((name, int, msgspec.field(default_factory=stamp)) for name, stamp in stamps.items())]
    return msgspec.defstruct("Recorded", fields, namespace={**derived, "__post_init__": events.append}, eq=False)
