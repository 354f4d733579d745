"""Guards of the machines, each taken out by name: what an event file must fail without.

Each is what a system without the guard does, in as few words as the real method allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from dsv4ctl.controlplane.aborts.inbox import AbortInbox
from dsv4ctl.controlplane.aborts.log import AbortEntry, AbortLog
from dsv4ctl.controlplane.link import codec
from dsv4ctl.controlplane.link.codec import FrameError
from dsv4ctl.controlplane.link.wire import Progress
from dsv4ctl.controlplane.rooms import room as whole_room
from dsv4ctl.controlplane.rooms.effects import AckPeer, Effect, ReleasePages, TellPeer
from dsv4ctl.controlplane.rooms.half import Half
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.rooms.room import Room, SendAbort
from dsv4ctl.controlplane.rooms.states import ABORTS, LIVE, TERMINAL, AbortSource, Quiet, RoomKey, RoomState
from dsv4ctl.controlplane.rooms.table import RoomTable
from dsv4ctl.controlplane.rooms.writer import Writer
from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.ledger import Ledger
from dsv4ctl.controlplane.tickets.space import Space
from dsv4ctl.controlplane.tickets.ticket import Ticket
from dsv4ctl.controlplane.tickets.types import Consumer, Guard, TicketState
from dsv4ctl.controlplane.watchdog import judge
from dsv4ctl.engine_adapters.agent import Agent

Patch = pytest.MonkeyPatch
Remove = Callable[[Patch], None]


# ---- aborts and pages --------------------------------------------------------------------------------------


def hold_until_acked(patch: Patch) -> None:
    """An aborting reader waits for its own forwards alone."""

    def settle(self: Reader) -> list[Effect]:
        if self.state not in ABORTS - TERMINAL:
            return []
        return self._move("busy") if self.forwards else [ReleasePages(), *self._move("quiet")]

    patch.setattr(Reader, "_settle", settle)


def ack_every_peer(patch: Patch) -> None:
    """One ack target a room: the last reader that asked overwrites the one before."""
    plain_abort, plain_settle = Writer.peer_abort, Writer._settle
    targets: dict[RoomKey, str] = {}

    def peer_abort(self: Writer, peer: str, source: AbortSource, reason: str) -> list[Effect]:
        targets[self.key] = peer
        return plain_abort(self, peer, source, reason)

    def settle(self: Writer) -> list[Effect]:
        effects = plain_settle(self)
        return [e for e in effects if not isinstance(e, AckPeer) or e.peer == targets.get(self.key, e.peer)]

    patch.setattr(Writer, "peer_abort", peer_abort)
    patch.setattr(Writer, "_settle", settle)


def ack_when_quiet(patch: Patch) -> None:
    """A writer acknowledges, and gives its pages back, with writes still in flight."""
    plain = Writer._settle

    def settle(self: Writer) -> list[Effect]:
        posted, self.in_flight = self.in_flight, 0
        effects = plain(self)
        self.in_flight = posted
        return effects

    patch.setattr(Writer, "_settle", settle)


def landed_is_quiet(patch: Patch) -> None:
    """A writer whose last bytes are here is waited for all the same."""
    plain = Reader.landed

    def landed(self: Reader, peer: str) -> list[Effect]:
        writing = set(self._writing)
        effects = plain(self, peer)
        self._writing = writing
        return [e for e in effects if not isinstance(e, ReleasePages)]

    patch.setattr(Reader, "landed", landed)


def generation(patch: Patch) -> None:
    """A room is known by its number alone: a frame is for whatever lives under it."""
    plain = Agent.peer_ack

    def peer_ack(self: Agent, key: RoomKey, peer: str, outcome: Quiet) -> None:
        plain(self, self.current(key.room) or key, peer, outcome)

    patch.setattr(Agent, "peer_ack", peer_ack)


def ended_generations(patch: Patch) -> None:
    """What ended here is forgotten at once: the same generation opens again."""
    patch.setattr(RoomTable, "ended", lambda self, key: None)
    plain = RoomTable.end

    def end(self: RoomTable[Any], key: RoomKey, outcome: Quiet) -> None:
        plain(self, key, outcome)
        self._ended.clear()

    patch.setattr(RoomTable, "end", end)


def tombstone(patch: Patch) -> None:
    """The abort of a room that is not known yet is answered and forgotten."""
    patch.setattr(RoomTable, "bury", lambda self, key, until: None)


def answer_for_unknown_rooms(patch: Patch) -> None:
    """A writer answers for rooms that live."""
    plain = Agent.peer_abort

    def peer_abort(self: Agent, key: RoomKey, peer: str, source: AbortSource, reason: str) -> None:
        if self.current(key.room) == key:
            plain(self, key, peer, source, reason)

    patch.setattr(Agent, "peer_abort", peer_abort)


def abort_in_every_state(patch: Patch) -> None:
    """An abort reaches what runs, not what still waits for its peer or its pages."""
    for half, running in ((Reader, {RoomState.DECODING}), (Writer, {RoomState.LOADING, RoomState.SENDING})):
        plain = half.abort

        def abort(
            self: Any, source: AbortSource, reason: str, plain: Any = plain, running: set[RoomState] = running
        ) -> list[Effect]:
            return plain(self, source, reason) if self.state in running else []

        patch.setattr(half, "abort", abort)


def tell_peer(patch: Patch) -> None:
    """A half that aborts says so to the control plane only; a writer acknowledges to who asked it."""
    plain_begin, plain_settle, plain_abort = Half._begin_abort, Writer._settle, Writer.peer_abort
    asked: set[tuple[RoomKey, str]] = set()

    def begin(self: Half, source: AbortSource, reason: str) -> list[Effect]:
        return [e for e in plain_begin(self, source, reason) if not isinstance(e, TellPeer)]

    def settle(self: Writer) -> list[Effect]:
        return [e for e in plain_settle(self) if not isinstance(e, AckPeer) or (self.key, e.peer) in asked]

    def peer_abort(self: Writer, peer: str, source: AbortSource, reason: str) -> list[Effect]:
        asked.add((self.key, peer))
        return plain_abort(self, peer, source, reason)

    patch.setattr(Half, "_begin_abort", begin)
    patch.setattr(Writer, "_settle", settle)
    patch.setattr(Writer, "peer_abort", peer_abort)


def tell_every_rank(patch: Patch) -> None:
    """The control plane aborts a room on its first rank only: the other leg times out."""
    plain = Room.abort

    def abort(self: Room, source: AbortSource, reason: str, now: float) -> list[Any]:
        effects = plain(self, source, reason, now)
        sends = [e for e in effects if isinstance(e, SendAbort)]
        return [e for e in effects if e not in sends[1:]]

    patch.setattr(Room, "abort", abort)


def resend(patch: Patch) -> None:
    """An abort frame is sent once."""
    plain = AbortLog.due

    def due(self: AbortLog, now: float) -> list[AbortEntry]:
        entries = plain(self, now)
        self._unreceived.clear()
        return entries

    patch.setattr(AbortLog, "due", due)


def once_and_in_order(patch: Patch) -> None:
    """An abort frame is applied when it comes, whatever is missing before it."""

    def offer(self: AbortInbox, entry: AbortEntry) -> list[AbortEntry]:
        self.received = max(self.received, entry.seq)
        return [entry]

    patch.setattr(AbortInbox, "offer", offer)


def no_work_once_aborting(patch: Patch) -> None:
    """An aborted prompt is still computed to its end."""
    moves = dict(Writer.MOVES)
    moves["forward_begin"] = moves["forward_begin"]._replace(allowed=LIVE | ABORTS - TERMINAL)
    patch.setattr(Writer, "MOVES", moves)


def declared_cancellable(patch: Patch) -> None:
    """Every engine has the same time to acknowledge, whatever it says of itself."""
    patch.setattr(whole_room, "allowed", lambda deadlines, declared: dict(deadlines))


def first_reason(patch: Patch) -> None:
    """Whoever passes an abort on gives a reason of its own."""
    plain = Half._begin_abort

    def begin(self: Half, source: AbortSource, reason: str) -> list[Effect]:
        return plain(self, AbortSource.ENGINE_FAULT, "length")

    patch.setattr(Half, "_begin_abort", begin)


def ack_is_no_landing(patch: Patch) -> None:
    """A writer that is quiet counts as one whose bytes are here."""
    plain = Reader._quiet

    def quiet(self: Reader, peer: str, why: str) -> list[Effect]:
        return self.landed(peer) if self.live else plain(self, peer, why)

    patch.setattr(Reader, "_quiet", quiet)


def every_peer_landed(patch: Patch) -> None:
    """The first writer's last bytes make the room whole."""
    plain = Reader.landed

    def landed(self: Reader, peer: str) -> list[Effect]:
        plain(self, peer)
        self._landed = set(self.peers)
        return self._move("landed") if self.live else self._settle()

    patch.setattr(Reader, "landed", landed)


