"""The world of one rank's cache: one cached page, its copy on the host, and everybody who reads or writes either.

Rooms compute, publish, back up, evict, load and send the page in every order, layer by layer; the ledger is all that
keeps them apart. `memory` is the ghost: what each layer of each page holds at this moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from dsv4ctl.controlplane.explore.nodes import Event, Node, Nodes, Violation
from dsv4ctl.controlplane.explore.search import Step
from dsv4ctl.controlplane.tickets.ledger import GRANTED, Ledger, LedgerError
from dsv4ctl.controlplane.tickets.ticket import Load, Ticket
from dsv4ctl.controlplane.tickets.types import Consumer, Extent, LoadKind, SpaceSpec, TicketState

DEVICE, HOST = "full", "host.full"
LAYERS = 2
POOLS = ("c4_kv", "index_k")
GOOD = "cached"  #: the bytes of the one cached page
BAD = "bad"  #: bytes that a copy changed on the way


class CachePlan(NamedTuple):
    name: str
    rooms: int = 2
    device: int = 2  #: pages
    host: int = 1
    aborts: int = 1
    evictions: int = 2
    bad_copies: int = 0  #: copies that differ from what was sealed
    stranger: bool = False  #: somebody else takes a page too, and seals other bytes in it
    consumers: tuple[Consumer, ...] = (Consumer.ATTENTION, Consumer.SENDER)
    slips: int = 0  #: calls that a consumer must not make: a second release, a half-filled page asked whole


class Copy:
    """A load or a backup on its thread: reads one layer, writes it, reports it; then the next."""

    __slots__ = ("at", "extent", "load", "origin", "phase", "ticket")

    def __init__(self, ticket: Ticket | None, source: Extent, load: Load) -> None:
        self.ticket = ticket
        self.origin = source
        self.extent = load.extents[0]
        self.load = load
        self.at = 0
        self.phase = "read"

    @property
    def waits(self) -> bool:
        """For the grant of the layer that it reads next."""
        ticket = self.ticket
        if self.phase != "read" or ticket is None or ticket.readable > self.at:
            return False
        return ticket.state in (TicketState.PENDING, GRANTED)


class Reading:
    """One room's use of the cached page: `extent` as the room found it, `ticket` once it asked."""

    __slots__ = ("aborted", "at", "extent", "lease", "page", "stage", "ticket")

    def __init__(self) -> None:
        self.stage = "new"
        self.extent: Extent | None = None
        self.ticket: Ticket | None = None
        self.lease: Load | None = None
        self.page = -1
        self.at = 0
        self.aborted = False


