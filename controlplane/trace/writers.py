"""Writes of a rank's own loads, and pages that go from one owner to the next."""

from __future__ import annotations

from collections.abc import Callable

from dsv4ctl.controlplane.trace.findings import Findings, access, handing_on
from dsv4ctl.controlplane.trace.format import Event, Extents
from dsv4ctl.controlplane.trace.peers import Peers
from dsv4ctl.controlplane.trace.races import Race, RaceKind
from dsv4ctl.controlplane.trace.state import Exposure, Load, Page, RankState, Ticket, remember


class Writers:
    def __init__(self, findings: Findings, peers: Peers) -> None:
        self._findings = findings
        self._peers = peers

    def handlers(self) -> dict[str, Callable[[RankState, Event, Extents], None]]:
        return {
            "allocate": self._allocate,
            "lease": self._lease,
            "landed": self._landed,
            "verified": self._verified,
            "seal": self._seal,
            "failed": self._failed,
            "ended": self._ended,
        }

    # ---- owners --------------------------------------------------------------------------------------

    def _allocate(self, rank: RankState, event: Event, extents: Extents) -> None:
        for extent in extents:
            for number in extent.pages:
                page = rank.page(extent.space, number)
                if not page.idle():
                    self._reuse(rank, page, event)
                page.owner, page.unfilled = event, None
                if page.generation is not None:
                    page.generation += 1

    def _lease(self, rank: RankState, event: Event, extents: Extents) -> None:
        load = rank.loads[event.subject] = Load(event, extents, known=True)
        generations: dict[tuple[str, int], int] = {}
        for extent in extents:
            for number, generation in zip(extent.pages, extent.generations, strict=True):
                page = rank.page(extent.space, number)
                if page.load is load:
                    continue  # two extents of it share the page
                if not page.idle():
                    self._reuse(rank, page, event)
                if page.race is not None:
                    page.race.owner = page.race.owner or handing_on(rank, event)
                    page.race = None
                page.owner, page.load, page.unfilled = event, load, None
                page.generation = generations[extent.space, number] = generation
                load.pages.append(page)
        if load.kind == "transfer":
            load.exposure = Exposure(event.room, event, generations)
            remember(rank.exposures, event.room, load.exposure)
            for page in load.pages:
                page.exposure = load.exposure

    def _reuse(self, rank: RankState, page: Page, event: Event) -> None:
        """The page goes to another owner: everybody who touched it must be done, as far as this event can know."""
        races = [self._peers.reuse(rank, page, event)]
        if page.load is not None:
            page.load.lost = event
            races.append(self._under_load(rank, page, page.load, event))
        for ticket in page.readers:
            if ticket.reads:
                races.append(self._under_reader(rank, page, ticket, event))
            ticket.stale.append(page)
        if event.kind == "allocate":
            page.race = next((race for race in races if race is not None), None)
        page.readers.clear()
        page.load = page.exposure = None
        page.writes = []

    def _under_load(self, rank: RankState, page: Page, load: Load, event: Event) -> Race | None:
        return self._findings.add(
            RaceKind.REUSE_BEFORE_QUIESCENCE,
            rank,
            (load.event.seq, event.seq),
            [page],
            access(rank, load.event, "write", load.kind),
            handing_on(rank, event),
            f"ended ({load.kind}) -> free -> {event.kind}",
            room=load.event.room,
        )

    def _under_reader(self, rank: RankState, page: Page, ticket: Ticket, event: Event) -> Race | None:
        return self._findings.add(
            RaceKind.WRITE_UNDER_READ,
            rank,
            (event.seq, ticket.event.subject),
            [page],
            access(rank, ticket.last or ticket.event, "read", ticket.who),
            handing_on(rank, event),
            f"release ({ticket.who}) -> {event.kind}",
            room=ticket.event.room,
        )

    # ---- loads ---------------------------------------------------------------------------------------

    def _landed(self, rank: RankState, event: Event, extents: Extents) -> None:
        load = self._load(rank, event, extents)
        if load.exposure is not None and load.exposure.peers:
            return  # a peer may still be writing: whatever this says, nothing is ordered after its bytes
        load.landed = event.value
        if not load.verify:
            load.settle_early(event)
        if load.lost is not None:
            self._peers.late_write(rank, load.lost, event, load.kind, load.extents)

    def _verified(self, rank: RankState, event: Event, extents: Extents) -> None:
        load = self._load(rank, event, extents)
        load.verified = event.value
        load.landed = max(load.landed, event.value) if not load.known else load.landed
        load.settle_early(event)

    def _load(self, rank: RankState, event: Event, extents: Extents) -> Load:
        """One whose lease is older than the trace is taken as it is found."""
        load = rank.loads.get(event.subject)
        if load is None:
            load = rank.loads[event.subject] = Load(event, extents, known=False)
            for generation, page in rank.each(extents):
                if page.generation in (None, generation) and page.load is None:
                    page.generation, page.load = generation, load
                    load.pages.append(page)
        return load

    def _seal(self, rank: RankState, event: Event, extents: Extents) -> None:
        load = rank.loads.get(event.subject)
        for extent in extents:
            for number in extent.pages:
                page = rank.page(extent.space, number)
                if load is not None and page.load is load:
                    page.load = None

    def _failed(self, rank: RankState, event: Event, extents: Extents) -> None:
        load = rank.loads.get(event.subject)
        if load is not None:
            load.failed = True

    def _ended(self, rank: RankState, event: Event, extents: Extents) -> None:
        load = rank.loads.pop(event.subject, None)
        if load is None:
            return
        load.open = False
        unfilled = None if load.whole(rank.rank.layers) else load
        for page in load.pages:
            if page.load is load:
                page.load, page.unfilled = None, unfilled
