"""What the detector reports: two accesses, where they met, and the edge that would have ordered them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from typing import Any

import msgspec


class RaceKind(Enum):
    READ_BEFORE_LAND = "read-before-land"
    WRITE_UNDER_READ = "write-under-read"
    REUSE_BEFORE_QUIESCENCE = "reuse-before-quiescence"
    STALE_GENERATION = "stale-generation"


class Access(msgspec.Struct, frozen=True):
    """One side. `action`: `read`, `write`, or how a page was handed on (`allocate`); `who`: consumer or load kind."""

    rank: str
    agent: str
    action: str
    who: str
    room: str
    seq: int
    at_ns: int
    where: str = ""  #: in the engine, if the trace knows

    def __str__(self) -> str:
        place = f", {self.where}" if self.where else ""
        room = f"room {self.room}" if self.room else "no room's"
        return f"{self.action} by {self.who or 'the allocator'} ({room}, {self.rank} [{self.agent}{place}] #{self.seq})"


class Race(msgspec.Struct):
    """`first` is the access that was not over, or whose right had gone, when `second` came.

    `count` accesses of the same kind between the same two sides; `layers` are those they touched (empty: all).
    """

    kind: RaceKind
    rank: str  #: whose pages
    room: str
    consumer: str  #: who read without a right; empty if no reader is to blame
    space: str
    pool: str  #: `*`: every pool
    pages: tuple[int, ...]
    generations: tuple[int, ...]
    layers: list[int]
    first: Access | None  #: None: it happened before the trace begins
    second: Access
    missing: str
    count: int = 1
    owner: Access | None = None  #: whose write lease took pages over that were allocated too early
    landed_after_ns: int | None = None  #: how long after the first early read its bytes were in place

    def sentence(self) -> str:
        layers = f" layer {ranges(self.layers)}" if self.layers else ""
        generations = ",".join(str(one) for one in sorted(set(self.generations))) or "?"
        pool = "all pools" if self.pool == "*" else self.pool or "all pools"
        what = f"{pool}{layers} of {self.space} pages {ranges(self.pages)} (generation {generations})"
        first = str(self.first) if self.first else "what was before the trace begins"
        times = f" {self.count} times" if self.count > 1 else ""
        match self.kind:
            case RaceKind.READ_BEFORE_LAND:
                after = self.landed_after_ns
                late = "it never landed in this trace" if after is None else f"it landed {after / 1e6:.3f} ms later"
                told = f"{self.second}{times}, {what}, not ordered after the {first}; {late}"
            case RaceKind.STALE_GENERATION:
                told = f"{what}: {self.second}{times}, after its pages had gone on by the {first}"
            case _:
                owner = f", then taken over by the {self.owner}" if self.owner else ""
                told = f"{what}: {self.second}{times}{owner}, while nothing had ended the {first}"
        return f"{self.kind.value}: {told}. Missing edge: {self.missing}."


class Report(msgspec.Struct):
    """`dropped`: races beyond those kept. `resets`: gaps, after which a rank's state was learned anew."""

    races: list[Race]
    events: int
    ranks: list[str]
    accesses: int = 0  #: racing accesses in all
    dropped: int = 0
    resets: int = 0
    cut: str | None = None

    def consumers(self) -> dict[str, list[str]]:
        """By room, who read there without a right."""
        found: dict[str, set[str]] = {}
        for race in self.races:
            if race.consumer:
                found.setdefault(race.room, set()).add(race.consumer)
        return {room: sorted(names) for room, names in sorted(found.items())}

    def rows(self) -> list[dict[str, Any]]:
        """One row a kind of race between the same parties, most accesses first, with an example."""
        rows: dict[tuple[str, ...], dict[str, Any]] = {}
        rooms: dict[tuple[str, ...], set[str]] = {}
        accesses: Counter[tuple[str, ...]] = Counter()
        for race in self.races:
            other = race.first.who if race.first else "?"
            key = (race.kind.value, race.second.who or "allocator", race.pool or "*", other or "allocator", race.rank)
            rows.setdefault(key, {"example": race.sentence()})
            rooms.setdefault(key, set()).add(race.room)
            accesses[key] += race.count
        names = ("kind", "who", "pool", "against", "rank")
        return [
            {**dict(zip(names, key, strict=True)), "rooms": len(rooms[key]), "accesses": count, **rows[key]}
            for key, count in accesses.most_common()
        ]


def ranges(numbers: Iterable[int]) -> str:
    """`0-3,7`: numbers as ranges."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
