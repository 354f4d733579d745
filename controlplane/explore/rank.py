"""One rank's node: ledger, rooms and abort inbox behind what `engine_adapters.agent` and the step loop do with them.

`memory` is the ghost: what the bytes of each page are at this moment, whatever the ledger believes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dsv4ctl.controlplane.aborts.inbox import AbortInbox
from dsv4ctl.controlplane.aborts.log import AbortEntry
from dsv4ctl.controlplane.explore.nodes import Event, Node, Violation
from dsv4ctl.controlplane.rooms.effects import AckPeer, Effect, Enter, Quarantine, Refusal, ReleasePages, TellPeer
from dsv4ctl.controlplane.rooms.half import Half
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey, RoomState
from dsv4ctl.controlplane.rooms.table import RoomTable
from dsv4ctl.controlplane.rooms.writer import Writer
from dsv4ctl.controlplane.tickets.ledger import Ledger
from dsv4ctl.controlplane.tickets.space import FREE, OWNED
from dsv4ctl.controlplane.tickets.ticket import Load, Ticket
from dsv4ctl.controlplane.tickets.types import SpaceSpec

SPACE = "full"
LAYERS = 2
_FAULT = AbortSource.ENGINE_FAULT


class UnknownRoom(Exception):
    """The room is unknown here, ended, or lives in another generation."""


GONE = (Refusal, UnknownRoom)


class Setup(NamedTuple):
    """What stays as it is in one world. `wants`: pages of a room on each side; the first `prompt` of them are sent."""

    pages: int = 3
    wants: int = 2
    prompt: int = 1
    verify: bool = False
    hasty: bool = True  #: time-outs may come at any moment; else only when nothing else can happen
    quiesce: bool = True
    remembered: int | None = None  #: ended rooms, and aborts of unknown ones, that a rank remembers at most


class Facts(NamedTuple):
    """What a rank knows of a sequence, reduced by MIN over the ranks (`engine_adapters.reference.facts`)."""

    abort: int  #: 0: aborting here
    told: int
    ready: int
    quiet: int


class Sequence:
    """One request's place on a rank (`engine_adapters.reference.sequences`)."""

    __slots__ = (
        "aborting", "checksum", "dropped", "expected", "exposed", "flights", "freed", "key", "landed", "lease",
        "may_begin", "pages", "peers", "quarantining", "quiet", "ready", "stage", "tickets", "to_send", "transfer",
    )  # fmt: skip

    def __init__(self, key: RoomKey) -> None:
        self.key = key
        self.stage = "waiting"
        self.pages: tuple[int, ...] = ()
        self.peers: tuple[str, ...] = ()  #: decode: who was told the pages
        self.lease: Load | None = None
        self.transfer: Load | None = None
        self.tickets: dict[str, Ticket] = {}
        self.checksum: Ticket | None = None  #: of the task that compares, not of the sequence
        self.aborting = self.ready = self.quiet = self.dropped = self.freed = False
        self.quarantining = self.may_begin = self.expected = self.exposed = False
        self.landed: dict[str, set[int]] = {}  #: decode: logical pages in place, by writer
        self.to_send: tuple[tuple[int, str], ...] = ()  #: prefill: (logical page, peer) not posted yet
        self.flights: dict[tuple[int, str], Ticket] = {}  #: prefill: posted and not ended


class RankView(NamedTuple):
    """Of a rank, for the world around it."""

    rooms: tuple[RoomKey, ...]
    live: frozenset[RoomKey]  #: of these, the ones that are not aborting
    over: frozenset[RoomKey]  #: aborting or ended here: none of these is live here again
    expects: frozenset[RoomKey]  #: decode: notifications of these are counted in
    ack_due: tuple[RoomKey, ...]
    facts: tuple[tuple[RoomKey, Facts], ...]
    budget: int
    admits: bool
    working: tuple[tuple[RoomKey, bool], ...]  #: sequences in a step, and whether they are whole here
    holders: dict[int, RoomKey]
    states: bytes
    memory: tuple[Any, ...]
    empty: bool
    worn: bool  #: no page is in use, and they were


