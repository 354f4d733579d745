"""What the two halves of a room have in common: a state, the table by which it moves, and the forwards that run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from dsv4ctl.controlplane.rooms.effects import Effect, Enter, Refusal, TellPeer
from dsv4ctl.controlplane.rooms.states import LIVE, NEXT, AbortSource, RoomKey, RoomState


class Move(NamedTuple):
    """In the states `allowed` an event leads to `to`, unless the room is past it; in others it is refused."""

    allowed: frozenset[RoomState]
    to: RoomState
    when: str = ""  #: what else must be true before the state changes, for the printed table


@dataclass(slots=True)
class Half:
    key: RoomKey
    peers: tuple[str, ...]  #: incarnations of the other side's ranks
    state: RoomState = RoomState.ALLOCATED
    source: AbortSource | None = None
    reason: str | None = None
    forwards: int = 0  #: forwards launched for the room and not finished

    MOVES: ClassVar[Mapping[str, Move]] = {}

    @property
    def live(self) -> bool:
        return self.state in LIVE

    def abort(self, source: AbortSource, reason: str) -> list[Effect]:
        """Begins the abort: every peer is told, a writer posts nothing more. Idempotent."""
        return [*self._begin_abort(source, reason), *self._settle()] if self.live else []

    def _settle(self) -> list[Effect]:
        """What follows from what still holds the room: nothing yet, or a move and its effects."""
        raise NotImplementedError

    def _check(self, event: str) -> None:
        """Raises Refusal if the state does not allow the event."""
        if self.state not in self.MOVES[event].allowed:
            raise Refusal(f"room {self.key} is {self.state.value}: no {event.replace('_', ' ')} in this state")

    def _check_peer(self, peer: str) -> None:
        if peer not in self.peers:
            raise Refusal(f"room {self.key}: {peer} takes no part in it")

    def _move(self, event: str) -> list[Effect]:
        self._check(event)
        state = self.MOVES[event].to
        if state not in NEXT[self.state]:
            return []
        self.state = state
        return [Enter(state)]

    def _begin_abort(self, source: AbortSource, reason: str) -> list[Effect]:
        self.source, self.reason = source, reason
        told: list[Effect] = [TellPeer(peer, source, reason) for peer in self.peers]
        return [*self._move("abort"), *told]

    def _launch(self, event: str) -> list[Effect]:
        entered = self._move(event)
        self.forwards += 1
        return entered

    def _end_forward(self) -> None:
        if not self.forwards:
            raise Refusal(f"room {self.key}: a forward ended that was not launched")
        self.forwards -= 1
