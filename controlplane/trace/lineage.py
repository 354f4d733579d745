"""What came of a race: rooms that read pages computed by a room that had read too early, through copies too. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from dsv4ctl.controlplane.trace.format import Event, Extents
from dsv4ctl.controlplane.trace.races import Race

#: Of the consumer that reads for a copy: the load kind that writes it.
_COPIES = {"backup": "backup", "load": "hicache"}
_HOST = "host."
Place = tuple[str, str, int]  #: incarnation, space, page


def inherited(races: Iterable[Race], events: Iterable[tuple[str, Event, Extents]]) -> dict[str, set[str]]:
    """By room, the consumers whose early reads it depends on: its own, and those behind the pages that it reads."""
    lineage = _Lineage(races)
    for incarnation, event, extents in events:
        lineage.feed(incarnation, event, extents)
    return lineage.rooms


class _Lineage:
    def __init__(self, races: Iterable[Race]) -> None:
        self.rooms: dict[str, set[str]] = defaultdict(set)
        for race in races:
            if race.consumer and race.room:
                self.rooms[race.room].add(race.consumer)
        self._pages: dict[Place, set[str]] = {}
        self._sources: dict[tuple[str, str], Extents] = {}  #: by incarnation and load kind: read for its next lease

    def feed(self, incarnation: str, event: Event, extents: Extents) -> None:
        match event.kind:
            case "allocate":
                for place in _places(incarnation, extents):
                    self._pages.pop(place, None)
            case "seal" if event.room in self.rooms:
                for place in _places(incarnation, extents):
                    self._pages[place] = set(self.rooms[event.room])
            case "request" if event.who in _COPIES:
                self._sources[incarnation, _COPIES[event.who]] = extents
            case "request" if event.room:
                found = set().union(*(self._pages.get(place, ()) for place in _places(incarnation, extents)))
                if found:
                    self.rooms[event.room] |= found
            case "lease" if (incarnation, event.who) in self._sources:
                self._copied(incarnation, extents, self._sources[incarnation, event.who])

    def _copied(self, incarnation: str, targets: Extents, sources: Extents) -> None:
        read = {extent.space.removeprefix(_HOST): extent for extent in sources}
        for target in targets:
            source = read.get(target.space.removeprefix(_HOST))
            if source is None:
                continue
            for page, origin in zip(target.pages, source.pages, strict=False):
                found = self._pages.get((incarnation, source.space, origin))
                place = incarnation, target.space, page
                if found:
                    self._pages[place] = found
                else:
                    self._pages.pop(place, None)


def _places(incarnation: str, extents: Extents) -> Iterable[Place]:
    return ((incarnation, extent.space, page) for extent in extents for page in extent.pages)
