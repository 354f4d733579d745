"""The ticket ledger of one rank: who may read which pages, who may write them, which may be reused (S1-S3, S7).

A pure state machine: calls in, changed tickets out; no clock, no locks, no I/O. `gate` puts a lock, waiting and
the event trace around it. Every call either succeeds or raises LedgerError and changes nothing but `refused`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from dsv4ctl.controlplane.tickets.types import Consumer, Extent, LoadKind, SpaceSpec, TicketState

_FREE, _OWNED, _RETIRING, _QUARANTINED = range(4)

PENDING, GRANTED, REVOKING = TicketState.PENDING, TicketState.GRANTED, TicketState.REVOKING


class LedgerError(Exception):
    """The call would break an invariant, or names something that is not so; nothing was changed."""


class Ticket:
    """The right of one consumer to read its extents. Only the ledger changes it.

    `readable` is the grant: the first so many layers may be read. `waker`, if set, is called at each change.
    """

    __slots__ = ("consumer", "extents", "left", "loads", "posted", "readable", "room", "state", "waker")

    def __init__(self, consumer: Consumer, room: Any) -> None:
        self.consumer = consumer
        self.room = room
        self.extents: tuple[Extent, ...] = ()
        self.loads: set[Load] | None = None  #: loads that still fill pages of this ticket
        self.posted = 0  #: reads posted and not completed: the ticket outlives its scope until they end
        self.left = False  #: released while reads were posted
        self.readable = 0
        self.state = PENDING
        self.waker: Any = None


class Load:
    """An asynchronous write that fills pages layer by layer, and the lease under which it writes."""

    __slots__ = ("extents", "failed", "kind", "landed", "open", "room", "verified", "verify", "waiters")

    def __init__(self, kind: LoadKind, room: Any, verify: bool) -> None:
        self.kind = kind
        self.room = room
        self.verify = verify  #: only `checksum` may read a layer before its digests matched
        self.extents: tuple[Extent, ...] = ()
        self.landed = 0  #: watermark: layers landed
        self.verified = 0  #: watermark: layers whose digests matched
        self.open = True  #: the writer may still write
        self.failed = False
        self.waiters: set[Ticket] = set()

    def readable(self, consumer: Consumer) -> int:
        return self.verified if self.verify and consumer is not Consumer.CHECKSUM else self.landed


class _Space:
    """Page state of one space, by page number."""

    __slots__ = ("filled", "free", "generation", "load", "masks", "name", "pools", "readers", "state")

    def __init__(self, name: str, spec: SpaceSpec) -> None:
        self.name = name
        self.pools = frozenset(spec.pools)
        self.masks: dict[frozenset[str], int] = {}
        self.generation = [0] * spec.pages
        self.state = bytearray(spec.pages)
        self.readers = [0] * spec.pages
        self.filled = [0] * spec.pages  #: bit mask of the pools whose bytes are complete
        self.load: list[Load | None] = [None] * spec.pages
        self.free = deque(range(spec.pages))

    def mask(self, pools: frozenset[str]) -> int:
        mask = self.masks.get(pools)
        if mask is None:
            order = sorted(self.pools)
            mask = self.masks[pools] = sum(1 << order.index(pool) for pool in pools)
        return mask

    def quiet(self, page: int) -> bool:
        return not self.readers[page] and self.load[page] is None


class Ledger:
    """Spaces by name; a page is free, owned, retiring (freed, but somebody may still touch it) or quarantined."""

    def __init__(self, spaces: Mapping[str, SpaceSpec], layers: int) -> None:
        self.layers = layers
        self.refused = 0
        self.tickets = 0  #: live: pending, granted or revoking
        self.loads: set[Load] = set()
        self._spaces = {name: _Space(name, spec) for name, spec in spaces.items()}
        self._by_room: dict[Any, set[Ticket]] = {}

    # ---- pages -------------------------------------------------------------------------------------

    def allocate(self, wants: Mapping[str, int]) -> dict[str, tuple[int, ...]] | None:
        """`wants[space]` pages of each space, all or nothing (None): no hold-and-wait. Generations rise by one."""
        if any(len(self._spaces[name].free) < count for name, count in wants.items()):
            return None
        return {name: tuple(self._take(self._spaces[name]) for _ in range(n)) for name, n in wants.items()}

    def extent(self, space: str, pages: Iterable[int], pools: Iterable[str] | None = None) -> Extent:
        """These pages at their present generations; `pools` None: every pool of the space."""
        found = self._spaces[space]
        names = found.pools if pools is None else frozenset(pools)
        if not names <= found.pools:
            self._refuse(f"space {space} has no pool {sorted(names - found.pools)[0]}")
        pages = tuple(pages)
        return Extent(space, pages, tuple(found.generation[page] for page in pages), names)

    def free(self, space: str, pages: Iterable[int]) -> int:
        """Gives pages back. Each is reusable once its last reader released it and its load ended (S2, S3).

        Returns how many are reusable at once. Raises LedgerError for a page that is not owned.
        """
        found, pages = self._spaces[space], tuple(pages)
        for page in pages:
            if found.state[page] != _OWNED:
                self._refuse(f"{space} page {page} is freed, but nobody owns it")
        for page in pages:
            found.state[page] = _RETIRING
        return sum(self._retire(found, page) for page in pages)

    def available(self, space: str) -> int:
        return len(self._spaces[space].free)

    def counts(self) -> dict[str, dict[str, int]]:
        """Pages by state and space, and leased pages (under an open load)."""
        names = ("free", "owned", "retiring", "quarantined")
        by_state = {
            name: {space.name: space.state.count(code) for space in self._spaces.values()}
            for code, name in enumerate(names)
        }
        leased = {s.name: sum(load is not None for load in s.load) for s in self._spaces.values()}
        return {**by_state, "leased": leased}

    # ---- writers -----------------------------------------------------------------------------------

    def open_load(
        self, kind: LoadKind, extents: Sequence[Extent], *, room: Any = None, verify: bool = False
    ) -> Load:
        """Leases the pages to one writer; generations rise by one, what they held is no longer readable.

        Raises LedgerError if a page is not owned at the named generation, is read by a ticket, or is already
        being written.
        """
        for extent in extents:
            space = self._spaces[extent.space]
            for page, generation in zip(extent.pages, extent.generations, strict=True):
                self._check_current(space, page, generation)
                if not space.quiet(page):
                    who = "a ticket reads it" if space.readers[page] else "another load writes it"
                    self._refuse(f"{kind.value} may not write {extent.space} page {page}: {who}")
        load = Load(kind, room, verify)
        load.extents = tuple(self._lease(load, extent) for extent in extents)
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
        found = self._spaces[space]
        for page in pages:
            if not load.open or found.load[page] is not load:
                self._refuse(f"{space} page {page} is sealed, but this lease does not hold it")
        for extent in load.extents:
            if extent.space == space:
                for page in set(pages) & set(extent.pages):
                    found.filled[page] |= found.mask(extent.pools)
        for page in pages:
            found.load[page] = None
            self._retire(found, page)

    def fail_load(self, load: Load) -> list[Ticket]:
        """The bytes will not arrive, or are wrong: every sharer is revoked. The writer may still be writing.

        Returns the tickets that changed.
        """
        if not load.open:
            self._refuse("a load failed that had ended")
        load.failed = True
        return [ticket for ticket in list(load.waiters) if self._revoke(ticket)]

    def quarantine(self, load: Load) -> None:
        """Nobody knows whether the writer is quiet: its pages are neither read nor reused until `end_load`."""
        for extent in load.extents:
            space = self._spaces[extent.space]
            for page in extent.pages:
                if space.load[page] is load:
                    space.state[page] = _QUARANTINED

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
        for extent in load.extents:
            space = self._spaces[extent.space]
            mask = space.mask(extent.pools)
            for page in extent.pages:
                if space.load[page] is load:
                    space.load[page] = None
                    if whole:
                        space.filled[page] |= mask
                    self._retire(space, page)
        return changed

    # ---- readers -----------------------------------------------------------------------------------

    def request(self, consumer: Consumer, extents: Sequence[Extent], *, room: Any = None) -> Ticket:
        """A ticket on the extents: granted at once if all landed, else pending behind the loads that fill them.

        Raises LedgerError if a page is not owned at the named generation, or a pool of it neither holds nor
        awaits bytes (S7: a group is used whole or not at all).
        """
        ticket = Ticket(consumer, room)
        self._join(ticket, extents)
        self.tickets += 1
        if room is not None:
            self._by_room.setdefault(room, set()).add(ticket)
        return ticket

    def extend(self, ticket: Ticket, extents: Sequence[Extent]) -> None:
        """More pages join a live ticket; its grant shrinks to what may be read of all of them."""
        if ticket.state is not PENDING and ticket.state is not GRANTED:
            self._refuse(f"a {ticket.state.value} ticket may not be extended")
        self._join(ticket, extents)

    def trim(self, ticket: Ticket, space: str, pages: Iterable[int]) -> None:
        """Pages leave a live ticket (the window moved on). Raises LedgerError for a page it does not hold."""
        self._check_live(ticket)
        gone = set(pages)
        if not gone <= {page for extent in ticket.extents if extent.space == space for page in extent.pages}:
            self._refuse(f"a ticket is trimmed by pages of {space} that it does not hold")
        found, kept = self._spaces[space], []
        for extent in ticket.extents:
            if extent.space != space:
                kept.append(extent)
                continue
            stay = [i for i, page in enumerate(extent.pages) if page not in gone]
            self._leave(found, [page for page in extent.pages if page in gone])
            if stay:
                pages_kept = tuple(extent.pages[i] for i in stay)
                kept.append(extent._replace(pages=pages_kept, generations=tuple(extent.generations[i] for i in stay)))
        ticket.extents = tuple(kept)

    def post(self, ticket: Ticket) -> None:
        """A read under the ticket is handed to somebody else (a DMA): until `complete`, the ticket holds."""
        if ticket.state is not GRANTED or ticket.readable < self.layers:
            self._refuse(f"a read is posted under a {ticket.state.value} ticket, {ticket.readable} layers granted")
        ticket.posted += 1

    def complete(self, ticket: Ticket) -> None:
        """A posted read ended; the last one releases a ticket that was left or revoked meanwhile."""
        if not ticket.posted:
            self._refuse("a read completed that was not posted")
        ticket.posted -= 1
        if ticket.left and not ticket.posted:
            self._drop(ticket, TicketState.RELEASED)

    def release(self, ticket: Ticket) -> None:
        """The consumer is done. With reads still posted the ticket is `revoking` until the last completes.

        Raises LedgerError on a second release.
        """
        self._check_live(ticket)
        if ticket.left:
            self._refuse("a ticket is released twice while its reads are in flight")
        if ticket.posted:
            ticket.left = True
            ticket.state = REVOKING
            return
        self._drop(ticket, TicketState.RELEASED)

    def revoke(self, room: Any) -> list[Ticket]:
        """The room is aborted: its pending tickets end, its granted ones hold on until released."""
        return [ticket for ticket in list(self._by_room.get(room, ())) if self._revoke(ticket)]

    def live(self) -> list[Ticket]:
        """Tickets of rooms and of loads in flight, for reports."""
        found = {ticket for tickets in self._by_room.values() for ticket in tickets}
        return list(found.union(*(load.waiters for load in self.loads)))

    # ---- inside ------------------------------------------------------------------------------------

    def _refuse(self, why: str) -> NoReturn:
        self.refused += 1
        raise LedgerError(why)

    def _check_live(self, ticket: Ticket) -> None:
        if ticket.state is TicketState.RELEASED or ticket.state is TicketState.REVOKED:
            self._refuse(f"the ticket of {ticket.consumer.value} is already {ticket.state.value}")

    def _check_current(self, space: _Space, page: int, generation: int) -> None:
        if space.state[page] != _OWNED:
            self._refuse(f"{space.name} page {page} has no owner")
        if space.generation[page] != generation:
            self._refuse(f"{space.name} page {page} is at generation {space.generation[page]}, not {generation}")

    def _check_watermark(self, load: Load, present: int, layers: int) -> None:
        if not load.open:
            self._refuse("a layer landed of a load that had ended")
        if not present <= layers <= self.layers:
            self._refuse(f"a watermark may only rise: {present} -> {layers} of {self.layers}")

    def _take(self, space: _Space) -> int:
        page = space.free.popleft()
        space.state[page] = _OWNED
        space.generation[page] += 1
        space.filled[page] = 0
        return page

    def _retire(self, space: _Space, page: int) -> int:
        """1 if the page was given back and nobody touches it any more: it is free from here."""
        if space.state[page] < _RETIRING or not space.quiet(page):
            return 0
        space.state[page] = _FREE
        space.free.append(page)
        return 1

    def _lease(self, load: Load, extent: Extent) -> Extent:
        space = self._spaces[extent.space]
        for page in extent.pages:
            space.load[page] = load
            space.generation[page] += 1
            space.filled[page] = 0
        return extent._replace(generations=tuple(space.generation[page] for page in extent.pages))

    def _join(self, ticket: Ticket, extents: Sequence[Extent]) -> None:
        loads: set[Load] | None = ticket.loads
        for extent in extents:
            space = self._spaces[extent.space]
            mask = space.mask(extent.pools)
            for page, generation in zip(extent.pages, extent.generations, strict=True):
                self._check_current(space, page, generation)
                load = space.load[page]
                if load is not None and load.kind is not LoadKind.FORWARD and not load.failed:
                    covered = space.filled[page] | self._covers(load, extent.space, page)
                    loads = {load} if loads is None else loads | {load}
                else:
                    covered = space.filled[page]
                if mask & ~covered:
                    self._refuse(f"{extent.space} page {page}: not every asked pool is filled or loading")
        for extent in extents:
            readers = self._spaces[extent.space].readers
            for page in extent.pages:
                readers[page] += 1
        ticket.extents += tuple(extents)
        ticket.loads = loads
        for load in loads or ():
            load.waiters.add(ticket)
        self._grant(ticket)

    def _covers(self, load: Load, space: str, page: int) -> int:
        found = self._spaces[space]
        return sum(
            found.mask(extent.pools) for extent in load.extents if extent.space == space and page in extent.pages
        )

    def _regrant(self, load: Load) -> list[Ticket]:
        return [ticket for ticket in list(load.waiters) if self._grant(ticket)]

    def _grant(self, ticket: Ticket) -> bool:
        """Recomputes what the ticket may read; True if that changed."""
        readable = self.layers
        for load in list(ticket.loads or ()):
            layers = load.readable(ticket.consumer)
            readable = min(readable, layers)
            if layers == self.layers:
                load.waiters.discard(ticket)
                ticket.loads = ticket.loads - {load} if ticket.loads else None
        changed = readable != ticket.readable
        ticket.readable = readable
        if readable and ticket.state is PENDING:
            ticket.state = GRANTED
        return changed

    def _revoke(self, ticket: Ticket) -> bool:
        if ticket.state is PENDING:
            self._drop(ticket, TicketState.REVOKED)
            return True
        if ticket.state is GRANTED:
            ticket.state = REVOKING
            return True
        return False

    def _drop(self, ticket: Ticket, state: TicketState) -> None:
        ticket.state = state
        for extent in ticket.extents:
            self._leave(self._spaces[extent.space], extent.pages)
        if ticket.loads:
            for load in ticket.loads:
                load.waiters.discard(ticket)
            ticket.loads = None
        if ticket.room is not None:
            tickets = self._by_room[ticket.room]
            tickets.discard(ticket)
            if not tickets:
                del self._by_room[ticket.room]
        self.tickets -= 1

    def _leave(self, space: _Space, pages: Iterable[int]) -> None:
        readers, state = space.readers, space.state
        for page in pages:
            readers[page] -= 1
            if state[page] >= _RETIRING:
                self._retire(space, page)
