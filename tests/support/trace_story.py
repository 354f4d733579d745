"""Traces written by hand: one call an event, each rank numbering its own; told to the detector in the order written."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

from dsv4ctl.controlplane.trace.check import check
from dsv4ctl.controlplane.trace.format import Event, Events, Extent, Extents, Header, Rank, encode
from dsv4ctl.controlplane.trace.merge import Merged
from dsv4ctl.controlplane.trace.races import Report

LAYERS = 3
P, D = "P", "D"
ROOM = "7.1"


def rank(incarnation: str, layers: int = LAYERS) -> Rank:
    name = {P: "prefill0", D: "decode0"}.get(incarnation, incarnation)
    return Rank(name, 0, "single", incarnation, 1, layers, 0, 0, {"indexer": "model: index_k"})


class Story:
    """Pages are of space `full`; `generation` is the one an event means."""

    def __init__(self, *incarnations: str) -> None:
        self.ranks = {incarnation: rank(incarnation) for incarnation in incarnations or (D,)}
        self.merged: list[Merged] = []
        self.default = next(iter(self.ranks))
        self._seq: Counter[str] = Counter()
        self._time = itertools.count(1_000_000, 1_000_000)

    def tell(
        self,
        kind: str,
        who: str = "",
        *,
        on: str | None = None,
        room: str = "",
        subject: int = 0,
        pages: tuple[int, ...] = (),
        generation: int | None = None,
        agent: str = "step",
        pool: str = "",
        layer: int = -1,
        value: int = 0,
        note: str = "",
    ) -> None:
        incarnation = on or self.default
        extents: Extents = ()
        if pages:
            generations = () if generation is None else (generation,) * len(pages)
            extents = (Extent("full", pages, generations, ("index_k",) if generation else ()),)
        event = Event(
            self._seq[incarnation], next(self._time), kind, agent, room, who, subject, -1, pool, layer, value, note
        )
        self._seq[incarnation] += 1
        self.merged.append(Merged(incarnation, event, extents))

    def lose(self, events: int, on: str | None = None) -> None:
        """The ring dropped so many before the next one."""
        self._seq[on or self.default] += events

    def report(self) -> Report:
        return check(self.ranks, self.merged)

    def kinds(self) -> list[str]:
        return [race.kind.value for race in self.report().races]

    # ---- what happens often -------------------------------------------------------------------------

    def allocate(self, *pages: int) -> None:
        self.tell("allocate", pages=pages)

    def lease(
        self, subject: int, *pages: int, generation: int, kind: str = "hicache", room: str = "", verify: bool = False
    ) -> None:
        self.tell("lease", kind, subject=subject, pages=pages, generation=generation, room=room, value=int(verify))

    def landed(self, subject: int, *pages: int, generation: int, layers: int = LAYERS, what: str = "landed") -> None:
        self.tell(what, "hicache", subject=subject, pages=pages, generation=generation, value=layers, agent="load")

    def ended(self, subject: int, *pages: int, generation: int, kind: str = "hicache") -> None:
        self.tell("ended", kind, subject=subject, pages=pages, generation=generation)

    def filled(self, subject: int, *pages: int, generation: int) -> None:
        """A load, from its lease to its end."""
        self.lease(subject, *pages, generation=generation)
        self.landed(subject, *pages, generation=generation)
        self.ended(subject, *pages, generation=generation)

    def request(self, subject: int, *pages: int, generation: int, readable: int = 0, who: str = "indexer") -> None:
        self.tell("request", who, room=ROOM, subject=subject, pages=pages, generation=generation, value=readable)

    def read(
        self, subject: int, *pages: int, generation: int, layer: int = 0, readable: int = 0, who: str = "indexer"
    ) -> None:
        self.tell(
            *("read", who), room=ROOM, subject=subject, pages=pages, generation=generation,
            pool="index_k", layer=layer, value=readable,
        )  # fmt: skip

    def release(self, subject: int, who: str = "indexer") -> None:
        self.tell("release", who, room=ROOM, subject=subject)

    def exposed(self, subject: int, *pages: int, generation: int, room: str = ROOM) -> None:
        """Rank D leases pages for a room, and tells P where they are."""
        self.tell("lease", "transfer", on=D, room=room, subject=subject, pages=pages, generation=generation)
        self.tell("sent", P, on=D, room=room, note="destination")
        if P in self.ranks:
            self.tell("received", D, on=P, room=room, note="destination")

    def write(self, subject: int, *pages: int, room: str = ROOM) -> None:
        self.tell("write", D, on=P, room=room, subject=subject, pages=pages, note="chunk 0", agent="transfer")

    def complete(self, subject: int) -> None:
        self.tell("complete", "sender", on=P, subject=subject, agent="transfer")

    def acked(self, room: str = ROOM) -> None:
        """P's ack, sent and received."""
        if P in self.ranks:
            self.tell("sent", D, on=P, room=room, note="ack:quiet")
        self.tell("received", P, on=D, room=room, note="ack:quiet")

    # ---- as a file ----------------------------------------------------------------------------------

    def save(self, path: Path) -> Path:
        """The ranks' frames one after the other, two events a frame."""
        with path.open("wb") as file:
            file.write(encode(Header()))
            for incarnation, told in self.ranks.items():
                file.write(encode(told))
                mine = [one for one in self.merged if one.incarnation == incarnation]
                for at in range(0, len(mine), 2):
                    file.write(encode(_frame(incarnation, mine[at : at + 2])))
        return path


def _frame(incarnation: str, events: list[Merged]) -> Events:
    table = [one.extents for one in events]
    for number, one in enumerate(events):
        one.event.extents = number if one.extents else -1
    return Events(incarnation, 0, table, [one.event for one in events])