def time_out_quarantines(patch: Patch) -> None:
    """No ack by the deadline: the pages are freed."""

    def overdue(self: Reader) -> list[Effect]:
        if self.state is not RoomState.QUIESCING:
            return []
        self._writing.clear()
        return self._settle()

    patch.setattr(Reader, "ack_overdue", overdue)


def poison(patch: Patch) -> None:
    """A write whose end is unknown counts as ended."""
    plain = Writer.written
    patch.setattr(Writer, "written", lambda self, ok: plain(self, True))


def one_generation_lives(patch: Patch) -> None:
    """A new generation takes the place of the one that lives, whatever that still holds."""
    plain = RoomTable.open

    def opened(self: RoomTable[Any], key: RoomKey, half: Any, turn: int = 0) -> bool:
        self._rooms.pop(key.room, None)
        return plain(self, key, half, turn)

    patch.setattr(RoomTable, "open", opened)


# ---- frames ------------------------------------------------------------------------------------------------


def bad_frames_are_survived(patch: Patch) -> None:
    """A frame that is none ends the thread that read it."""
    plain = codec.Decoder.feed

    def feed(self: codec.Decoder[Any], data: bytes) -> Iterator[Any]:
        for frame in plain(self, data):
            if isinstance(frame, FrameError):
                raise frame
            yield frame

    patch.setattr(codec.Decoder, "feed", feed)


