"""The trace format: length-prefixed msgpack frames, each readable without those before it but for the first.

    file  = header frame, then `rank` and `events` frames in any order; a rank's frame precedes its first events
    frame = 4 bytes, big-endian length, then one msgpack map with its kind in `type`

A file may end anywhere: whole frames are read, the rest is reported as cut off. Only the standard library and
msgspec are needed here: ranks encode their own events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from dsv4ctl.controlplane.trace.ring import Ring, TraceEvent

FORMAT = "dsv4ctl trace"
#: Raised by one whenever a reader of the version before would misread a file.
VERSION = 1
#: Why each version came.
HISTORY: dict[int, str] = {1: "2026-11-29: first version"}

#: Events of one frame: a rank's answer to one query stays far below the link's limit, and takes it milliseconds.
FRAME_EVENTS = 2_048
#: Page numbers of one frame, for the same reason.
FRAME_PAGES = 200_000
PREFIX = 4
MAX_FRAME_BYTES = 16 * 1024 * 1024


class Extent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Pages of one space; `generations` is empty where they go without saying (`allocate`, `free`, `write`, ...)."""

    space: str
    pages: tuple[int, ...]
    generations: tuple[int, ...] = ()
    pools: tuple[str, ...] = ()


Extents = tuple[Extent, ...]


class Event(msgspec.Struct, array_like=True, gc=False):
    """`extents`: number of an entry in its frame's table, -1: none. `value`: readable layers, or a watermark."""

    seq: int
    at_ns: int
    kind: str
    agent: str
    room: str
    who: str
    subject: int = 0
    extents: int = -1
    pool: str = ""
    layer: int = -1
    value: int = 0
    note: str = ""


class Header(msgspec.Struct, tag="header", frozen=True):
    format: str = FORMAT
    version: int = VERSION


class Rank(msgspec.Struct, tag="rank", frozen=True):
    """Who recorded. `monotonic_ns` and `wall_ns` are one moment on its two clocks: the clock base of its events."""

    engine: str
    rank: int
    role: str
    incarnation: str
    pid: int
    layers: int
    monotonic_ns: int
    wall_ns: int
    consumers: dict[str, str] = {}  #: where in the engine each consumer reads

    @property
    def name(self) -> str:
        return f"{self.engine}/{self.rank}"


class Events(msgspec.Struct, tag="events", frozen=True):
    """Consecutive events of one rank. `lost`: events before them that the ring had dropped already."""

    incarnation: str
    lost: int
    extents: list[Extents]
    events: list[Event]


Frame = Header | Rank | Events

_encoder = msgspec.msgpack.Encoder()


def encode(frame: Frame) -> bytes:
    """The frame's bytes, length first."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(PREFIX, "big") + body


class Page(msgspec.Struct, frozen=True):
    """A rank's answer to `trace N`: its events from number N on, or the first part of them."""

    rank: bytes  #: a `rank` frame
    events: bytes  #: an `events` frame
    next: int  #: ask for this number next
    more: bool  #: something is there already


def page(ring: Ring, rank: Rank, begin: int) -> Page:
    """What `ring` has from number `begin` on, as much as one frame holds."""
    found = ring.events(begin, FRAME_EVENTS + 1)
    taken = _fitting(found)
    lost = taken[0].seq - begin if taken else 0
    after = taken[-1].seq + 1 if taken else begin
    events = encode(events_frame(rank.incarnation, taken, lost))
    return Page(encode(rank), events, after, len(taken) < len(found))


def _fitting(events: list[TraceEvent]) -> list[TraceEvent]:
    """The first so many: at least one, at most FRAME_EVENTS, and no more pages than FRAME_PAGES."""
    pages = 0
    seen: set[int] = set()
    for number, event in enumerate(events[:FRAME_EVENTS]):
        extents = _extents(event)
        if id(extents) not in seen:
            seen.add(id(extents))
            pages += sum(len(_pages(extent)) for extent in extents)
        if number and pages > FRAME_PAGES:
            return events[:number]
    return events[:FRAME_EVENTS]


def _extents(event: TraceEvent) -> tuple[Any, ...]:
    """A read says pool and layer before its extents."""
    where = event.where[2] if event.kind == "read" else event.where
    return where or ()


def events_frame(incarnation: str, events: Iterable[TraceEvent], lost: int) -> Events:
    """Extents that several events share stand in the frame once."""
    table: list[Extents] = []
    known: dict[int, int] = {}
    kept: list[object] = []  # while the frame is made, so that no two extents have one id

    def number(extents: tuple[Any, ...]) -> int:
        if not extents:
            return -1
        at = known.get(id(extents))
        if at is None:
            at = known[id(extents)] = len(table)
            kept.append(extents)
            table.append(tuple(_extent(one) for one in extents))
        return at

    made = [_event(event, number) for event in events]
    return Events(incarnation, lost, table, made)


def _event(event: TraceEvent, number: Callable[[tuple[Any, ...]], int]) -> Event:
    pool, layer = event.where[:2] if event.kind == "read" else ("", -1)
    note = event.note
    value, text = (int(note), "") if isinstance(note, int) else (0, str(note))
    room = "" if event.room is None else str(event.room)
    return Event(
        event.seq,
        event.at_ns,
        event.kind,
        event.agent,
        room,
        event.who,
        event.subject,
        number(_extents(event)),
        pool,
        layer,
        value,
        text,
    )


def _extent(where: Any) -> Extent:
    """Of a ledger's extent, or a pair (space, pages)."""
    if isinstance(where, tuple):
        return Extent(where[0], tuple(where[1]))
    return Extent(where.space, where.pages, where.generations, tuple(sorted(where.pools)))


def _pages(where: Any) -> tuple[int, ...]:
    return where[1] if isinstance(where, tuple) else where.pages  # type: ignore[no-any-return]
