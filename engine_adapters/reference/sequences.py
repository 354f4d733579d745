"""One request's place on a rank: its pages, leases and tickets, and how all of them are given back."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsv4ctl.controlplane.link.wire import OpenRoom
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey
from dsv4ctl.controlplane.tickets.gate import Gate, TicketRevokedError, TicketTimeoutError
from dsv4ctl.controlplane.tickets.ticket import Load, Ticket
from dsv4ctl.controlplane.tickets.types import Consumer, Extent
from dsv4ctl.engine_adapters.reference.cache import Node
from dsv4ctl.engine_adapters.reference.digests import PageDigests
from dsv4ctl.engine_adapters.reference.peer_wire import Manifest
from dsv4ctl.engine_adapters.reference.pressure import Age
from dsv4ctl.engine_adapters.reference.requests import Finished, Output, Request, Token
from dsv4ctl.engine_adapters.reference.sequence import PageTable

#: The pools of space `full` that each consumer reads.
ATTENTION_POOLS = ("c4_kv", "c128_kv")
INDEXER_POOLS = ("index_k",)


@dataclass(eq=False, slots=True)
class Sequence:
    """`ids` grows by each generated token; the pools hold the first `computed` of them."""

    request: Request
    opening: OpenRoom
    gate: Gate
    ids: list[int]
    prompt: int
    table: PageTable = field(default_factory=PageTable)
    owned: dict[str, set[int]] = field(default_factory=dict)  #: private pages by space
    snapshots: list[int] = field(default_factory=list)  #: `state` pages for the boundaries still to be computed
    lease: Load | None = None  #: `forward`: the pages being computed
    grown: dict[int, Load] = field(default_factory=dict)  #: `forward`, by logical page: what decode grew into
    transfer: Load | None = None  #: the pages being written by the peer
    tickets: dict[Consumer, Ticket] = field(default_factory=dict)
    path: list[Node] = field(default_factory=list)  #: cached pages in use, pinned
    publishes: bool = True  #: its sealed pages still extend a path of the tree
    state_from: int | None = None  #: snapshot that the first chunk resumes from
    computed: int = 0
    digests: list[PageDigests] = field(default_factory=list)
    cached_tokens: int = 0
    host_tokens: int = 0  #: of those, loaded by HiCache for this request
    held: list[Output] | None = None  #: output that waits for the verdict; None: it leaves as it comes
    over: str | None = None  #: why it needs no further step
    finished: bool = False
    freed: bool = False
    # Facts of this rank, left by other threads for the next round:
    aborting: tuple[AbortSource, str] | None = None  #: the room is aborting, or was refused here
    manifest: Manifest | None = None  #: the room's bytes landed and are verified
    vouched: bool = False  #: of `held` output: its room's bytes are those that were sealed
    quiet: bool = False  #: the room ended: nobody writes its pages any more
    quarantining: bool = False  #: nobody knows whether its writer is quiet
    # What all ranks agreed on:
    may_begin: bool = False  #: every peer has pages for it
    oldest: bool = False  #: of all that live here
    starved: bool = False  #: the page it grows into is not here yet
    retracted: bool = False  #: a new generation of its room begins again
    dropped: bool = False
    broken: tuple[AbortSource, str] | None = None  #: a read was not granted: its results are of no use on this rank
    unquiesced: bool = False  #: freed while a peer may still have been writing (guard `quiesce` off)

    @property
    def key(self) -> RoomKey:
        return self.request.key

    @property
    def age(self) -> Age:
        return Age(self.opening.turn, self.key)

    @property
    def generated(self) -> int:
        return len(self.ids) - self.prompt

    def read(self, consumer: str, pool: str, layer: int) -> None:
        """The model is about to read cached bytes: waits for this consumer's grant of the layer.

        Bytes that the sequence's own forward wrote need no ticket (its lease covers them). A read that is not
        granted leaves `broken`: the step's ranks decide together, at its end, that nothing comes of it.
        """
        ticket = self.tickets.get(Consumer(consumer))
        if ticket is None or self.broken is not None:
            return
        try:
            self.gate.read(ticket, pool, layer, self.opening.deadlines["loading"])
        except TicketRevokedError as error:
            # Unless the room is aborting already, a load failed: its bytes never came, or came wrong.
            self.broken = (AbortSource.INTEGRITY, str(error))
        except TicketTimeoutError as error:
            self.broken = (AbortSource.DEADLINE, str(error))

    def join(self, consumer: Consumer, extents: list[Extent]) -> None:
        """The consumer's ticket covers these sealed (or loading) extents from here on."""
        held = self.tickets.get(consumer)
        if held is None:
            self.tickets[consumer] = self.gate.request(consumer, extents, room=self.key)
        else:
            self.gate.extend(held, extents)

    def leave(self, consumer: Consumer) -> None:
        ticket = self.tickets.pop(consumer, None)
        if ticket is not None:
            self.gate.leave(ticket)

    def join_landed(self, pages: int) -> None:
        """The first `pages` logical pages, sealed elsewhere and landed here, join their readers' tickets."""
        full = self.table.full[:pages]
        window = [page for logical, page in self.table.swa.items() if logical < pages]
        attention = [self.gate.extent("full", full, ATTENTION_POOLS), self.gate.extent("swa", window)]
        self.join(Consumer.ATTENTION, attention)
        self.join(Consumer.INDEXER, [self.gate.extent("full", full, INDEXER_POOLS)])

    def join_sealed(self, logical: int) -> None:
        """A page that this sequence sealed joins its readers' tickets; the window page before it leaves."""
        full = (self.table.full[logical],)
        window = self.gate.extent("swa", (self.table.swa[logical],))
        self.join(Consumer.ATTENTION, [self.gate.extent("full", full, ATTENTION_POOLS), window])
        self.join(Consumer.INDEXER, [self.gate.extent("full", full, INDEXER_POOLS)])
        gone = self.table.swa.get(logical - 1)
        ticket = self.tickets[Consumer.ATTENTION]
        if gone is not None and any(e.space == "swa" and gone in e.pages for e in ticket.extents):
            self.gate.trim(ticket, "swa", (gone,))

    def emit(self, token: int) -> None:
        self.ids.append(token)
        (self.request.emit if self.held is None else self.held.append)(Token(token))

    def let_out(self) -> None:
        """The verdict is good on every rank: what was held leaves, and what follows leaves as it comes."""
        held, self.held = self.held or [], None
        for output in held:
            self.request.emit(output)

    def finish(self, reason: str, message: str | None = None, source: AbortSource | None = None) -> None:
        """Tells the waiting client, once."""
        if not self.finished:
            self.finished = True
            self.request.emit(Finished(reason, message, source, self.prompt, self.cached_tokens))

    def free_pages(self) -> None:
        """Gives the private pages back; each is reused only once its writers and readers are done."""
        if not self.freed:
            self.freed = True
            for space, pages in self.owned.items():
                self.gate.free(space, pages)

    def quarantine(self) -> None:
        """No ack by the deadline: nobody reads or reuses the pages until the writer is quiet or fenced."""
        self.free_pages()
        if self.transfer is not None and self.transfer.open:
            self.gate.quarantine(self.transfer)

    def release(self) -> None:
        """Nobody writes the pages any more: ends the loads, releases the tickets, frees what is private."""
        for load in (self.transfer, self.lease, *self.grown.values()):
            if load is not None and load.open:
                self.gate.end_load(load)
        for consumer in list(self.tickets):
            self.leave(consumer)
        self.free_pages()
