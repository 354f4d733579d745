"""The agent of one rank: its ledger, its rooms and its link, inside the engine's process.

It turns link frames, peer messages and engine progress into events of the pure room machines, and their effects
into calls of `Hooks`. Synchronous and thread-safe: one lock, no event loop (SGLang's scheduler has none). Hooks
are called under that lock and must not block; the lock is always taken before the gate's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from dsv4ctl.controlplane.aborts.inbox import AbortInbox
from dsv4ctl.controlplane.aborts.log import AbortEntry
from dsv4ctl.controlplane.link.wire import (
    Abort,
    AbortAck,
    Answer,
    Fenced,
    LedgerCounts,
    OpenRoom,
    Quarantined,
    Query,
    Received,
    Role,
    RoomReport,
    SetGuards,
    ToControlPlane,
    ToRank,
)
from dsv4ctl.controlplane.rooms.effects import AckPeer, Effect, Enter, Quarantine, Refusal, ReleasePages, TellPeer
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.rooms.states import ABORTS, AbortSource, Quiet, RoomKey, RoomState
from dsv4ctl.controlplane.rooms.table import RoomTable
from dsv4ctl.controlplane.rooms.writer import Writer
from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.types import Guard

#: Of the `ack` deadline, when a reader quarantines: it names the writer that it waits for, and that one is fenced,
#: before the control plane's own deadline has to guess who is to blame.
QUARANTINE_SHARE = 0.75
Half = Writer | Reader
#: How long the abort of a room that is not known yet is remembered: beyond every deadline for `allocated`.
_TOMBSTONE_SECONDS = 3600.0


class Hooks(Protocol):
    """What the engine does for its agent."""

    def opened(self, opening: OpenRoom) -> None:
        """A room begins; its request follows."""

    def dropped(self, key: RoomKey, source: AbortSource, reason: str) -> None:
        """The room is aborting: drop its request from every queue at the next step."""

    def tell_peer(self, key: RoomKey, peer: str, source: AbortSource, reason: str) -> None: ...

    def ack_peer(self, key: RoomKey, peer: str, outcome: Quiet) -> None: ...

    def release(self, key: RoomKey) -> None:
        """Nobody writes the room's pages any more: end its loads, free its pages, release its tickets."""

    def quarantine(self, key: RoomKey) -> dict[str, int]:
        """Quarantine the room's pages until `release`; returns how many, by space."""

    def query(self, what: str) -> Any:
        """Answers a `Query` that is not the agent's own, without its lock: it may take long.

        Raises ValueError with the reason if it can't.
        """


class UnknownRoomError(KeyError):
    """The room is unknown here, ended, or lives in another generation."""


