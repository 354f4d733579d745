"""The room desk: opens rooms, feeds their machines, carries out their effects, keeps their deadlines."""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import anyio
import msgspec

from dsv4ctl.controlplane.config.schema import Config
from dsv4ctl.controlplane.link.codec import FrameError
from dsv4ctl.controlplane.link.server import LATE, LinkLostError
from dsv4ctl.controlplane.link.wire import (
    Abort,
    AbortAck,
    Fenced,
    OpenRoom,
    Progress,
    Quarantined,
    Received,
    Role,
    RoomReport,
    ToControlPlane,
)
from dsv4ctl.controlplane.rooms.room import (
    Effect,
    Ended,
    Entered,
    Fence,
    ParticipantInfo,
    Room,
    SendAbort,
    StaleReport,
    allowed,
)
from dsv4ctl.controlplane.rooms.states import LIVE, AbortSource, Quiet, RoomKey, RoomState
from dsv4ctl.controlplane.scheduler.agenda import Agenda
from dsv4ctl.controlplane.scheduler.estimate import transfer_bytes
from dsv4ctl.controlplane.scheduler.fleet import Engine, Fleet, Pair, Rank, Sample
from dsv4ctl.controlplane.scheduler.live import LiveRoom, RoomAbortedError, RoomRequest
from dsv4ctl.controlplane.scheduler.placement import NotServingError, OverAdmissionError, Placement
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import Level, Telemetry

#: Ended rooms kept for `rooms ID`.
ENDED_KEPT = 1024
#: Of a room number: it is drawn, so that none is ever used twice.
ROOM_BITS = 63
#: Seconds after a look that came `LATE` at which the rooms whose deadline passed are judged.
HEARD = 0.5


@dataclass
class _Timer:
    """When the deadline loop looks next, and how to make it look earlier."""

    at: float
    wake: anyio.Event