class Rank(Node):
    """`me` is an incarnation: side, number, epoch."""

    STEP = ""  #: the stage of a sequence whose forward runs

    def __init__(self, me: str, setup: Setup) -> None:
        super().__init__()
        self.me = me
        self.setup = setup
        self.seqs: dict[RoomKey, Sequence] = {}
        kept = setup.remembered
        self.rooms: RoomTable[Any] = RoomTable() if kept is None else RoomTable(kept, kept)
        self.inbox = AbortInbox() if kept is None else AbortInbox(kept + 1)
        self.applied = 0  #: ghost: entries of the abort log applied, each in its turn
        self.ack_due: set[RoomKey] = set()
        self.ledger: Ledger = self._new_ledger()
        self.memory: list[Any] = [None] * setup.pages

    # ---- from the control plane ------------------------------------------------------------------------------------

    def on_open(self, key: RoomKey, peers: tuple[str, ...]) -> None:
        current = self.rooms.current(key.room)
        if current is not None and current[0] == key:
            return
        half: Any = self.make_half(key, peers)
        try:
            aborted = self.rooms.open(key, half, key.room)
        except ValueError:
            self._up("report", key, RoomState.ABORTED)
            self._up("acked", key, self.rooms.ended(key) or Quiet.QUIET)
            return
        self.opened(key)
        if aborted:
            self.carry_out(key, half, half.abort(AbortSource.ADMIN, ""))
        else:
            self._up("report", key, half.state)

    def on_abort(self, seq: int, key: RoomKey) -> None:
        for entry in self.inbox.offer(AbortEntry(seq, key, AbortSource.CLIENT, "")):
            if entry.seq != self.applied + 1:
                raise Violation("S4", f"{self.me} applied abort {entry.seq} after {self.applied}")
            self.applied = entry.seq
            half = self.rooms.get(entry.key)
            if half is not None:
                self.carry_out(entry.key, half, half.abort(entry.source, ""))
            else:
                self._up("acked", entry.key, self.bury(entry.key))
        self._up("received", self.inbox.received)

    def on_fenced(self, peer: str) -> None:
        self.forget_peer(peer)
        for key, half in self.rooms:
            self.carry_out(key, half, half.fenced(peer))

    def on_settled(self) -> None:
        """As in the control plane: what follows depends on the differences of the numbers alone."""
        self.inbox.received -= self.applied
        self.applied = 0

    def on_idle(self) -> None:
        """No sequence has pages, nothing touches any: which of them comes first, and what they held, is the same."""
        self.ledger = self._new_ledger()

    def _new_ledger(self) -> Ledger:
        return Ledger({SPACE: SpaceSpec(self.setup.pages, ("kv",))}, LAYERS)

    # ---- from inside the engine ------------------------------------------------------------------------------------

    def on_fault(self, key: RoomKey) -> None:
        """The engine aborts the room by itself."""
        self.abort(key)

    def on_submit(self, key: RoomKey, first: bool) -> None:
        """The request arrives; on other ranks than the first by the round, whatever became of the room there."""
        current = self.rooms.current(key.room)
        lives = current is not None and current[0] == key and current[1].live
        if key in self.seqs or (first and not lives):
            return
        seq = self.seqs[key] = Sequence(key)
        if not lives:
            seq.aborting = seq.quiet = True

    def on_round(self, agreed: tuple[Facts, ...]) -> None:
        for seq, facts in zip(list(self.seqs.values()), agreed, strict=True):
            seq.may_begin = bool(facts.told)
            if not facts.abort and not seq.dropped:
                self._drop(seq)
            elif facts.ready and seq.stage == "transferring" and not seq.dropped:
                self.op("start", seq.key)
                self.start(seq)
            if seq.quarantining and not seq.freed:
                self._quarantine(seq)
            if facts.quiet:
                self._retire(seq)

    def on_admit(self, budget: int) -> None:
        """First come, first served; the first without pages makes the others wait."""
        for seq in [seq for seq in self.seqs.values() if seq.stage == "waiting" and seq.may_begin]:
            if seq.dropped:
                continue
            if budget < self.setup.wants:
                return
            budget -= self.setup.wants
            taken = self.ledger.allocate({SPACE: self.setup.wants})
            if taken is None:
                raise Violation("S4", f"{self.me} has not the pages for room {seq.key} that all ranks agreed on")
            seq.pages = taken[SPACE]
            self.op("admit", seq.key, len(seq.pages))
            self.admit(seq)

    def abort(self, key: RoomKey) -> None:
        half = self.rooms.get(key)
        if half is not None:
            self.carry_out(key, half, half.abort(_FAULT, ""))

    def apply(self, key: RoomKey, event: Callable[[Any], list[Effect]]) -> None:
        half = self.rooms.get(key)
        if half is None:
            raise UnknownRoom
        self.carry_out(key, half, event(half))

    def try_apply(self, key: RoomKey, event: Callable[[Any], list[Effect]]) -> bool:
        try:
            self.apply(key, event)
        except GONE:
            return False
        return True

    def op(self, *what: Any) -> None:
        """S4: what every rank must do alike."""
        self.out.append(("op", *what))

    # ---- a sequence's end ------------------------------------------------------------------------------------------

    def _drop(self, seq: Sequence) -> None:
        self.op("drop", seq.key)
        seq.dropped = True
        self.abort(seq.key)
        running, seq.stage = seq.stage == self.STEP, "dropped"
        if running:
            self.try_apply(seq.key, lambda half: half.forward_end())
        if not self.setup.quiesce:
            self._release(seq)

    def _quarantine(self, seq: Sequence) -> None:
        self._free(seq)
        if seq.transfer is not None and seq.transfer.open:
            self.ledger.quarantine(seq.transfer)

    def _retire(self, seq: Sequence) -> None:
        self.op("retire", seq.key)
        self._release(seq)
        del self.seqs[seq.key]

    def _release(self, seq: Sequence) -> None:
        for load in (seq.transfer, seq.lease):
            if load is not None and load.open:
                self.ledger.end_load(load)
        for consumer in list(seq.tickets):
            self.leave(seq.tickets.pop(consumer))
        self._free(seq)

    def _free(self, seq: Sequence) -> None:
        if not seq.freed:
            seq.freed = True
            self.ledger.free(SPACE, seq.pages)

    def leave(self, ticket: Ticket) -> None:
        if not ticket.state.value.startswith(("released", "revoked")):
            self.ledger.release(ticket)

    # ---- effects ---------------------------------------------------------------------------------------------------

    def carry_out(self, key: RoomKey, half: Half, effects: list[Effect]) -> None:
        seq = self.seqs.get(key)
        for effect in effects:
            match effect:
                case Enter(state):
                    self._entered(key, half, state)
                case TellPeer(peer, _, _):
                    self.tell_peer(key, peer)
                case AckPeer(peer, outcome):
                    self._peer(peer, "ack", key, outcome)
                case ReleasePages():
                    if seq is not None:
                        seq.quiet = True
                case Quarantine(peers):
                    if seq is not None:
                        seq.quarantining = True
                    for peer in peers:
                        self._up("quarantined", key, peer)

    def _entered(self, key: RoomKey, half: Half, state: RoomState) -> None:
        self._up("report", key, state)
        if state is RoomState.ABORTING:
            self.ack_due.add(key)
            self.ledger.revoke(key)
            self.dropped(key)
            if key in self.seqs:
                self.seqs[key].aborting = True
        elif state.terminal:
            outcome = Quiet.POISONED if isinstance(half, Writer) and half.poisoned else Quiet.QUIET
            if state is RoomState.ABORTED:
                self._up("acked", key, outcome)
            self.rooms.end(key, outcome)
            self.ack_due.discard(key)

    def bury(self, key: RoomKey) -> Quiet:
        self.rooms.bury(key, 1.0)
        return self.rooms.ended(key) or Quiet.QUIET

    def _up(self, *frame: Any) -> None:
        self.out.append(("up", *frame))

    def _peer(self, peer: str, *frame: Any) -> None:
        self.out.append(("peer", peer, *frame))

    # ---- each side's own -------------------------------------------------------------------------------------------

    def make_half(self, key: RoomKey, peers: tuple[str, ...]) -> Half:
        raise NotImplementedError

    def opened(self, key: RoomKey) -> None:
        """The room lives here now."""

    def dropped(self, key: RoomKey) -> None:
        """The room is aborting: nothing more of it is posted or expected."""

    def admit(self, seq: Sequence) -> None:
        raise NotImplementedError

    def start(self, seq: Sequence) -> None:
        """Decode: the bytes are here, on every rank."""

    def told(self, seq: Sequence) -> bool:
        return True

    def tell_peer(self, key: RoomKey, peer: str) -> None:
        self._peer(peer, "abort", key)

    def forget_peer(self, peer: str) -> None:
        raise NotImplementedError

    # ---- what others look at ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        """What a free page still holds is nothing that anybody may read: old bytes must not pass for new ones."""
        for page in self.ledger._spaces[SPACE].free:
            self.memory[page] = None

    def check(self) -> None:
        owners: dict[int, RoomKey] = {}
        space = self.ledger._spaces[SPACE]
        for seq in self.seqs.values():
            if seq.freed:
                continue  # what it held is guarded by its readers and its loads
            for page in seq.pages:
                if page in owners:
                    raise Violation("S3", f"{self.me} page {page} belongs to rooms {owners[page]} and {seq.key}")
                owners[page] = seq.key
                if seq.stage == self.STEP and space.state[page] != OWNED:
                    raise Violation("S2", f"{self.me} page {page} was given back under a forward of room {seq.key}")
        if min(space.readers) < 0:
            raise Violation("S2", f"{self.me} lost count of the readers of a page")

    def moves(self) -> list[Event]:
        return []

    def view(self) -> RankView:
        space = self.ledger._spaces[SPACE]
        seqs = list(self.seqs.values())
        free = len(space.free)
        head = next((s for s in seqs if s.stage == "waiting" and s.may_begin and not s.dropped), None)
        clean = free == self.setup.pages and not self.ledger.tickets and not self.ledger.loads
        return RankView(
            rooms=tuple(key for key, _ in self.rooms),
            live=frozenset(key for key, half in self.rooms if half.live),
            over=frozenset(self._over()),
            expects=frozenset(s.key for s in seqs if s.expected),
            ack_due=tuple(sorted(self.ack_due)),
            facts=tuple((s.key, Facts(not s.aborting, self.told(s), s.ready, s.quiet)) for s in seqs),
            budget=free,
            admits=head is not None,
            working=tuple((s.key, not s.aborting) for s in seqs if s.stage == self.STEP),
            holders={page: s.key for s in seqs for page in s.pages},
            states=bytes(space.state),
            memory=tuple(self.memory),
            empty=clean and not seqs and not len(self.rooms),
            worn=clean
            and not any(s.pages for s in seqs)
            and (any(space.filled) or list(space.free) != sorted(space.free)),
        )

    def _over(self) -> Iterator[RoomKey]:
        yield from (key for key, half in self.rooms if not half.live)
        for room, last in (*self.rooms._ended.items(), *self.rooms._poisons.items()):
            yield from (RoomKey(room, generation) for generation in range(1, last + 1))


def is_free(view: RankView, page: int) -> bool:
    return view.states[page] == FREE