def peers_of_the_room(patch: Patch) -> None:
    """Anybody's word counts for the room."""

    def check(self: Half, peer: str) -> None:
        return

    plain = Reader.ack

    def ack(self: Reader, peer: str, outcome: Quiet) -> list[Effect]:
        return plain(self, self.peers[0], outcome)

    patch.setattr(Half, "_check_peer", check)
    patch.setattr(Reader, "ack", ack)


# ---- tickets -----------------------------------------------------------------------------------------------


def lease_holds_pages(patch: Patch) -> None:
    """A page is free as soon as its owner says so, whatever still writes it."""
    patch.setattr(Space, "quiet", lambda self, page: not self.readers[page])


def ticket_holds_pages(patch: Patch) -> None:
    """A page is free as soon as its owner says so, whoever still reads it."""
    patch.setattr(Space, "quiet", lambda self, page: self.load[page] is None)


def page_generations(patch: Patch) -> None:
    """A page number is enough: whose it is now is not asked."""
    patch.setattr(Ledger, "_refuse_stale", lambda self, space, page, generation: None)


def one_release(patch: Patch) -> None:
    """A ticket may be released again: whatever it had counted is counted down once more."""
    patch.setattr(Ledger, "_check_live", lambda self, ticket: None)


def whole_groups(patch: Patch) -> None:
    """A page counts as there when any pool of it is."""
    patch.setattr(Space, "covers", lambda self, pools, asked: bool(pools & asked))