class Agent:
    """`send` queues a frame on the link; `clock` is monotonic seconds."""

    def __init__(
        self,
        role: Role,
        incarnation: str,
        gate: Gate,
        hooks: Hooks,
        send: Callable[[ToControlPlane], None],
        clock: Callable[[], float],
    ) -> None:
        self.incarnation = incarnation
        self.gate = gate
        self.counters: Counter[str] = Counter()
        self._role = role
        self._hooks = hooks
        self._send = send
        self._clock = clock
        self._lock = threading.RLock()
        self._rooms: RoomTable[Half] = RoomTable()
        self._inbox = AbortInbox()
        self._ack_deadlines: dict[RoomKey, float] = {}
        self._ack_due: dict[RoomKey, float] = {}
        self._details: dict[RoomKey, dict[str, Any]] = {}

    # ---- from the engine -----------------------------------------------------------------------------

    def apply(self, key: RoomKey, event: Callable[[Any], list[Effect]]) -> None:
        """Feeds one event to the room's machine and carries out its effects.

        Raises UnknownRoomError; Refusal if the room's state does not allow the event (nothing changed).
        """
        with self._lock:
            half = self._rooms.get(key)
            if half is None:
                raise UnknownRoomError(key)
            self._carry_out(key, half, event(half))

    def abort(self, key: RoomKey, source: AbortSource, reason: str) -> None:
        """Aborts a room from inside the engine; an unknown or ended one is left alone."""
        with self._lock:
            half = self._rooms.get(key)
            if half is not None:
                self._carry_out(key, half, half.abort(source, reason))

    def told(self, key: RoomKey) -> bool:
        """Every peer told where to write, or the room is over: a writer's request need not wait any longer."""
        with self._lock:
            half = self._rooms.get(key)
            return not isinstance(half, Writer) or half.told or not half.live

    def note(self, key: RoomKey, **detail: Any) -> None:
        """Adds to what the room's next report says."""
        with self._lock:
            if self._rooms.get(key) is not None:
                self._details.setdefault(key, {}).update(detail)

    def current(self, room: int) -> RoomKey | None:
        """The live generation of `room`, for a request that names only the number."""
        with self._lock:
            found = self._rooms.current(room)
            return None if found is None else found[0]

    def rooms(self) -> list[dict[str, Any]]:
        with self._lock:
            return [
                {"key": str(key), "state": half.state.value, "forwards": half.forwards, "reason": half.reason}
                for key, half in self._rooms
            ]

    def ledger_counts(self) -> LedgerCounts:
        pages, totals = self.gate.counts(), self.gate.totals()
        return LedgerCounts(
            tickets=totals["tickets"],
            pending=totals["pending"],
            revoking=totals["revoking"],
            loads=totals["loads"],
            pages_owned=pages["owned"],
            pages_leased=pages["leased"],
            pages_retiring=pages["retiring"],
            pages_quarantined=pages["quarantined"],
            refused=totals["refused"],
            violations=totals["violations"],
        )

    def tick(self) -> None:
        """Call it a few times a second: ack deadlines and tombstones."""
        now = self._clock()
        with self._lock:
            self._rooms.sweep(now)
            for key, due in list(self._ack_due.items()):
                if due <= now:
                    del self._ack_due[key]
                    half = self._rooms.get(key)
                    if isinstance(half, Reader):
                        self._carry_out(key, half, half.ack_overdue())

    # ---- a control plane that is gone ----------------------------------------------------------------

    def orphaned(self, why: str) -> None:
        """Nobody waits for an answer any more: every room is aborted, and quiesces between the ranks alone."""
        with self._lock:
            for key, half in self._rooms:
                self._carry_out(key, half, half.abort(AbortSource.ENGINE_FAULT, why))

    def adopted(self) -> None:
        """Another control plane listens. It counts aborts from 1, and learns what only it can end."""
        with self._lock:
            self._inbox = AbortInbox()
            self._rooms.adopted()
            for key in self._rooms.poisoned():
                self._send(AbortAck(key, Quiet.POISONED))
            for key, half in self._rooms:
                self._send(RoomReport(key, half.state, {"reason": half.reason}))
                if isinstance(half, Reader) and half.quarantined:
                    for peer in sorted(half.awaiting):
                        self._send(Quarantined(key, peer, self._hooks.quarantine(key)))

    # ---- from the peer -------------------------------------------------------------------------------

    def peer_abort(self, key: RoomKey, peer: str, source: AbortSource, reason: str) -> None:
        """`peer` aborted the room. A writer acks it when quiet; of an unknown or ended room, at once."""
        with self._lock:
            half = self._rooms.get(key)
            if isinstance(half, Writer):
                self._carry_out(key, half, half.peer_abort(peer, source, reason))
            elif half is not None:
                self._carry_out(key, half, half.abort(source, reason))
            elif self._role is Role.PREFILL:
                self._ack(key, peer, self._bury(key))

    def peer_ack(self, key: RoomKey, peer: str, outcome: Quiet) -> None:
        """`peer` says that its writer is quiet. Of a room that does not live here it is counted, no more.

        Repeated: the room's last generation has ended here; a writer acks whenever it is told. Late: an older one.
        """
        with self._lock:
            self.gate.trace.record("received", key, peer, note=f"ack:{outcome.value}")
            half = self._rooms.get(key)
            if isinstance(half, Reader):
                self._carry_out(key, half, half.ack(peer, outcome))
            else:
                self.counters["repeated_acks" if self._rooms.is_over(key) else "late_acks"] += 1

    # ---- from the control plane ----------------------------------------------------------------------

    def handle(self, frame: ToRank) -> None:
        """One frame of the link. A frame that can't be applied is counted and answered, never raised."""
        if isinstance(frame, Query):
            self._answer(frame)
            return
        with self._lock:
            match frame:
                case OpenRoom():
                    self._open(frame)
                case Abort():
                    for entry in self._inbox.offer(AbortEntry(frame.seq, frame.key, frame.source, frame.reason)):
                        self._apply_abort(entry)
                    self._send(Received(self._inbox.received))
                case Fenced():
                    self.gate.trace.record("fenced", None, frame.incarnation)
                    for key, half in self._rooms:
                        self._carry_out(key, half, half.fenced(frame.incarnation))
                case SetGuards():
                    self._set_guards(frame.off)
                case _:
                    self.counters["unexpected_frames"] += 1

    def _open(self, opening: OpenRoom) -> None:
        key = opening.key
        half: Half
        if self._role is Role.PREFILL:
            half = Writer(key, opening.peers)
        else:
            half = Reader(key, opening.peers if self._role is Role.DECODE else ())
        if self.current(key.room) == key:
            self.counters["repeated_rooms"] += 1  # it lives: it must not be said to have ended
            return
        try:
            aborted = self._rooms.open(key, half, opening.turn)
        except ValueError as error:
            self.counters["refused_rooms"] += 1
            self._send(RoomReport(key, RoomState.ABORTED, {"reason": str(error)}))
            self._send(AbortAck(key, self._rooms.ended(key) or Quiet.QUIET))
            return
        self._ack_deadlines[key] = QUARANTINE_SHARE * opening.deadlines["ack"]
        self._hooks.opened(opening)
        if aborted:
            self._carry_out(key, half, half.abort(AbortSource.ADMIN, "aborted before it was known here"))
        else:
            self._send(RoomReport(key, half.state))

    def _apply_abort(self, entry: AbortEntry) -> None:
        half = self._rooms.get(entry.key)
        if half is not None:
            self._carry_out(entry.key, half, half.abort(entry.source, entry.reason))
            return
        self._send(AbortAck(entry.key, self._bury(entry.key)))

    def _bury(self, key: RoomKey) -> Quiet:
        """What to acknowledge of a room that does not live here. One that may still come is aborted when it does."""
        self._rooms.bury(key, self._clock() + _TOMBSTONE_SECONDS)
        return self._rooms.ended(key) or Quiet.QUIET

    def _set_guards(self, names: tuple[str, ...]) -> None:
        try:
            self.gate.set_guards_off([Guard(name) for name in names])
        except ValueError:
            self.counters["unknown_guards"] += 1

    def _answer(self, query: Query) -> None:
        try:
            match query.what:
                case "tickets":
                    body = self.gate.live()
                case "rooms":
                    body = self.rooms()
                case _:
                    body = self._hooks.query(query.what)
            self._send(Answer(query.id, body))
        except (ValueError, TypeError) as error:  # the hook's reason, or a body that no frame can carry
            self._send(Answer(query.id, None, str(error)))

    # ---- effects -------------------------------------------------------------------------------------

    def _carry_out(self, key: RoomKey, half: Half, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Enter(state):
                    self._entered(key, half, state)
                case TellPeer(peer, source, reason):
                    self._hooks.tell_peer(key, peer, source, reason)
                case AckPeer(peer, outcome):
                    self._ack(key, peer, outcome)
                case ReleasePages():
                    self._hooks.release(key)
                case Quarantine(peers):
                    pages = self._hooks.quarantine(key)
                    for peer in peers:
                        self._send(Quarantined(key, peer, pages))

    def _ack(self, key: RoomKey, peer: str, outcome: Quiet) -> None:
        self.gate.trace.record("sent", key, peer, note=f"ack:{outcome.value}")
        self._hooks.ack_peer(key, peer, outcome)

    def _entered(self, key: RoomKey, half: Half, state: RoomState) -> None:
        self.gate.trace.record("room", key, "", note=state.value)
        detail = self._details.pop(key, {})
        if state in ABORTS:
            detail |= {"source": half.source.value if half.source else None, "reason": half.reason}
        self._send(RoomReport(key, state, detail))
        if state is RoomState.ABORTING:
            self._ack_due[key] = self._clock() + self._ack_deadlines[key]
            self.gate.revoke(key)
            self._hooks.dropped(key, half.source or AbortSource.ENGINE_FAULT, half.reason or "")
        elif state.terminal:
            poisoned = isinstance(half, Writer) and half.poisoned
            outcome = Quiet.POISONED if poisoned else Quiet.QUIET
            if state is RoomState.ABORTED:
                self._send(AbortAck(key, outcome))
            self._rooms.end(key, outcome)
            self._ack_due.pop(key, None)
            self._ack_deadlines.pop(key, None)


__all__ = ["Agent", "Hooks", "Refusal", "UnknownRoomError"]