class CacheNode(Node):
    def __init__(self, plan: CachePlan) -> None:
        super().__init__()
        self.setup = plan
        self.ledger: Ledger = Ledger({DEVICE: SpaceSpec(plan.device, POOLS), HOST: SpaceSpec(plan.host, POOLS)}, LAYERS)
        self.memory: dict[tuple[str, int], list[Any]] = {
            (space, page): [None] * LAYERS
            for space, pages in ((DEVICE, plan.device), (HOST, plan.host))
            for page in range(pages)
        }
        self.rooms = {room: Reading() for room in range(1, plan.rooms + 1)}
        self.stranger = Reading()
        if not plan.stranger:
            self.stranger.stage = "ended"
        self.device: Extent | None = None
        self.host: Extent | None = None
        self.copies: dict[str, Copy] = {}
        self.flights: dict[int, tuple[Ticket, int]] = {}  #: posted reads of the sender: ticket and page
        self.left = [plan.aborts, plan.evictions, plan.bad_copies, plan.slips]

    # ---- rooms -----------------------------------------------------------------------------------------------------

    def on_begin(self, room: int) -> None:
        """The cached page, on the device or brought there from the host; without it the room computes its own."""
        reading = self.rooms[room]
        if self.device is None and self.host is not None and "load" not in self.copies:
            self._load()
        if self.device is not None:
            reading.extent, reading.stage = self.device, "found"
            return
        taken = self.ledger.allocate({DEVICE: 1})
        if taken is None:
            return
        (reading.page,) = taken[DEVICE]
        extent = self.ledger.extent(DEVICE, [reading.page])
        reading.lease = self.ledger.open_load(LoadKind.FORWARD, [extent], room=room)
        self._bytes(DEVICE, reading.page)[:] = [room, room]  # a forward writes wherever it likes in what it leases
        reading.stage = "computing"

    def on_seal(self, room: int) -> None:
        """The page is computed: sealed, published unless somebody was faster, backed up if the host has room."""
        reading = self.rooms[room]
        assert reading.lease is not None
        self._bytes(DEVICE, reading.page)[:] = [GOOD] * LAYERS
        self.ledger.seal(reading.lease, DEVICE, [reading.page])
        self.ledger.end_load(reading.lease)
        reading.extent, reading.stage = self.ledger.extent(DEVICE, [reading.page]), "found"
        if self.device is None:
            self.device, reading.page = reading.extent, -1
            self.back_up()

    def on_request(self, room: int, consumer: Consumer) -> None:
        """With the extent as it was found: if its page was handed on meanwhile, the ledger must refuse."""
        reading = self.rooms[room]
        assert reading.extent is not None
        try:
            reading.ticket = self.ledger.request(consumer, [reading.extent], room=room)
        except LedgerError:
            self._end(reading)
            return
        reading.stage = "reading"

    def on_read(self, room: int) -> None:
        reading = self.rooms[room]
        ticket = reading.ticket
        assert ticket is not None
        (page,) = ticket.extents[0].pages
        self._must_be_good(ticket.consumer, DEVICE, page, reading.at)
        reading.at += 1
        if reading.at == LAYERS:
            self._leave(ticket)
            self._end(reading)

    def on_post(self, room: int) -> None:
        """The sender hands the whole page to a DMA, and leaves the scope: the ticket must outlive it."""
        reading = self.rooms[room]
        ticket = reading.ticket
        assert ticket is not None
        self.ledger.post(ticket)
        (page,) = ticket.extents[0].pages
        self.flights[room] = (ticket, page)
        self._leave(ticket)
        self._end(reading)

    def on_complete(self, room: int) -> None:
        ticket, _ = self.flights.pop(room)
        self.ledger.complete(ticket)

    def on_abort(self, room: int) -> None:
        self._spend(0)
        reading = self.rooms[room]
        self.ledger.revoke(room)
        reading.aborted = True

    def on_give_up(self, room: int) -> None:
        """The step loop drops an aborted room between two steps: its ticket is left, its lease ended."""
        reading = self.rooms[room]
        if reading.ticket is not None:
            self._leave(reading.ticket)
        if reading.lease is not None and reading.lease.open:
            self.ledger.end_load(reading.lease)
        self._end(reading)

    def on_release_again(self, room: int) -> None:
        """A slip: the ledger must refuse it."""
        self._spend(3)
        ticket = self.rooms[room].ticket
        assert ticket is not None
        try:
            self.ledger.release(ticket)
        except LedgerError:
            return
        raise Violation("S2", f"the ticket of room {room} was released twice")

    def on_half(self, room: int) -> None:
        """A slip: the forward of room `room` fills one pool of a new page, and somebody asks for both (S7)."""
        self._spend(3)
        taken = self.ledger.allocate({DEVICE: 1})
        assert taken is not None
        (page,) = taken[DEVICE]
        load = self.ledger.open_load(LoadKind.HICACHE, [self.ledger.extent(DEVICE, [page], POOLS[:1])])
        for rate in (self.ledger.layer_landed, self.ledger.layer_verified):
            rate(load, LAYERS)
        asked = self.ledger.extent(DEVICE, [page])
        for _ in ("loading", "filled"):
            try:
                self.ledger.request(Consumer.ATTENTION, [asked], room=room)
            except LedgerError:
                if load.open:
                    self.ledger.end_load(load)
                continue
            raise Violation("S7", f"a page with {POOLS[0]} alone was granted whole")
        self.ledger.free(DEVICE, [page])

    def on_stranger(self) -> None:
        """A room with another prompt: takes a page, fills and seals it, gives it back."""
        other = self.stranger
        if other.stage == "new":
            taken = self.ledger.allocate({DEVICE: 1})
            if taken is None:
                self._forget(DEVICE)  # evicted for its sake: it comes again
                return
            (other.page,) = taken[DEVICE]
            other.lease = self.ledger.open_load(LoadKind.FORWARD, [self.ledger.extent(DEVICE, [other.page])])
            self._bytes(DEVICE, other.page)[:] = ["other"] * LAYERS
            other.stage = "computing"
        elif other.lease is not None:
            self.ledger.seal(other.lease, DEVICE, [other.page])
            self.ledger.end_load(other.lease)
            other.lease = None
        else:
            self._end(other)

    # ---- copies between host and device ----------------------------------------------------------------------------

    def on_copy(self, which: str, good: bool) -> None:
        """One phase of a layer: read and write it (`good`: as it was), report it as landed, compare it."""
        copy = self.copies[which]
        if copy.phase == "read":
            self._move(copy, good)
        elif copy.phase == "written":
            self.ledger.layer_landed(copy.load, copy.at + 1)
            if which == "load":
                copy.phase = "landed"
            else:
                self._next_layer(copy)
        elif copy.phase == "landed":
            self._compare(copy)
        else:
            self._finish(which, copy)

    def _move(self, copy: Copy, good: bool) -> None:
        (source,), (target,) = copy.origin.pages, copy.extent.pages
        if copy.ticket is not None and copy.ticket.readable <= copy.at:
            self.ledger.fail_load(copy.load)  # revoked: what it waited for never comes
            copy.phase = "failed"
            return
        reader = Consumer.LOAD if copy.extent.space == DEVICE else Consumer.BACKUP
        self._must_be_good(reader, copy.origin.space, source, copy.at)
        if not good:
            self._spend(2)
        self._bytes(copy.extent.space, target)[copy.at] = (
            self._bytes(copy.origin.space, source)[copy.at] if good else BAD
        )
        copy.phase = "written"

    def _compare(self, copy: Copy) -> None:
        """A load checks what landed against what was sealed."""
        (target,) = copy.extent.pages
        if self._bytes(DEVICE, target)[copy.at] != GOOD:
            self.ledger.fail_load(copy.load)
            copy.phase = "failed"
            return
        self.ledger.layer_verified(copy.load, copy.at + 1)
        self._next_layer(copy)

    def _next_layer(self, copy: Copy) -> None:
        copy.at += 1
        copy.phase = "read" if copy.at < LAYERS else "done"

    def _finish(self, which: str, copy: Copy) -> None:
        """The thread is done with the pages; of a failed load nobody matches the page any more."""
        del self.copies[which]
        self.ledger.end_load(copy.load)
        if copy.ticket is not None:
            self._leave(copy.ticket)
        if copy.phase == "failed":
            self._forget(DEVICE)
            self._forget(HOST)

    def _load(self) -> None:
        assert self.host is not None
        taken = self.ledger.allocate({DEVICE: 1})
        if taken is None:
            return
        ticket = self.ledger.request(Consumer.LOAD, [self.host])
        target = self.ledger.extent(DEVICE, taken[DEVICE])
        load = self.ledger.open_load(LoadKind.HICACHE, [target], verify=True)
        (self.device,) = load.extents
        self.copies["load"] = Copy(ticket, self.host, load)

    def back_up(self) -> None:
        taken = None if self.host is not None or "backup" in self.copies else self.ledger.allocate({HOST: 1})
        if taken is None or self.device is None:
            return
        ticket = self.backup_ticket()
        load = self.ledger.open_load(LoadKind.BACKUP, [self.ledger.extent(HOST, taken[HOST])])
        (self.host,) = load.extents
        self.copies["backup"] = Copy(ticket, self.device, load)

    def backup_ticket(self) -> Ticket | None:
        assert self.device is not None
        return self.ledger.request(Consumer.BACKUP, [self.device])

    def on_evict(self, space: str) -> None:
        """At any moment, whoever reads: only the ledger knows when the page may be reused."""
        self._spend(1)
        self._forget(space)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _forget(self, space: str) -> None:
        extent = self.device if space == DEVICE else self.host
        if extent is not None:
            self.ledger.free(space, extent.pages)
        if space == DEVICE:
            self.device = None
        else:
            self.host = None

    def _end(self, reading: Reading) -> None:
        if reading.page >= 0:
            self.ledger.free(DEVICE, [reading.page])
            reading.page = -1
        if not self.setup.slips:
            reading.ticket = None
        reading.extent = reading.lease = None
        reading.at, reading.stage = 0, "ended"

    def _leave(self, ticket: Ticket) -> None:
        if ticket.state not in (TicketState.RELEASED, TicketState.REVOKED):
            self.ledger.release(ticket)

    def _spend(self, which: int) -> None:
        self.left[which] -= 1

    def _bytes(self, space: str, page: int) -> list[Any]:
        return self.memory[space, page]

    def _must_be_good(self, reader: Consumer, space: str, page: int, layer: int) -> None:
        found = self._bytes(space, page)[layer]
        landed_bad = found == BAD and reader is Consumer.LOAD  # as it will find out itself
        if found != GOOD and not landed_bad:
            raise Violation("S1", f"{reader.value} reads {space} page {page} layer {layer}, which holds {found}")

    # ---- what may happen -------------------------------------------------------------------------------------------

    def moves(self) -> list[Event]:
        moves: list[Event] = [("copy", which, True) for which, copy in self.copies.items() if not copy.waits]
        moves += [("complete", room) for room in self.flights]
        for room, reading in self.rooms.items():
            moves += self._of_a_room(room, reading)
        return moves if self.stranger.stage == "ended" else [*moves, ("stranger",)]

    def _of_a_room(self, room: int, reading: Reading) -> Iterator[Event]:
        ticket = reading.ticket
        if reading.aborted and reading.stage != "ended":
            yield ("give_up", room)
        elif reading.stage == "new" and (room == 1 or self.rooms[room - 1].stage != "new"):
            yield ("begin", room)  # rooms are alike: they are numbered in the order in which they begin
        elif reading.stage == "computing":
            yield ("seal", room)
        elif reading.stage == "found":
            for consumer in self.setup.consumers:
                yield ("request", room, consumer)
        elif reading.stage == "reading" and ticket is not None:
            if ticket.state not in (TicketState.PENDING, GRANTED):
                yield ("give_up", room)
            elif ticket.consumer is Consumer.SENDER:
                if ticket.readable == LAYERS:
                    yield ("post", room)
            elif ticket.readable > reading.at:
                yield ("read", room)

    def faults(self) -> list[Event]:
        """What may happen and need not: aborts, evictions, bad copies, slips."""
        aborts, evictions, bad, slips = self.left
        found: list[Event] = []
        for room, reading in self.rooms.items():
            lives = reading.stage not in ("new", "ended") or room in self.flights
            if aborts and lives and not reading.aborted:
                found.append(("abort", room))
            if slips and reading.ticket is not None and reading.stage == "ended":
                found.append(("release_again", room))
            if slips and reading.stage == "new" and self.ledger.available(DEVICE):
                found.append(("half", room))
        if evictions:
            found += [
                ("evict", space) for space, held in ((DEVICE, self.device), (HOST, self.host)) if held is not None
            ]
        if bad:
            found += [
                ("copy", which, False) for which, copy in self.copies.items() if copy.phase == "read" and not copy.waits
            ]
        return found

    def settle(self) -> None:
        """What a free page still holds is nothing that anybody may read: old bytes must not pass for new ones."""
        for name, space in self.ledger._spaces.items():
            for page in space.free:
                self.memory[name, page][:] = [None] * LAYERS

    def check(self) -> None:
        for space in self.ledger._spaces.values():
            if min(space.readers) < 0:
                raise Violation("S2", "the readers of a page are fewer than none")
        for room, (ticket, page) in self.flights.items():
            for layer in range(LAYERS):
                if self.memory[DEVICE, page][layer] != GOOD:
                    what = f"{DEVICE} page {page} was written while a posted read of room {room}'s sender is in flight"
                    raise Violation("S2", what)
            if not ticket.posted:
                raise Violation("S2", f"the sender's ticket of room {room} ended before its read")
        for which, copy in self.copies.items():
            self._check_target(which, copy)

    def _check_target(self, which: str, copy: Copy) -> None:
        """Nobody else gets the page that a copy writes."""
        space, (page,) = self.ledger._spaces[copy.extent.space], copy.extent.pages
        if page in space.free or space.load[page] is not copy.load:
            raise Violation("S3", f"{space.name} page {page} is given away while a {which} writes it")

    def view(self) -> bool:
        """Whether every room has ended and only the cache holds pages."""
        cached = {DEVICE: self.device is not None, HOST: self.host is not None}
        free = all(
            self.ledger.available(space) + cached[space] == len(self.ledger._spaces[space].state) for space in cached
        )
        ended = all(reading.stage == "ended" for reading in (*self.rooms.values(), self.stranger))
        return ended and free and not self.ledger.tickets and not self.ledger.loads


