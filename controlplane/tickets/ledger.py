"""The ticket ledger of one rank: who may read which pages, who may write them, which may be reused (S1-S3, S7).

A pure state machine: calls in, changed tickets out; no clock, no locks, no I/O. `gate` puts a lock, waiting and
the event trace around it. Every call either succeeds or raises LedgerError and changes nothing but `refused`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from msgspec.structs import replace

from dsv4ctl.controlplane.tickets.space import OWNED, QUARANTINED, RETIRING, Space
from dsv4ctl.controlplane.tickets.ticket import Load, Ticket
from dsv4ctl.controlplane.tickets.types import Consumer, Extent, LoadKind, SpaceSpec, TicketState

PENDING, GRANTED, REVOKING = TicketState.PENDING, TicketState.GRANTED, TicketState.REVOKING
RELEASED, REVOKED = TicketState.RELEASED, TicketState.REVOKED
FORWARD, LOAD = LoadKind.FORWARD, Consumer.LOAD


class LedgerError(Exception):
    """The call would break an invariant, or names something that is not so; nothing was changed."""


class Ledger:
    """Spaces by name, tickets by room."""

    def __init__(self, spaces: Mapping[str, SpaceSpec], layers: int) -> None:
        self.layers = layers
        self.refused = 0
        self.loads: set[Load] = set()
        self._spaces = {name: Space(name, spec) for name, spec in spaces.items()}
        self._by_room: dict[Any, Ticket] = {}  #: the newest live one; `after` leads to the others

    @property
    def tickets(self) -> int:
        """Live ones: pending, granted or revoking."""
        return len(self.live())

    # ---- pages -------------------------------------------------------------------------------------

    def allocate(self, wants: Mapping[str, int]) -> dict[str, tuple[int, ...]] | None:
        """`wants[space]` pages of each space, all or nothing (None): no hold-and-wait. Generations rise by one."""
        if any(len(self._space(name).free) < count for name, count in wants.items()):
            return None
        return {name: tuple(self._spaces[name].take() for _ in range(n)) for name, n in wants.items()}

    def extent(self, space: str, pages: Iterable[int], pools: Iterable[str] | None = None) -> Extent:
        """These pages at their present generations; `pools` None: every pool of the space.

        Raises LedgerError for a space, page or pool that does not exist, or no pool at all.
        """
        found, pages = self._space(space), tuple(pages)
        names = found.pools if pools is None else frozenset(pools)
        if not names or not names <= found.pools:
            self._refuse(f"space {space} has pools {sorted(found.pools)}, asked are {sorted(names)}")
        self._check_exist(found, pages)
        return Extent(space, pages, tuple(found.generation[page] for page in pages), names)

    def free(self, space: str, pages: Iterable[int], *, guarded: bool = True) -> int:
        """Gives pages back. Each is reusable once its last reader released it and its load ended (S2, S3).

        `guarded` False: a guard is off, and neither their load nor who waits for it keeps them. Returns how many are
        reusable at once. Raises LedgerError for a page that is not owned, or named twice.
        """
        found, pages = self._space(space), tuple(pages)
        self._check_exist(found, pages)
        if len(set(pages)) < len(pages):
            self._refuse(f"{space} pages {pages} are freed, and one of them twice")
        for page in pages:
            if found.state[page] != OWNED:
                self._refuse(f"{space} page {page} is freed, but nobody owns it")
        for page in () if guarded else pages:
            self._forget_load(found, page)
        return sum(found.give_back(page) for page in pages)

    def loading(self, space: str, pages: Iterable[int]) -> int:
        """How many of the pages an open load fills."""
        return sum(self._space(space).load[page] is not None for page in pages)

    def stale(self, ticket: Ticket) -> bool:
        """A page of the ticket has gone on to somebody else: never, if it holds."""
        return any(
            self._spaces[extent.space].generation[page] != generation
            for extent in ticket.extents
            for page, generation in zip(extent.pages, extent.generations, strict=True)
        )

    def available(self, space: str) -> int:
        return len(self._space(space).free)

    def spaces(self) -> tuple[str, ...]:
        return tuple(self._spaces)

    def retiring(self, space: str) -> int:
        """Pages that were given back, and come free when their last reader and writer are gone."""
        return self._space(space).state.count(RETIRING)

    def counts(self) -> dict[str, dict[str, int]]:
        """Pages by state and space, and leased pages (under an open load)."""
        spaces = {space.name: space.counts() for space in self._spaces.values()}
        states = ("free", "owned", "retiring", "quarantined", "leased")
        return {state: {name: found[state] for name, found in spaces.items()} for state in states}

    # ---- writers -----------------------------------------------------------------------------------

    def open_load(self, kind: LoadKind, extents: Sequence[Extent], *, room: Any = None, verify: bool = False) -> Load:
        """Leases the pages to one writer; generations rise by one, what they held is no longer readable.

        Raises LedgerError if a page is not owned at the named generation, is read by a ticket, is already being
        written, or lies where this kind does not write: only a backup writes to the host.
        """
        for extent in extents:
            space = self._space(extent.space)
            if space.on_host is not (kind is LoadKind.BACKUP):
                self._refuse_side(space, kind, "writes")
            for page, generation in zip(extent.pages, extent.generations, strict=True):
                if space.state[page] != OWNED or space.generation[page] != generation:
                    self._refuse_stale(space, page, generation)
                if not space.quiet(page):
                    who = "a ticket reads it" if space.readers[page] else "another load writes it"
                    self._refuse(f"{kind.value} may not write {extent.space} page {page}: {who}")
        load = Load(kind, room, verify)
        for extent in extents:
            for page in extent.pages:
                self._spaces[extent.space].lease(page, load, extent.pools)
        # Named once every page has its generation: two extents may share a page and differ in pools.
        load.extents = tuple(self.extent(extent.space, extent.pages, extent.pools) for extent in extents)
        self.loads.add(load)
        return load

    def layer_landed(self, load: Load, layers: int) -> list[Ticket]:
        """The first `layers` layers of the load are in place. Returns the tickets whose grant grew."""
        self._check_watermark(load, load.landed, layers)
        load.landed = layers
        return self._regrant(load)

    def layer_verified(self, load: Load, layers: int) -> list[Ticket]:
        """The digests of the first `layers` layers matched. Returns the tickets whose grant grew."""
        self._check_watermark(load, load.verified, layers)
        if layers > load.landed:
            self._refuse(f"layer {layers} verified, only {load.landed} landed")
        load.verified = layers
        return self._regrant(load)

    def seal(self, load: Load, space: str, pages: Sequence[int]) -> None:
        """Pages of a `forward` lease are complete: they leave the lease and are immutable until freed."""
        found = self._space(space)
        self._check_exist(found, pages)
        if load.kind is not LoadKind.FORWARD or load.failed:
            self._refuse(f"pages of a {'failed' if load.failed else load.kind.value} load can't be sealed")
        for page in pages:
            if found.load[page] is not load:
                self._refuse(f"{space} page {page} is sealed, but this lease does not hold it")
        for page in set(pages):
            found.end_lease(page, whole=True)

    def fail_load(self, load: Load) -> list[Ticket]:
        """The bytes will not arrive, or are wrong: every sharer is revoked. The writer may still be writing.

        Returns the tickets that changed.
        """
        if not load.open:
            self._refuse("a load failed that had ended")
        load.failed = True
        return [ticket for ticket in list(load.waiters) if self._revoke(ticket)]

    def quarantine(self, load: Load) -> list[Ticket]:
        """Nobody knows whether the writer is quiet: its pages are neither read nor reused until `end_load`.

        The load has failed, and from here the quarantine owns the pages: `end_load` frees them. Returns the tickets
        that changed.
        """
        changed = self.fail_load(load)
        for space, page in self._pages_under(load):
            space.state[page] = QUARANTINED
        return changed

    def end_load(self, load: Load) -> list[Ticket]:
        """The writer is quiet: it has finished, acknowledged, or was fenced. Returns the tickets that changed.

        What landed whole is readable from here on; what did not is not, and its sharers are revoked.
        """
        if not load.open:
            self._refuse("a load ended twice")
        whole = not load.failed and load.landed == self.layers and (not load.verify or load.verified == self.layers)
        load.open = False
        self.loads.discard(load)
        changed = [] if whole else [ticket for ticket in list(load.waiters) if self._revoke(ticket)]
        for ticket in load.waiters:
            ticket.loads = tuple(other for other in ticket.loads if other is not load)
        load.waiters.clear()
        for space, page in self._pages_under(load):
            space.end_lease(page, whole)
        return changed

    # ---- readers -----------------------------------------------------------------------------------

    def request(self, consumer: Consumer, extents: Sequence[Extent], room: Any = None, holds: bool = True) -> Ticket:
        """A ticket on the extents: granted at once if all landed, else pending behind the loads that fill them.

        Raises LedgerError if a page is not owned at the named generation, a pool of it neither holds nor awaits
        bytes (S7: a group is used whole or not at all), or it lies where the consumer does not read: only `load`
        reads from the host.
        """
        extents = tuple(extents)
        loads: tuple[Load, ...] = ()
        joined = at = 0  # extents that have their reader, and pages of the one after them
        try:
            for extent in extents:
                at = 0
                space = self._spaces[extent.space]
                if space.on_host is not (consumer is LOAD):
                    self._refuse_side(space, consumer, "reads")
                for page in extent.pages:
                    if space.ready[page] != extent.generations[at]:
                        loads = self._behind(space, page, extent.generations[at], extent.pools, loads)
                    if holds:
                        space.readers[page] += 1
                    at += 1
                joined += 1
        except (LedgerError, KeyError):
            if holds:
                self._leave(extents[:joined])
                if at:
                    space.leave(extents[joined].pages[:at])
            self._space(extent.space)  # refuses what was a KeyError
            raise
        if loads:
            ticket = Ticket(consumer, room, holds, extents, loads)
            self._wait(ticket)
        else:
            ticket = Ticket(consumer, room, holds, extents, (), self.layers, GRANTED)
        first = self._by_room.setdefault(room, ticket)
        if first is not ticket:
            ticket.after, first.before = first, ticket
            self._by_room[room] = ticket
        return ticket

    def extend(self, ticket: Ticket, extents: Sequence[Extent]) -> None:
        """More pages join a live ticket; its grant shrinks to what may be read of all of them."""
        if ticket.state is not PENDING and ticket.state is not GRANTED:
            self._refuse(f"a {ticket.state.value} ticket may not be extended")
        more = self.request(ticket.consumer, extents, ticket.room, ticket.holds)
        ticket.loads += tuple(load for load in more.loads if load not in ticket.loads)
        ticket.extents += more.extents
        self._detach(more)
        self._wait(ticket)

    def trim(self, ticket: Ticket, space: str, pages: Iterable[int]) -> None:
        """Pages leave a live ticket (the window moved on).

        Raises LedgerError for a page that it does not hold, or while a posted read may touch it.
        """
        self._check_live(ticket)
        if ticket.posted:
            self._refuse(f"a ticket with {ticket.posted} reads posted may not be trimmed")
        gone = set(pages)
        if not gone <= {page for extent in ticket.extents if extent.space == space for page in extent.pages}:
            self._refuse(f"a ticket is trimmed by pages of {space} that it does not hold")
        kept = []
        for extent in ticket.extents:
            if extent.space != space:
                kept.append(extent)
                continue
            if ticket.holds:
                self._spaces[space].leave(page for page in extent.pages if page in gone)
            stays = _part(extent, lambda page: page not in gone)
            if stays.pages:
                kept.append(stays)
        ticket.extents = tuple(kept)

    def post(self, ticket: Ticket, *, guarded: bool = True) -> None:
        """A read under the ticket is handed to somebody else (a DMA): until `complete`, the ticket holds.

        `guarded` False: the consumer's guard is off, and it reads what was not granted.
        """
        self._check_live(ticket)
        if guarded and (ticket.state is not GRANTED or ticket.readable < self.layers):
            self._refuse(f"a read is posted under a {ticket.state.value} ticket, {ticket.readable} layers granted")
        ticket.posted += 1

    def complete(self, ticket: Ticket) -> None:
        """A posted read ended; the last one releases a ticket that was left or revoked meanwhile."""
        if not ticket.posted:
            self._refuse("a read completed that was not posted")
        ticket.posted -= 1
        if ticket.left and not ticket.posted:
            self.release(ticket)

    def release(self, ticket: Ticket) -> None:
        """The consumer is done. With reads still posted the ticket is `revoking` until the last completes.

        Raises LedgerError on a second release.
        """
        if ticket.posted or ticket.state is not GRANTED:
            self._check_live(ticket)
            if ticket.posted:
                if ticket.left:
                    self._refuse("a ticket is released twice while its reads are in flight")
                ticket.left = True
                ticket.state = REVOKING
                return
        ticket.state = RELEASED
        ticket.readable = 0
        if ticket.holds:
            for extent in ticket.extents:  # as `_leave`, with fewer calls
                space = self._spaces[extent.space]
                for page in extent.pages:
                    space.readers[page] -= 1
                    if space.ready[page] is None:
                        space.retire(page)
        if ticket.loads or ticket.before is not ticket.after:  # two neighbours are the same if it has none
            self._detach(ticket)
        else:
            del self._by_room[ticket.room]

    def revoke(self, room: Any) -> list[Ticket]:
        """The room is aborted: its pending tickets end, its granted ones hold on until released."""
        if room is None:
            self._refuse("tickets of no room can't be revoked by room: they go with their load")
        return [ticket for ticket in list(self.of_room(room)) if self._revoke(ticket)]

    def live(self) -> list[Ticket]:
        """Every ticket that is pending, granted or revoking, for reports."""
        return [ticket for room in self._by_room for ticket in self.of_room(room)]

    def of_room(self, room: Any) -> Iterator[Ticket]:
        """Its live tickets, the newest first."""
        ticket = self._by_room.get(room)
        while ticket is not None:
            yield ticket
            ticket = ticket.after

    # ---- inside ------------------------------------------------------------------------------------

    def _refuse(self, why: str) -> NoReturn:
        self.refused += 1
        raise LedgerError(why)

    def _check_live(self, ticket: Ticket) -> None:
        if ticket.state is RELEASED or ticket.state is REVOKED:
            self._refuse(f"the ticket of {ticket.consumer.value} is already {ticket.state.value}")

    def _space(self, name: str) -> Space:
        found = self._spaces.get(name)
        if found is None:
            self._refuse(f"there is no space {name}, only {', '.join(self._spaces)}")
        return found

    def _refuse_side(self, space: Space, who: Consumer | LoadKind, does: str) -> NoReturn:
        """A page number means nothing without its space."""
        here, there = ("host", "device") if space.on_host else ("device", "host")
        self._refuse(f"{who.value} {does} {there} pages, and {space.name} is a space of the {here}")

    def _check_exist(self, space: Space, pages: Sequence[int]) -> None:
        if pages and not 0 <= min(pages) <= max(pages) < len(space.state):
            self._refuse(f"{space.name} has pages 0..{len(space.state) - 1}, asked are {min(pages)}..{max(pages)}")

    def _refuse_stale(self, space: Space, page: int, generation: int) -> NoReturn:
        if space.state[page] != OWNED:
            self._refuse(f"{space.name} page {page} has no owner")
        self._refuse(f"{space.name} page {page} is at generation {space.generation[page]}, not {generation}")

    def _check_watermark(self, load: Load, present: int, layers: int) -> None:
        if not load.open:
            self._refuse("a layer landed of a load that had ended")
        if not present <= layers <= self.layers:
            self._refuse(f"a watermark may only rise: {present} -> {layers} of {self.layers}")

    def _pages_under(self, load: Load) -> Iterator[tuple[Space, int]]:
        """The pages that the load still leases."""
        for extent in load.extents:
            space = self._spaces[extent.space]
            for page in extent.pages:
                if space.load[page] is load:
                    yield space, page

    def _behind(
        self, space: Space, page: int, generation: int, pools: frozenset[str], loads: tuple[Load, ...]
    ) -> tuple[Load, ...]:
        """`loads`, and the one that fills the page, if these pools of it are not filled yet."""
        if space.state[page] != OWNED or space.generation[page] != generation:
            self._refuse_stale(space, page, generation)
        load = space.load[page]
        if load is None and space.covers(space.filled[page], pools):
            return loads
        if load is None or load.failed or load.kind is FORWARD or not space.covers(space.filling[page], pools):
            self._refuse(f"{space.name} page {page}: not every asked pool is filled or loading")
        return loads if load in loads else (*loads, load)

    def _wait(self, ticket: Ticket) -> None:
        for load in ticket.loads:
            load.waiters.add(ticket)
        self._grant(ticket)

    def _regrant(self, load: Load) -> list[Ticket]:
        return [ticket for ticket in load.waiters if self._grant(ticket)]

    def _grant(self, ticket: Ticket) -> bool:
        """Recomputes what a ticket may read that was not revoked; True if that changed."""
        if ticket.state is REVOKING:
            return False
        readable = self.layers
        for load in ticket.loads:
            readable = min(readable, load.readable(ticket.consumer))
        changed = readable != ticket.readable
        ticket.readable = readable
        if readable and ticket.state is PENDING:
            ticket.state = GRANTED
        return changed

    def _revoke(self, ticket: Ticket) -> bool:
        if ticket.state is PENDING and not ticket.posted:
            self.release(ticket)
            ticket.state = REVOKED
            return True
        if ticket.state is not REVOKING:
            ticket.state = REVOKING
            return True
        return False

    def _leave(self, extents: Iterable[Extent]) -> None:
        for extent in extents:
            self._spaces[extent.space].leave(extent.pages)

    def _detach(self, ticket: Ticket) -> None:
        """Neither its loads nor its room lead to it any more."""
        for load in ticket.loads:
            load.waiters.discard(ticket)
        ticket.loads = ()
        before, after = ticket.before, ticket.after
        if after is not None:
            after.before, ticket.after = before, None
        if before is not None:
            before.after, ticket.before = after, None
        elif after is not None:
            self._by_room[ticket.room] = after
        else:
            del self._by_room[ticket.room]

    def _forget_load(self, space: Space, page: int) -> None:
        load, space.load[page] = space.load[page], None
        if load is not None:
            for ticket in load.waiters:
                if ticket.holds:
                    ticket.holds = False
                    self._leave(ticket.extents)


def _part(extent: Extent, wanted: Callable[[int], bool]) -> Extent:
    """The pages of it that are wanted, with their generations."""
    at = [i for i, page in enumerate(extent.pages) if wanted(page)]
    pages, generations = (tuple(column[i] for i in at) for column in (extent.pages, extent.generations))
    return replace(extent, pages=pages, generations=generations)
