"""The control plane's node: its rooms and abort logs, behind what `scheduler.desk` does with them."""

from __future__ import annotations

from typing import Any

from dsv4ctl.controlplane.aborts.log import RESEND_AFTER, AbortLog
from dsv4ctl.controlplane.explore.nodes import Node
from dsv4ctl.controlplane.rooms.room import Ended, Fence, ParticipantInfo, Room, SendAbort, StaleReport
from dsv4ctl.controlplane.rooms.states import ABORTS, LIVE, AbortSource, Quiet, RoomKey, RoomState

#: No clock: every deadline is due at once, and the world decides when somebody looks.
_NOW = 0.0
_DEADLINES = dict.fromkeys([*(state.value for state in LIVE), "ack"], 0.0)


class Plane(Node):
    """`fleet`: the incarnations of each engine; an engine that is down has none."""

    def __init__(self, prefill: tuple[str, ...], decode: tuple[str, ...]) -> None:
        super().__init__()
        self.fleet = {"P": prefill, "D": decode}
        self.logs = {name: AbortLog() for name in (*prefill, *decode)}
        self.rooms: dict[RoomKey, Room] = {}
        self.ended: set[RoomKey] = set()

    # ---- from gateway, clock and supervisor ------------------------------------------------------------------------

    def on_open(self, key: RoomKey) -> None:
        names = [(name, side) for side in ("P", "D") for name in self.fleet[side]]
        ranks = {name: ParticipantInfo(side, 0, "prefill" if side == "P" else "decode") for name, side in names}
        self.rooms[key] = Room(key, "r", None, ranks, _DEADLINES, _NOW)
        for name, side in names:
            self._send(name, ("open", key, self.fleet["D" if side == "P" else "P"]))

    def on_abort(self, key: RoomKey) -> None:
        self._apply(self.rooms[key].abort(AbortSource.CLIENT, "", _NOW))

    def on_tick(self, key: RoomKey) -> None:
        self._apply(self.rooms[key].tick(_NOW))

    def on_resend(self, name: str) -> None:
        self._send_entries(name, RESEND_AFTER)

    def on_lost(self, side: str) -> None:
        """Its ranks will not answer any more; nothing is reaped yet."""
        for room in list(self.rooms.values()):
            if set(self.fleet[side]) & room.participants.keys():
                self._apply(room.abort(AbortSource.ENGINE_FAULT, "", _NOW))

    def on_gone(self, side: str) -> None:
        """Every rank of the engine is killed and reaped."""
        names = self.fleet[side]
        for name in names:
            for other in (n for incarnations in self.fleet.values() for n in incarnations if n not in names):
                self._send(other, ("fenced", name))
            for room in list(self.rooms.values()):
                self._apply(room.fenced(name, _NOW))
        self.fleet[side] = ()
        for name in names:
            del self.logs[name]

    def on_up(self, side: str, names: tuple[str, ...]) -> None:
        self.fleet[side] = names
        self.logs.update({name: AbortLog() for name in names})

    def on_settled(self, name: str) -> None:
        """Every abort that the rank was told is received, and nothing is on the way: numbers count from 1 again."""
        self.logs[name] = AbortLog()

    # ---- from ranks ------------------------------------------------------------------------------------------------

    def on_frame(self, name: str, kind: str, *rest: Any) -> None:
        """A frame of the rank `name`. One that makes no sense from it is refused, as the desk refuses it."""
        if name not in self.logs:
            return  # its link was closed when its process was reaped
        try:
            getattr(self, f"_{kind}")(name, *rest)
        except StaleReport:
            return

    def _report(self, name: str, key: RoomKey, state: RoomState) -> None:
        if key in self.rooms:
            self._apply(self.rooms[key].report(name, state, {}, _NOW))
        elif state in LIVE:
            self._apply([SendAbort(name, key, AbortSource.ENGINE_FAULT, "")])

    def _acked(self, name: str, key: RoomKey, outcome: Quiet) -> None:
        if key in self.rooms:
            self._apply(self.rooms[key].ack(name, outcome, _NOW))
        elif outcome is Quiet.POISONED:
            self.out.append(("fence", name))

    def _received(self, name: str, number: int) -> None:
        self.logs[name].received(number)

    def _quarantined(self, name: str, key: RoomKey, peer: str) -> None:
        if peer in self.logs:
            self.out.append(("fence", peer))
        else:
            self._send(name, ("fenced", peer))

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _apply(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case SendAbort() if effect.incarnation in self.logs:
                    self.logs[effect.incarnation].append(effect.key, effect.source, "")
                    self._send_entries(effect.incarnation, _NOW)
                case Fence():
                    self.out.append(("fence", effect.incarnation))
                case Ended():
                    del self.rooms[effect.key]
                    self.ended.add(effect.key)

    def _send_entries(self, name: str, now: float) -> None:
        log = self.logs[name]
        for entry in log.due(now):
            self._send(name, ("abort", entry.seq, entry.key))
        log._resend_at = min(log._resend_at, RESEND_AFTER)  # time is relative: the clock begins anew after each event

    def _send(self, name: str, frame: tuple[Any, ...]) -> None:
        self.out.append(("down", name, frame))

    def view(self) -> PlaneView:
        return PlaneView(self)


class PlaneView:
    """Of a control plane, for the world around it."""

    __slots__ = ("abortable", "ended", "fleet", "overdue", "rooms", "settled", "submitted", "told", "unreceived")

    def __init__(self, plane: Plane) -> None:
        self.fleet = dict(plane.fleet)
        self.rooms = frozenset(plane.rooms)
        self.ended = frozenset(plane.ended)
        self.abortable = tuple(key for key, room in plane.rooms.items() if room.state not in ABORTS)
        self.submitted = tuple(key for key, room in plane.rooms.items() if room.allocated)
        self.overdue = tuple(key for key, room in plane.rooms.items() if room.next_deadline() is not None)
        self.told = frozenset((name, entry.key) for name, log in plane.logs.items() for entry in log._unreceived)
        self.settled = tuple(name for name, log in plane.logs.items() if log._seq and not log.pending)
        self.unreceived = tuple(name for name, log in plane.logs.items() if log.pending)