def slowest_member(patch: Patch) -> None:
    """The first load that a ticket waits for speaks for all of them."""

    def grant(self: Ledger, ticket: Ticket) -> bool:
        before = ticket.readable
        ticket.readable = ticket.loads[0].readable(ticket.consumer) if ticket.loads else self.layers
        if ticket.readable and ticket.state is TicketState.PENDING:
            ticket.state = TicketState.GRANTED
        return ticket.readable != before

    patch.setattr(Ledger, "_grant", grant)


def two_index_spaces(patch: Patch) -> None:
    """A page number is a page number, on the host and on the device."""

    patch.setattr(Ledger, "_refuse_side", lambda self, space, who, does: None)


def registry(patch: Patch) -> None:
    """Nobody has to say that it reads."""
    plain = Gate.request

    def request(self: Gate, consumer: Consumer, extents: Any, *, room: Any = None) -> Ticket:
        self.register(consumer, "somewhere")
        return plain(self, consumer, extents, room=room)

    patch.setattr(Gate, "request", request)


def failed_loads_revoke(patch: Patch) -> None:
    """A load that failed leaves its readers waiting, and what ended short counts as whole."""
    plain = Ledger.end_load

    def end(self: Ledger, load: Any) -> list[Ticket]:
        load.failed, load.landed = False, self.layers
        return plain(self, load)

    patch.setattr(Ledger, "fail_load", lambda self, load: [])
    patch.setattr(Ledger, "end_load", end)


def _guard_off(guard: Guard) -> Remove:
    """As `[unsafe]` switches it off, on every gate from its beginning."""

    def remove(patch: Patch) -> None:
        plain = Gate.__init__

        def init(self: Gate, *arguments: Any) -> None:
            plain(self, *arguments)
            self.set_guards_off([guard])

        patch.setattr(Gate, "__init__", init)

    return remove


# ---- the watchdog ------------------------------------------------------------------------------------------

History = Sequence[tuple[float, Progress]]


def _judged(change: Callable[[int, Progress], Progress]) -> Remove:
    def remove(patch: Patch) -> None:
        plain = judge.judge

        def judged(history: History, now: float, wedge: float) -> judge.Verdict:
            return plain([(at, change(n, report)) for n, (at, report) in enumerate(history)], now, wedge)

        patch.setattr(judge, "judge", judged)

    return remove


def _any_answer(number: int, report: Progress) -> Progress:
    return msgspec.structs.replace(report, steps=number)


def _tokens_alone(number: int, report: Progress) -> Progress:
    return msgspec.structs.replace(report, steps=0)


def _always_work(number: int, report: Progress) -> Progress:
    return msgspec.structs.replace(report, work=max(1, report.work))


REMOVALS: dict[str, Remove] = {
    function.__name__: function
    for function in (
        *(hold_until_acked, ack_every_peer, ack_when_quiet, landed_is_quiet, generation, ended_generations),
        *(
            tombstone,
            answer_for_unknown_rooms,
            abort_in_every_state,
            tell_peer,
            tell_every_rank,
            resend,
            once_and_in_order,
        ),
        *(
            no_work_once_aborting,
            declared_cancellable,
            first_reason,
            ack_is_no_landing,
            every_peer_landed,
            time_out_quarantines,
            poison,
            one_generation_lives,
        ),
        *(bad_frames_are_survived, peers_of_the_room, lease_holds_pages, ticket_holds_pages, page_generations),
        *(one_release, whole_groups, slowest_member, two_index_spaces, registry, failed_loads_revoke),
    )
} | {
    "indexer_ticket": _guard_off(Guard.INDEXER),
    "progress_not_health": _judged(_any_answer),  # a report that comes is progress
    "steps_are_progress": _judged(_tokens_alone),  # only tokens are
    "no_work_is_idle": _judged(_always_work),  # nothing done is wedged, asked for or not
}