class Cache:
    """One node: its state is a number."""

    def __init__(self, plan: CachePlan) -> None:
        self.name = plan.name
        self.nodes = Nodes()
        self._start = CacheNode(plan)

    def initial(self) -> int:
        return self.nodes.add(self._start)

    def steps(self, state: int) -> Iterator[Step]:
        node = self.nodes.node(state)
        assert isinstance(node, CacheNode)
        for fair, events in ((True, node.moves()), (False, node.faults())):
            for event in events:
                try:
                    after, _ = self.nodes.step(state, event)
                except Violation as violation:
                    yield Step(event, fair, None, violation)
                    continue
                if after != state:
                    yield Step(event, fair, after)

    def check(self, state: int) -> None:
        """Each node is checked as it is made."""

    def done(self, state: int) -> bool:
        return bool(self.nodes.view(state))

    def describe(self, action: Event) -> str:
        kind, *rest = action
        return _WORDS[kind].format(*(x.value if isinstance(x, Consumer) else x for x in rest))


_WORDS = {
    "begin": "room {0}: looks for the cached page",
    "seal": "room {0}: its forward has computed the page, which is sealed and published",
    "request": "room {0}: requests a ticket for {1}",
    "read": "room {0}: attention reads the next layer",
    "post": "room {0}: the sender posts a read of the page, and leaves its scope",
    "complete": "room {0}: the sender's read ends",
    "abort": "room {0}: is aborted",
    "give_up": "room {0}: is dropped",
    "release_again": "room {0}: releases its ticket again",
    "half": "room {0}: asks for a page of which one pool was filled",
    "stranger": "a room with another prompt: takes a page, seals it, or gives it back",
    "copy": "{0}: the next step of its layer (as sealed: {1})",
    "evict": "the cache gives the page of {0} back",
}
