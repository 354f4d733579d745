"""The prefill rank's half of a room: it writes into the peers' pages, and acks only when it is quiet (S3)."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsv4ctl.controlplane.rooms.effects import AckPeer, Effect, Enter, Refusal, ReleasePages, TellPeer
from dsv4ctl.controlplane.rooms.states import ABORTS, FORWARD, TERMINAL, AbortSource, Quiet, RoomKey, RoomState


@dataclass(slots=True)
class Writer:
    """Source pages are released once every peer has all bytes, or the room is aborted and nothing is in flight."""

    key: RoomKey
    peers: tuple[str, ...]  #: incarnations of the reading ranks; each is an ack target of its own
    state: RoomState = RoomState.ALLOCATED
    source: AbortSource | None = None
    reason: str | None = None
    in_flight: int = 0  #: writes posted and not completed
    forwards: int = 0  #: forwards launched for the room and not finished
    poisoned: bool = False
    destinations: set[str] = field(default_factory=set)  #: peers that told us their pages
    _sent_all: bool = False

    @property
    def live(self) -> bool:
        return self.state not in ABORTS and self.state not in TERMINAL

    def destination(self, peer: str) -> list[Effect]:
        """`peer` told us where to write. Raises Refusal for a peer that takes no part.

        In an aborted room the answer is the ack that the peer must not miss.
        """
        if peer not in self.peers:
            raise Refusal(f"room {self.key}: {peer} takes no part in it")
        self.destinations.add(peer)
        if self.state is RoomState.ABORTED:
            return [AckPeer(peer, self._outcome())]
        return self._advance(RoomState.BOOTSTRAPPING)

    def forward_begin(self) -> list[Effect]:
        """Raises Refusal once the room is aborting: no forward is launched for it any more."""
        self._refuse_unless_live("launch a forward")
        self.forwards += 1
        return self._advance(RoomState.LOADING)

    def forward_end(self) -> list[Effect]:
        if not self.forwards:
            raise Refusal(f"room {self.key}: a forward ended that was not launched")
        self.forwards -= 1
        return self._settle()

    def post(self) -> list[Effect]:
        """A write is about to be posted. Raises Refusal once the room is aborting: nothing is posted any more."""
        self._refuse_unless_live("post a write")
        self.in_flight += 1
        return self._advance(RoomState.SENDING)

    def written(self, ok: bool) -> list[Effect]:
        """A posted write ended; `ok` False: with an unknown state, so the room is poisoned (S6)."""
        if not self.in_flight:
            raise Refusal(f"room {self.key}: a write ended that was not posted")
        self.in_flight -= 1
        if not ok:
            self.poisoned = True
            return self.abort(AbortSource.ENGINE_FAULT, "a write ended without a known state") or self._settle()
        return self._settle()

    def sent_all(self) -> list[Effect]:
        """The last write of the room has been posted."""
        self._refuse_unless_live("finish sending")
        self._sent_all = True
        return self._settle()

    def abort(self, source: AbortSource, reason: str) -> list[Effect]:
        """Begins the abort: peers are told, nothing is posted any more. Idempotent."""
        if self.state in ABORTS or self.state in TERMINAL:
            return []
        self.source, self.reason = source, reason
        self.state = RoomState.ABORTING
        told: list[Effect] = [TellPeer(peer, source, reason) for peer in self.peers]
        return [Enter(self.state), *told, *self._settle()]

    def peer_abort(self, peer: str, source: AbortSource, reason: str) -> list[Effect]:
        """`peer` aborted the room and waits for our ack: one comes for it, now or when we are quiet."""
        if peer not in self.peers:
            raise Refusal(f"room {self.key}: {peer} takes no part in it")
        if self.state in TERMINAL:
            return [AckPeer(peer, self._outcome())]
        return self.abort(source, reason)

    def fenced(self, peer: str) -> list[Effect]:
        """`peer` is gone: the room cannot go on."""
        if peer not in self.peers:
            return []
        return self.abort(AbortSource.ENGINE_FAULT, f"peer {peer} ended")

    def _outcome(self) -> Quiet:
        return Quiet.POISONED if self.poisoned else Quiet.QUIET

    def _refuse_unless_live(self, what: str) -> None:
        if not self.live:
            raise Refusal(f"room {self.key} is {self.state.value}: may not {what}")

    def _advance(self, state: RoomState) -> list[Effect]:
        if self.live and FORWARD.index(state) > FORWARD.index(self.state):
            self.state = state
            return [Enter(state)]
        return []

    def _settle(self) -> list[Effect]:
        quiet = not self.in_flight and not self.forwards
        if self.state in ABORTS and self.state is not RoomState.ABORTED:
            if not quiet:
                return self._quiescing()
            self.state = RoomState.ABORTED
            acks: list[Effect] = [AckPeer(peer, self._outcome()) for peer in self.peers]
            return [*acks, ReleasePages(), Enter(self.state)]
        if quiet and self._sent_all and self.live:
            self.state = RoomState.CLOSED
            return [ReleasePages(), Enter(self.state)]
        return []

    def _quiescing(self) -> list[Effect]:
        if self.state is RoomState.QUIESCING:
            return []
        self.state = RoomState.QUIESCING
        return [Enter(self.state)]