class RoomDesk:
    """All rooms of this control plane.

    `fence(incarnation, reason)` asks for a kill, `mismatched(room)` is told of a room whose bytes were wrong; both
    return at once.
    """

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        telemetry: Telemetry,
        fence: Callable[[str, str], None],
        mismatched: Callable[[LiveRoom], None],
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self._fleet = fleet
        self._telemetry = telemetry
        self._fence = fence
        self._mismatched = mismatched
        self._random_bits = random_bits
        self._integrity = config.policies.integrity
        self._deadlines: dict[str, float] = msgspec.structs.asdict(config.deadlines)
        self._placement = Placement(config, fleet)
        self._live: dict[RoomKey, LiveRoom] = {}
        self._answering: dict[LiveRoom, None] = {}
        self._ended: deque[LiveRoom] = deque(maxlen=ENDED_KEPT)
        self._counts: Counter[str] = Counter()
        self._turns = count(1)
        self._agenda = Agenda()
        self._heard_at = float("-inf")  #: no room is judged before
        self._timer = _Timer(float("inf"), anyio.Event())
        self.refusing: str | None = None  #: why no new room is opened at all

    # ---- opening ----------------------------------------------------------------------------------

    async def open(self, request: RoomRequest) -> LiveRoom:
        """A room whose request may be sent: see `OpenRoom`. Its `allocated` deadline bounds the wait.

        Raises NotServingError, OverAdmissionError, RoomAbortedError. Cancelled: the room is aborted.
        """
        if self.refusing is not None:
            raise NotServingError(self.refusing, draining=True)
        pair = self._placement.choose()
        amount = 0
        geometry = pair.decode.geometry
        if pair.prefill is not None and geometry is not None:
            amount = transfer_bytes(geometry, request.tokens)
        try:
            self._placement.admit(amount)
        except OverAdmissionError as error:
            self._telemetry.emit(Event.ROOM_REFUSED, "warning", reason=str(error))
            raise
        key = RoomKey(self._random_bits(ROOM_BITS), 1)
        return await self._settled(self._begin(key, next(self._turns), request, pair, amount))

    async def open_again(self, retracted: LiveRoom) -> LiveRoom:
        """The next generation of a retracted room, once the last one is quiet on both sides.

        It was admitted once, and is not refused now; it keeps its turn. Raises NotServingError; RoomAbortedError, also
        if the room was aborted meanwhile. Cancelled: nothing follows.
        """
        await retracted.ended.wait()  # an aborting room ends by its own deadlines
        if retracted.overruled is not None:
            raise retracted.overruled
        pair = self._placement.again(retracted.pair)
        key = retracted.key._replace(generation=retracted.key.generation + 1)
        return await self._settled(self._begin(key, retracted.turn, retracted.request, pair, retracted.bytes))

    async def _settled(self, live: LiveRoom) -> LiveRoom:
        try:
            await live.settled.wait()
        except anyio.get_cancelled_exc_class():
            self.abort(live, AbortSource.CLIENT, "the client left before the room was open")
            raise
        live.raise_if_aborted()
        return live

    def _begin(self, key: RoomKey, turn: int, request: RoomRequest, pair: Pair, amount: int) -> LiveRoom:
        participants = {
            rank.incarnation: ParticipantInfo(engine.name, rank.number, engine.role.value)
            for engine in pair.engines
            for rank in engine.ranks.values()
        }
        deadlines = allowed(self._deadlines, [engine.cancellable for engine in pair.engines])
        room = Room(key, request.request_id, request.session, participants, deadlines, anyio.current_time())
        live = LiveRoom(room, request, turn, pair, amount)
        self._live[key] = live
        self._placement.began(live)
        self._telemetry.emit(
            Event.ROOM_OPENED, **live.fields(), engines=[engine.name for engine in pair.engines], bytes=amount
        )
        if all(engine.in_order for engine in pair.engines):
            live.unwritten = len(participants)
        for engine in pair.engines:
            peer = next((other for other in pair.engines if other is not engine), None)
            self._open_on(engine, peer, live)
        self._keep_deadline(live)
        return live

    def _open_on(self, engine: Engine, peer: Engine | None, live: LiveRoom) -> None:
        frame = OpenRoom(
            key=live.key,
            request_id=live.room.request_id,
            session=live.room.session,
            peer_engine=peer.name if peer else None,
            peers=tuple(peer.ranks) if peer else (),
            deadlines=dict(live.room.deadlines),
            integrity=self._integrity,
            bootstrap_ports=peer.bootstrap_ports if peer and peer.role is Role.PREFILL else (),
            fresh=live.request.fresh,
            turn=live.turn,
        )
        for rank in engine.ranks.values():
            try:
                if rank.link is None:
                    raise LinkLostError("it has no link")
                rank.link.send(frame, partial(self._written, live))
            except LinkLostError as error:
                reason = f"{engine.name} rank {rank.number}: {error}"
                self.abort(live, AbortSource.ENGINE_FAULT, reason)

    def _written(self, live: LiveRoom) -> None:
        """A rank's opening is in its socket."""
        if live.unwritten:
            live.unwritten -= 1
            if not live.unwritten:
                live.settled.set()

    # ---- what ranks say ---------------------------------------------------------------------------

    def received(self, rank: Rank, frame: ToControlPlane) -> None:
        """One frame of a rank. Raises FrameError if it makes no sense from that rank."""
        now = anyio.current_time()
        match frame:
            case Progress():
                rank.history.append(Sample(now, frame))
            case RoomReport():
                self._reported(rank, frame, now)
            case AbortAck():
                self._acked(rank, frame, now)
            case Received():
                try:
                    rank.aborts.received(frame.seq)
                except ValueError as error:
                    raise FrameError(str(error)) from error
                self._telemetry.emit(Event.ABORT_RECEIVED, "debug", **rank.fields(), seq=frame.seq)
            case Quarantined():
                self._quarantined(rank, frame)
            case _:
                raise FrameError(f"{type(frame).__name__} is not a frame for a connected rank")

    def _reported(self, rank: Rank, frame: RoomReport, now: float) -> None:
        live = self._live.get(frame.key)
        if live is None:
            level: Level = "debug" if frame.state.terminal else "warning"
            self._telemetry.emit(
                Event.ROOM_LATE_REPORT, level, room=frame.key, state=frame.state,
                **rank.fields(),
            )  # fmt: skip
            if frame.state in LIVE:
                self._send_abort(
                    SendAbort(
                        rank.incarnation, frame.key, AbortSource.ENGINE_FAULT, "the control plane knows it no more"
                    )
                )
            return
        pools = frame.detail.get("digest_mismatches")
        if pools:
            self._telemetry.emit(
                Event.DIGEST_MISMATCH, "error", **live.fields(), pools=pools,
                **rank.fields(),
            )  # fmt: skip
        try:
            effects = live.room.report(rank.incarnation, frame.state, frame.detail, now)
        except ValueError as error:  # StaleReport is one; an unknown abort source another
            self._telemetry.emit(
                Event.ROOM_INVALID_REPORT, "error", **live.fields(), reason=str(error),
                **rank.fields(),
            )  # fmt: skip
            return
        self._apply(live, effects)
        if not live.settled.is_set() and live.room.allocated:
            live.settled.set()

    def _acked(self, rank: Rank, frame: AbortAck, now: float) -> None:
        live = self._live.get(frame.key)
        seconds = None if live is None or live.aborting_at is None else round(now - live.aborting_at, 4)
        self._telemetry.emit(
            Event.ABORT_ACKED, "debug", **self._fields(frame.key), outcome=frame.outcome, seconds=seconds,
            **rank.fields(),
        )  # fmt: skip
        if live is None:
            if frame.outcome is Quiet.POISONED:
                self._fence(rank.incarnation, f"room {frame.key}: poisoned, and known to nobody else")
            return
        try:
            self._apply(live, live.room.ack(rank.incarnation, frame.outcome, now))
        except StaleReport as error:
            raise FrameError(str(error)) from error

    def _quarantined(self, rank: Rank, frame: Quarantined) -> None:
        """The rank holds pages that only the end of `frame.peer` releases: fence it, or say that it is gone."""
        live = self._live.get(frame.key)
        if live is not None and frame.peer not in live.room.participants:
            raise FrameError(f"room {frame.key}: {frame.peer} takes no part in it")
        self._telemetry.emit(
            Event.ROOM_QUARANTINED,
            "error",
            **self._fields(frame.key),
            **rank.fields(),
            peer=frame.peer,
            pages=frame.pages,
        )
        if self._fleet.rank(frame.peer) is not None:
            self._fence(frame.peer, f"room {frame.key}: {rank.engine} has no ack of it")
        elif rank.link is not None:
            with suppress(LinkLostError):  # then the rank itself is about to be fenced
                rank.link.send(Fenced(frame.peer))

    # ---- engines that fail ------------------------------------------------------------------------

    def lost(self, incarnations: Iterable[str], reason: str) -> None:
        """These ranks will not answer any more: their rooms are aborted at once, before anything is reaped."""
        names = set(incarnations)
        for live in list(self._live.values()):
            if names & live.room.participants.keys() and not live.aborting.is_set():
                self.abort(live, AbortSource.ENGINE_FAULT, reason)

    def gone(self, incarnation: str) -> None:
        """The process of `incarnation` is killed and reaped: every other rank and every room of it learns so."""
        for _, rank in self._fleet.ranks():
            if rank.link is not None and rank.incarnation != incarnation:
                try:
                    rank.link.send(Fenced(incarnation))
                except LinkLostError:
                    continue  # it learns nothing any more: it will be fenced itself
        for live in list(self._live.values()):
            if incarnation in live.room.participants:
                self._apply(live, live.room.fenced(incarnation, anyio.current_time()))

    # ---- aborts -----------------------------------------------------------------------------------

    def abort(self, live: LiveRoom, source: AbortSource, reason: str) -> None:
        """Idempotent; an ended room is left as it is. A retracted one gets no further generation."""
        if live.retracted and live.overruled is None:
            live.overruled = RoomAbortedError(live.key, source, reason)
        self._apply(live, live.room.abort(source, reason, anyio.current_time()))

    def abort_where(self, wanted: Callable[[LiveRoom], bool], source: AbortSource, reason: str) -> list[LiveRoom]:
        """Aborts every room that is `wanted` and not aborted yet, and returns those.

        A retracted room whose next generation is still to come is one of them.
        """
        between = [live for live in self._answering if live.retracted and live.ended.is_set()]
        chosen = [live for live in [*self._live.values(), *between] if wanted(live) and not live.over]
        for live in chosen:
            self.abort(live, source, reason)
        return chosen

    def _send_abort(self, effect: SendAbort) -> None:
        rank = self._fleet.rank(effect.incarnation)
        if rank is None:
            return  # fenced already: `gone` told the room, or is about to
        entry = rank.aborts.append(effect.key, effect.source, effect.reason)
        due = rank.aborts.due(anyio.current_time())
        self._send_entries(rank, due or [entry], resent=False)
        self._look_by(rank.aborts.next_due())

    def _send_entries(self, rank: Rank, entries: Iterable[Any], resent: bool) -> None:
        for entry in entries:
            try:
                if rank.link is None:
                    return  # not connected: its process is starting or being fenced
                rank.link.send(Abort(entry.seq, entry.key, entry.source, entry.reason))
            except LinkLostError:
                return  # the supervisor was told, and fences it
            self._telemetry.emit(
                Event.ABORT_SENT, "debug", **self._fields(entry.key), seq=entry.seq, resent=resent,
                **rank.fields(),
            )  # fmt: skip

    # ---- effects ----------------------------------------------------------------------------------

    def _apply(self, live: LiveRoom, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendAbort():
                    self._send_abort(effect)
                case Fence():
                    self._fence(effect.incarnation, f"room {effect.key}: {effect.reason}")
                case Entered():
                    self._entered(live, effect.state)
                case Ended():
                    self._end(live)
        self._keep_deadline(live)

    def _entered(self, live: LiveRoom, state: RoomState) -> None:
        self._telemetry.emit(Event.ROOM_STATE, "debug", **live.fields(), state=state)
        if state is RoomState.ABORTING:
            live.begin_abort(anyio.current_time())
            level: Level = "info" if live.retracted else "warning"
            self._telemetry.emit(
                Event.ROOM_ABORTING, level, **live.fields(), source=live.room.source, reason=live.room.reason
            )
            if live.room.source is AbortSource.INTEGRITY:
                self._mismatched(live)

    def _end(self, live: LiveRoom) -> None:
        del self._live[live.key]
        self._agenda.forget(live.key)
        self._placement.ended(live)
        self._ended.append(live)
        room = live.room
        seconds = room.history[-1][1] - room.opened_at
        fields = {
            **live.fields(),
            "source": room.source,
            "reason": room.reason,
            "seconds": round(seconds, 4),
            "bytes_by_pool": room.details.get("bytes_by_pool", {}),
        }
        if live.retracted:
            self._telemetry.emit(Event.ROOM_RETRACTED, **fields)
        else:
            self._counts[room.state.value] += 1
            closed = room.state is RoomState.CLOSED
            self._telemetry.emit(
                Event.ROOM_CLOSED if closed else Event.ROOM_ABORTED, "info" if closed else "warning", **fields
            )
        live.settled.set()
        live.ended.set()

    # ---- time -------------------------------------------------------------------------------------

    def _keep_deadline(self, live: LiveRoom) -> None:
        due = live.room.next_deadline()
        if due is not None:
            self._agenda.note(live.key, due)
            self._look_by(max(due, self._heard_at))

    def _look_by(self, due: float | None) -> None:
        """Makes the deadline loop look at `due` at the latest."""
        if due is not None and due < self._timer.at:
            self._timer.at = due
            self._timer.wake.set()

    async def keep_deadlines(self, beat: Callable[[], None]) -> None:
        """The one task behind every room deadline and every re-sent abort. Runs until cancelled."""
        for live in self._live.values():  # what a life of this loop that died had taken is not forgotten
            self._keep_deadline(live)
        while True:
            beat()
            now = anyio.current_time()
            if now - self._timer.at > LATE and self._timer.at > self._heard_at:  # who was to be heard was, or never is
                self._heard_at = now + HEARD
            overdue = self._agenda.take(now) if now >= self._heard_at else []
            for live in [self._live[key] for key in overdue]:
                self._apply(live, live.room.tick(now))
            for _, rank in list(self._fleet.ranks()):
                self._send_entries(rank, rank.aborts.due(now), resent=True)
            resends = (rank.aborts.next_due() for _, rank in self._fleet.ranks())
            at = min([max(self._agenda.next, self._heard_at), *(due for due in resends if due is not None)])
            self._timer = _Timer(at, anyio.Event())
            with anyio.CancelScope(deadline=self._timer.at):
                await self._timer.wake.wait()

    # ---- looking ----------------------------------------------------------------------------------

    def rooms_of(self, engines: Iterable[str]) -> list[LiveRoom]:
        """Live rooms of these engines, and ended ones whose answer is still on its way to the client."""
        names = set(engines)
        return [live for live in {**dict.fromkeys(self._live.values()), **self._answering} if names & live.engines()]

    @contextmanager
    def answering(self, live: LiveRoom) -> Iterator[None]:
        """While a client is being answered from this room, its engines are not done with it."""
        self._answering[live] = None
        try:
            yield
        finally:
            self._answering.pop(live, None)
            live.answered.set()

    async def until_empty(self, engines: Callable[[], Iterable[str]]) -> None:
        """Returns once no room of `engines()` is left. The caller sets the deadline."""
        while rooms := self.rooms_of(engines()):
            waited = rooms[-1]  # when the youngest is over, most are: few looks at all rooms, however many there are
            await (waited.answered if waited.ended.is_set() else waited.ended).wait()

    def find(self, room: int) -> list[LiveRoom]:
        """Live and remembered generations of a room number, the oldest first."""
        found = [live for live in [*self._live.values(), *self._ended] if live.key.room == room]
        return sorted(found, key=lambda live: live.key)

    @property
    def live(self) -> Mapping[RoomKey, LiveRoom]:
        return self._live

    def counts(self) -> dict[str, int]:
        """Rooms by state; `closed` and `aborted` since start."""
        counts = Counter({state.value: self._counts[state.value] for state in RoomState if state.terminal})
        counts.update(live.room.state.value for live in self._live.values())
        return dict(counts)

    def _fields(self, key: RoomKey) -> dict[str, Any]:
        live = self._live.get(key)
        return {"room": key} if live is None else live.fields()
