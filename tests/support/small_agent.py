"""An agent on a small gate, with hooks and a link that only take notes."""

from __future__ import annotations

from typing import Any

from dsv4ctl.controlplane.link.wire import Abort, AbortAck, OpenRoom, Role, RoomReport, ToControlPlane
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey, RoomState
from dsv4ctl.controlplane.rooms.writer import Writer
from dsv4ctl.engine_adapters.agent import Agent
from small_gate import SmallGate

KEY = RoomKey(7, 1)
ACK_SECONDS = 5.0


class NotingHooks:
    """What the agent asked its engine to do, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def opened(self, opening: OpenRoom) -> None:
        self.calls.append(("opened", opening.key))

    def dropped(self, key: RoomKey, source: AbortSource, reason: str) -> None:
        self.calls.append(("dropped", key, source, reason))

    def tell_peer(self, key: RoomKey, peer: str, source: AbortSource, reason: str) -> None:
        self.calls.append(("tell_peer", key, peer))

    def ack_peer(self, key: RoomKey, peer: str, outcome: Quiet) -> None:
        self.calls.append(("ack_peer", key, peer, outcome))

    def release(self, key: RoomKey) -> None:
        self.calls.append(("release", key))

    def quarantine(self, key: RoomKey) -> dict[str, int]:
        self.calls.append(("quarantine", key))
        return {"full": 3}

    def query(self, what: str) -> Any:
        if what == "stacks":
            return {"step": "here"}
        if what == "unsayable":
            return object()
        raise ValueError(f"unknown query {what!r}")


class SmallAgent(Agent):
    """`sent` are the frames for the control plane; `now` is its clock."""

    def __init__(self, role: Role) -> None:
        self.noted = NotingHooks()
        self.sent: list[ToControlPlane] = []
        self.now = 100.0
        self.aborts = 0
        super().__init__(role, "me", SmallGate(), self.noted, self.sent.append, lambda: self.now)

    def open(self, key: RoomKey = KEY, *peers: str, turn: int = 0) -> None:
        peers = () if self._role is Role.SINGLE else peers or ("peer",)
        self.handle(OpenRoom(key, "req", None, "other", peers, {"ack": ACK_SECONDS}, "read", turn=turn))

    def told_to_abort(self, key: RoomKey = KEY, seq: int | None = None) -> None:
        self.aborts += seq is None
        self.handle(Abort(seq or self.aborts, key, AbortSource.ADMIN, "told to"))

    def calls(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.noted.calls if call[0] == name]

    def acks(self) -> list[AbortAck]:
        return [frame for frame in self.sent if isinstance(frame, AbortAck)]

    def reported(self) -> list[RoomState]:
        return [frame.state for frame in self.sent if isinstance(frame, RoomReport)]


def reach(agent: SmallAgent, state: RoomState) -> None:
    """Brings room `KEY` of a prefill or decode rank to a live state that its half can be in."""
    agent.open()
    order = list(RoomState)
    steps: list[tuple[RoomState, Any]] = [
        (RoomState.BOOTSTRAPPING, lambda half: half.destination("peer")),
        (RoomState.LOADING, Writer.forward_begin),
        (RoomState.SENDING, Writer.post),
    ]
    if agent._role is Role.DECODE:
        steps = [
            (RoomState.BOOTSTRAPPING, Reader.expose),
            (RoomState.LANDED, lambda half: half.landed("peer")),
            (RoomState.VERIFIED, Reader.verified),
            (RoomState.DECODING, Reader.forward_begin),
        ]
    for reached, event in steps:
        if order.index(reached) <= order.index(state):
            agent.apply(KEY, event)
