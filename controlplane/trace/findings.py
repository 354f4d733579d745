"""The races found so far: one entry for the same two sides, bounded, with what a reader of the report needs."""

from __future__ import annotations

from typing import Any

from dsv4ctl.controlplane.trace.format import Event
from dsv4ctl.controlplane.trace.races import Access, Race, RaceKind
from dsv4ctl.controlplane.trace.state import Page, RankState

#: Races kept, each between two sides; more are counted.
MAX_RACES = 10_000


class Findings:
    """`accesses` counts every racing access; `dropped` those of races beyond MAX_RACES."""

    def __init__(self) -> None:
        self.accesses = 0
        self.dropped = 0
        self._races: dict[tuple[Any, ...], Race] = {}

    def races(self) -> list[Race]:
        return list(self._races.values())

    def add(
        self,
        kind: RaceKind,
        rank: RankState,
        key: tuple[Any, ...],
        pages: list[Page],
        first: Access | None,
        second: Access,
        missing: str,
        *,
        room: str | None = None,
        pool: str = "",
        layer: int = -1,
        generations: tuple[int, ...] | None = None,
    ) -> Race | None:
        """Counts a racing access. `rank` is that of the pages, `key` the two sides, `room` that of `second` if None.

        None for a race beyond those kept.
        """
        self.accesses += 1
        key = (kind, rank.rank.incarnation, *key)
        race = self._races.get(key)
        if race is not None:
            _join(race, pages, layer, generations)
            return race
        if len(self._races) >= MAX_RACES:
            self.dropped += 1
            return None
        race = self._races[key] = Race(
            kind=kind,
            rank=rank.rank.name,
            room=second.room if room is None else room,
            consumer=second.who if second.action == "read" else "",
            space=",".join(sorted({page.space for page in pages})),
            pool=pool,
            pages=tuple(page.number for page in pages),
            generations=_generations(pages) if generations is None else generations,
            layers=[layer] if layer >= 0 else [],
            first=first,
            second=second,
            missing=missing,
        )
        return race


def access(rank: RankState, event: Event, action: str, who: str) -> Access:
    where = rank.rank.consumers.get(who, "") if action == "read" else ""
    return Access(rank.rank.name, event.agent, action, who, event.room, event.seq, event.at_ns, where)


def handing_on(rank: RankState, event: Event) -> Access:
    """The access by which a page got its next owner: a lease is the begin of its writes."""
    return access(rank, event, "write" if event.kind == "lease" else event.kind, event.who)


def _join(race: Race, pages: list[Page], layer: int, generations: tuple[int, ...] | None) -> None:
    race.count += 1
    if layer >= 0 and layer not in race.layers:
        race.layers.append(layer)
    new = [page for page in pages if page.number not in race.pages]
    if new:
        race.pages += tuple(page.number for page in new)
        race.generations += _generations(new) if generations is None else generations


def _generations(pages: list[Page]) -> tuple[int, ...]:
    return tuple(page.generation for page in pages if page.generation is not None)
