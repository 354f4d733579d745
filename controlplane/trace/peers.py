"""Writes that cross ranks, and the frames that order them: vector clocks with one component a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from dsv4ctl.controlplane.trace.findings import Findings, access, handing_on
from dsv4ctl.controlplane.trace.format import Event, Extent, Extents
from dsv4ctl.controlplane.trace.merge import FrameKey, frame_key
from dsv4ctl.controlplane.trace.races import Access, Race, RaceKind
from dsv4ctl.controlplane.trace.state import Page, RankState, Write, remember

_DONE = ("closed", "aborted")


class Peers:
    def __init__(self, findings: Findings, ranks: Mapping[str, RankState]) -> None:
        self._findings = findings
        self._ranks = ranks
        self._frames: dict[FrameKey, dict[str, int]] = {}  #: clocks of frames sent and not yet received

    def handlers(self) -> dict[str, Callable[[RankState, Event, Extents], None]]:
        return {
            "write": self._write,
            "sent": self._sent,
            "received": self._received,
            "fenced": self._fenced,
            "room": self._room,
        }

    def names(self, incarnations: Iterable[str]) -> str:
        states = ((incarnation, self._ranks.get(incarnation)) for incarnation in sorted(incarnations))
        return ", ".join(state.rank.name if state else incarnation for incarnation, state in states)

    # ---- pages of this rank that peers write ---------------------------------------------------------

    def reuse(self, rank: RankState, page: Page, event: Event) -> Race | None:
        """The page goes to another owner: every peer's write must be known to be over. Returns a race, if one is."""
        found = None
        exposure = page.exposure
        peers = set(exposure.peers) if exposure else set()
        if exposure is not None and peers:
            exposure.reused = exposure.reused or event
            names = self.names(peers)
            edge = f"ack of {names} (or its landed frame, or its fence) -> free -> {event.kind}"
            first = access(rank, exposure.event, f"write from {names}", "transfer")
            found = self._reused(rank, page, first, event, edge)
        for write in page.writes:
            if write.by in peers or (exposure is not None and write.by in exposure.quiet):
                continue
            if write.end is None or write.end > rank.clock.get(write.by, -1):
                writer = self._ranks[write.by]
                edge = f"complete on {writer.rank.name} -> ack -> free -> {event.kind}"
                found = self._reused(rank, page, access(writer, write.begin, "write", "sender"), event, edge)
        return found

    def _reused(self, rank: RankState, page: Page, first: Access, event: Event, missing: str) -> Race | None:
        key = (first.rank, first.seq, event.seq)
        second = handing_on(rank, event)
        return self._findings.add(
            RaceKind.REUSE_BEFORE_QUIESCENCE, rank, key, [page], first, second, missing, room=first.room
        )

    def late_write(self, rank: RankState, reuse: Event, event: Event, kind: str, extents: Extents) -> None:
        """Bytes of `kind` came for pages that have had another owner since `reuse`."""
        moved = [
            (page, generation) for generation, page in rank.each(extents) if page.generation not in (None, generation)
        ]
        if moved:
            self._findings.add(
                RaceKind.STALE_GENERATION,
                rank,
                (kind, event.room, reuse.seq),
                [page for page, _ in moved],
                handing_on(rank, reuse),
                access(rank, event, "write", kind),
                f"ended ({kind}) -> free -> {reuse.kind}",
                generations=tuple(generation for _, generation in moved),
            )

    # ---- writes of this rank -------------------------------------------------------------------------

    def _write(self, rank: RankState, event: Event, extents: Extents) -> None:
        """A write into the pages of the peer `who` is posted."""
        write = rank.flights[event.subject] = Write(rank.rank.incarnation, event.who, event)
        acked = rank.acked.get((event.room, event.who))
        if acked is not None:
            self._not_quiet(rank, write, acked, f"last write -> ack to {self.names([event.who])}")
        target = self._ranks.get(event.who)
        if target is not None:
            self._arrives(rank, target, write, extents)

    def completed(self, rank: RankState, event: Event) -> None:
        write = rank.flights.pop(event.subject, None)
        if write is not None:
            write.end = event.seq

    def _arrives(self, rank: RankState, target: RankState, write: Write, extents: Extents) -> None:
        exposure = target.exposures.get(write.begin.room)
        if exposure is None:
            return  # exposed before the trace begins
        told = rank.clock.get(target.rank.incarnation, -1) >= exposure.event.seq
        for extent in extents:
            for number in extent.pages:
                page = target.page(extent.space, number)
                leased = exposure.generations.get((extent.space, number))
                if leased is not None and page.exposure is not exposure and page.generation not in (None, leased):
                    self._stale(rank, target, page, write, leased)
                    continue
                page.writes.append(write)
                if not told:
                    self._untold(rank, target, page, write, exposure.event)

    def _stale(self, rank: RankState, target: RankState, page: Page, write: Write, generation: int) -> None:
        owner = page.owner
        self._findings.add(
            RaceKind.STALE_GENERATION,
            target,
            (write.by, write.begin.seq),
            [page],
            None if owner is None else handing_on(target, owner),
            access(rank, write.begin, "write", "sender"),
            f"complete on {rank.rank.name} -> ack -> free -> reuse",
            generations=(generation,),
        )

    def _untold(self, rank: RankState, target: RankState, page: Page, write: Write, lease: Event) -> None:
        self._findings.add(
            RaceKind.STALE_GENERATION,
            target,
            (write.by, write.begin.seq, "untold"),
            [page],
            access(target, lease, "lease", "transfer"),
            access(rank, write.begin, "write", "sender"),
            f"destination frame of {target.rank.name} -> write",
        )

    def _not_quiet(self, rank: RankState, write: Write, ack: Event, missing: str) -> None:
        owner = self._ranks.get(write.target, rank)
        first, second = access(rank, write.begin, "write", "sender"), access(rank, ack, "ack", "sender")
        key = (write.by, write.begin.room, write.target)
        self._findings.add(RaceKind.REUSE_BEFORE_QUIESCENCE, owner, key, [], first, second, missing)

    # ---- frames --------------------------------------------------------------------------------------

    def _sent(self, rank: RankState, event: Event, extents: Extents) -> None:
        key = frame_key(rank.rank.incarnation, event)
        if key not in self._frames:  # of a frame that is sent again, what the first one says counts
            remember(self._frames, key, {**rank.clock, rank.rank.incarnation: event.seq})
        if event.note == "destination":
            exposure = rank.exposures.get(event.room)
            if exposure is not None and event.who not in exposure.quiet:
                exposure.peers.add(event.who)
        elif event.note == "ack:quiet":
            remember(rank.acked, (event.room, event.who), event)
            for write in rank.flights.values():
                if write.begin.room == event.room and write.target == event.who:
                    self._not_quiet(rank, write, event, f"complete -> ack to {self.names([event.who])}")

    def _received(self, rank: RankState, event: Event, extents: Extents) -> None:
        clock = self._frames.pop(frame_key(rank.rank.incarnation, event), None)
        if clock is not None:
            for incarnation, seq in clock.items():
                if seq > rank.clock.get(incarnation, -1):
                    rank.clock[incarnation] = seq
        exposure = rank.exposures.get(event.room)
        if exposure is None:
            return
        if event.note == "landed":
            exposure.settle(event.who)
        elif event.note == "ack:quiet":
            exposure.peers.discard(event.who)
        elif event.note == "late" and exposure.reused is not None:
            pages = tuple(Extent(space, (number,), (g,)) for (space, number), g in exposure.generations.items())
            self.late_write(rank, exposure.reused, event, "transfer", pages)

    def _fenced(self, rank: RankState, event: Event, extents: Extents) -> None:
        for exposure in rank.exposures.values():
            exposure.settle(event.who)

    def _room(self, rank: RankState, event: Event, extents: Extents) -> None:
        exposure = rank.exposures.get(event.room)
        if event.note in _DONE and exposure is not None and not exposure.peers and exposure.reused is None:
            del rank.exposures[event.room]
