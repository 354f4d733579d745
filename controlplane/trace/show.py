"""The timeline of one room: its own events on every rank, and the loads that its reads waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from dsv4ctl.controlplane.trace.format import Event, Extents, Rank
from dsv4ctl.controlplane.trace.merge import Merged
from dsv4ctl.controlplane.trace.races import ranges

#: Of loads that belong to no room: what tells how they got on.
_LOAD_KINDS = frozenset({"lease", "landed", "verified", "failed", "ended", "quarantine"})
_MS = 1e6

#: (incarnation, space, page, generation)
PageKey = tuple[str, str, int, int]


def timeline(
    room: str, ranks: Mapping[str, Rank], ahead_ns: Mapping[str, int], events: Callable[[], Iterable[Merged]]
) -> Iterator[str]:
    """One line an event, times in ms from the room's first; nothing for a room that is not in the trace.

    `room` with or without its generation. `events` is called twice: the second pass knows which pages are its.
    """
    pages: set[PageKey] = set()
    for incarnation, event, extents in events():
        if _is(room, event.room):
            pages |= _keys(incarnation, extents)
    began: int | None = None
    reads = _Reads()
    for incarnation, event, extents in events():
        if not _is(room, event.room) and not _concerns(incarnation, event, extents, pages):
            continue
        at = event.at_ns + ahead_ns.get(incarnation, 0)
        began = at if began is None else began
        prefix = f"{(at - began) / _MS:10.3f} ms  {ranks[incarnation].name:<12} {event.agent:<16} "
        if event.kind == "read":
            yield from reads.add(prefix, incarnation, event)
        else:
            yield from reads.flush()
            yield prefix + _line(event, extents)
    yield from reads.flush()


def _is(room: str, found: str) -> bool:
    return found == room or (bool(found) and found.partition(".")[0] == room)


def _keys(incarnation: str, extents: Extents) -> set[PageKey]:
    return {
        (incarnation, extent.space, page, generation)
        for extent in extents
        for page, generation in zip(extent.pages, extent.generations, strict=False)
    }


def _concerns(incarnation: str, event: Event, extents: Extents, pages: set[PageKey]) -> bool:
    return event.kind in _LOAD_KINDS and not event.room and not pages.isdisjoint(_keys(incarnation, extents))


class _Reads:
    """Consecutive reads of one consumer in one line."""

    def __init__(self) -> None:
        self._prefix = ""
        self._events: list[Event] = []
        self._of: tuple[str, int, bool] | None = None

    def add(self, prefix: str, incarnation: str, event: Event) -> Iterator[str]:
        of = (incarnation, event.subject, event.value <= event.layer)
        if of != self._of:
            yield from self.flush()
            self._prefix, self._of = prefix, of
        self._events.append(event)

    def flush(self) -> Iterator[str]:
        if not self._events:
            return
        first = self._events[0]
        pools = ", ".join(sorted({event.pool for event in self._events}))
        layers = ranges(event.layer for event in self._events)
        times = f" ({len(self._events)} reads)" if len(self._events) > 1 else ""
        early = f"   <-- only {first.value} layers were granted" if self._of and self._of[2] else ""
        yield f"{self._prefix}read      {first.who} {pools} layer {layers}{times}{early}"
        self._events, self._of = [], None


def _line(event: Event, extents: Extents) -> str:
    match event.kind:
        case "room":
            return f"room      {event.room} {event.note}"
        case "sent" | "received":
            to = "to" if event.kind == "sent" else "from"
            return f"{event.kind:<9} {event.note} {to} {event.who}"
        case "write":
            return f"write     {event.note} to {event.who}: {_pages(extents)}"
        case "landed" | "verified":
            return f"{event.kind:<9} {event.who} load, {event.value} layers: {_pages(extents)}"
        case "request" | "grant" | "extend":
            return f"{event.kind:<9} {event.who}, {event.value} layers readable: {_pages(extents)}"
        case _:
            note = f" ({event.note})" if event.note else ""
            return f"{event.kind:<9} {event.who}{note}{': ' if extents else ''}{_pages(extents)}".rstrip()


def _pages(extents: Extents) -> str:
    return "; ".join(f"{extent.space} {ranges(extent.pages)}" for extent in extents if extent.pages)
