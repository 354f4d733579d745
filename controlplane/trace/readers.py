"""Reads under tickets, and reads under none."""

from __future__ import annotations

from collections.abc import Callable

from dsv4ctl.controlplane.trace.findings import Findings, access, handing_on
from dsv4ctl.controlplane.trace.format import Event, Extents
from dsv4ctl.controlplane.trace.peers import Peers
from dsv4ctl.controlplane.trace.races import RaceKind
from dsv4ctl.controlplane.trace.state import Load, Page, RankState, Ticket

#: Early reads of one load whose landing is waited for, to say how late it was.
_EARLY = 256


class Readers:
    def __init__(self, findings: Findings, peers: Peers) -> None:
        self._findings = findings
        self._peers = peers

    def handlers(self) -> dict[str, Callable[[RankState, Event, Extents], None]]:
        return {
            "request": self._request,
            "extend": self._extend,
            "trim": self._trim,
            "grant": self._grant,
            "read": self._read,
            "post": self._post,
            "complete": self._complete,
            "release": self._release,
            "revoked": self._revoked,
            "unregistered": self._unregistered,
        }

    # ---- tickets -------------------------------------------------------------------------------------

    def _request(self, rank: RankState, event: Event, extents: Extents) -> None:
        ticket = rank.tickets[event.subject] = Ticket(event)
        self._join(rank, ticket, event, extents)

    def _extend(self, rank: RankState, event: Event, extents: Extents) -> None:
        ticket = rank.tickets.get(event.subject)
        if ticket is not None:
            self._join(rank, ticket, event, extents)

    def _join(self, rank: RankState, ticket: Ticket, event: Event, extents: Extents) -> None:
        ticket.readable = event.value
        for extent in extents:
            for number, generation in zip(extent.pages, extent.generations, strict=True):
                page = rank.page(extent.space, number)
                if page.generation is None:
                    page.generation = generation
                elif page.generation != generation:
                    self._stale(rank, page, event, generation, "extent -> request")
                page.readers[ticket] = None
                ticket.pages.append(page)
                load = page.load or page.unfilled
                if load is not None and load not in ticket.loads:
                    ticket.loads.append(load)

    def _trim(self, rank: RankState, event: Event, extents: Extents) -> None:
        ticket = rank.tickets.get(event.subject)
        if ticket is None:
            return
        gone = {rank.page(extent.space, number) for extent in extents for number in extent.pages}
        for page in gone:
            page.readers.pop(ticket, None)
        ticket.pages = [page for page in ticket.pages if page not in gone]

    def _grant(self, rank: RankState, event: Event, extents: Extents) -> None:
        ticket = rank.tickets.get(event.subject)
        if ticket is not None:
            ticket.readable = event.value

    def _post(self, rank: RankState, event: Event, extents: Extents) -> None:
        ticket = rank.tickets.get(event.subject)
        if ticket is not None:
            ticket.posted += 1

    def _complete(self, rank: RankState, event: Event, extents: Extents) -> None:
        self._peers.completed(rank, event)
        ticket = rank.tickets.get(event.subject)
        if ticket is not None:
            ticket.posted -= 1
            if ticket.left and ticket.posted <= 0:
                self._drop(rank, event)

    def _release(self, rank: RankState, event: Event, extents: Extents) -> None:
        ticket = rank.tickets.get(event.subject)
        if ticket is not None and ticket.posted > 0:
            ticket.left = True  # what was posted still reads
        else:
            self._drop(rank, event)

    def _revoked(self, rank: RankState, event: Event, extents: Extents) -> None:
        self._drop(rank, event)

    def _drop(self, rank: RankState, event: Event) -> None:
        ticket = rank.tickets.pop(event.subject, None)
        if ticket is not None:
            for page in ticket.pages:
                page.readers.pop(ticket, None)

    # ---- reads ---------------------------------------------------------------------------------------

    def _read(self, rank: RankState, event: Event, extents: Extents) -> None:
        ticket = rank.tickets.get(event.subject)
        if ticket is None:
            ticket = self._adopt(rank, event, extents)
        ticket.last = event
        if ticket.stale:
            for page in ticket.stale:
                self._stale(rank, page, event, None, f"release ({event.who}) -> reuse")
            ticket.stale = []
        if ticket.loads:
            self._under_loads(rank, ticket, event)

    def _under_loads(self, rank: RankState, ticket: Ticket, event: Event) -> None:
        layers = rank.rank.layers
        done = True
        for load in ticket.loads:
            readable = load.readable(ticket.who)
            if readable <= event.layer and load.fills(event.pool):
                self._early(rank, load, event, ticket)
            done = done and readable >= layers
        if done:
            ticket.loads = []

    def _early(self, rank: RankState, load: Load, event: Event, ticket: Ticket) -> None:
        held = set(ticket.pages)
        what = "verified" if load.verify and load.landed > event.layer else "landed"
        edge = f"{what} ({load.kind}, layer {event.layer}) -> grant ({event.who}) -> read"
        if load.exposure is not None and load.exposure.peers:
            edge = f"landed frame of {self._peers.names(load.exposure.peers)} -> {edge}"
        race = self._findings.add(
            RaceKind.READ_BEFORE_LAND,
            rank,
            (load.event.seq, event.who, event.pool, event.room),
            [page for page in load.pages if page in held],
            access(rank, load.event, "write", load.kind),
            access(rank, event, "read", event.who),
            edge,
            pool=event.pool,
            layer=event.layer,
        )
        if race is not None and load.open and len(load.early) < _EARLY:
            load.early.append((event.layer, race, event))

    def _adopt(self, rank: RankState, event: Event, extents: Extents) -> Ticket:
        """A read under a ticket whose request is older than the trace, or that has ended already."""
        ticket = Ticket(event)
        for generation, page in rank.each(extents):
            if page.generation is None:
                page.generation = generation
            elif page.generation != generation:
                self._stale(rank, page, event, generation, f"release ({event.who}) -> reuse")
                continue
            load = page.load or page.unfilled
            if load is not None and load not in ticket.loads:
                ticket.loads.append(load)
            ticket.pages.append(page)
        if event.value <= event.layer and not ticket.loads:
            self._before_the_trace(rank, event, ticket)
        if event.value:  # it lives: what has ended grants nothing
            rank.tickets[event.subject] = ticket
            for page in ticket.pages:
                page.readers[ticket] = None
        return ticket

    def _before_the_trace(self, rank: RankState, event: Event, ticket: Ticket) -> None:
        """The rank says that nothing granted it; what writes the pages began before the trace."""
        if ticket.pages and all(page.owner is None for page in ticket.pages):
            self._findings.add(
                RaceKind.READ_BEFORE_LAND,
                rank,
                (event.subject, event.who, event.pool, event.room),
                ticket.pages,
                None,
                access(rank, event, "read", event.who),
                f"landed -> grant ({event.who}) -> read",
                pool=event.pool,
                layer=event.layer,
            )

    def _unregistered(self, rank: RankState, event: Event, extents: Extents) -> None:
        self._findings.add(
            RaceKind.READ_BEFORE_LAND,
            rank,
            ("unregistered", event.who, event.room),
            [page for _, page in rank.each(extents)],
            None,
            access(rank, event, "read", event.who),
            f"register ({event.who}) -> request -> grant -> read",
        )

    def _stale(self, rank: RankState, page: Page, event: Event, generation: int | None, missing: str) -> None:
        """A read of a page that has another owner by now; `generation` is the one that was meant."""
        self._findings.add(
            RaceKind.STALE_GENERATION,
            rank,
            (event.subject, event.who, event.room, page.space, page.generation),
            [page],
            None if page.owner is None else handing_on(rank, page.owner),
            access(rank, event, "read", event.who),
            missing,
            pool=event.pool,
            layer=event.layer,
            generations=None if generation is None else (generation,),
        )
