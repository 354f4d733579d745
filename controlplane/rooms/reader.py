"""The decode rank's half of a room: its pages are written by peers, and freed only when every writer is quiet (S3).

A single engine uses it too, with no peers: nobody else writes its pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dsv4ctl.controlplane.rooms.effects import Effect, Enter, Quarantine, Refusal, ReleasePages, TellPeer
from dsv4ctl.controlplane.rooms.states import ABORTS, FORWARD, TERMINAL, AbortSource, Quiet, RoomKey, RoomState


@dataclass(slots=True)
class Reader:
    key: RoomKey
    peers: tuple[str, ...]  #: incarnations of the writing ranks
    state: RoomState = RoomState.ALLOCATED
    source: AbortSource | None = None
    reason: str | None = None
    forwards: int = 0  #: forwards launched for the room and not finished
    quarantined: bool = False
    _writing: set[str] = field(default_factory=set)  #: peers that may still write: exposed and not yet quiet
    _landed: set[str] = field(default_factory=set)

    @property
    def live(self) -> bool:
        return self.state not in ABORTS and self.state not in TERMINAL

    @property
    def awaiting(self) -> frozenset[str]:
        """Writers that may still write into the room's pages."""
        return frozenset(self._writing)

    def expose(self) -> list[Effect]:
        """The destination pages are about to be told to every peer: from here each of them may write."""
        self._refuse_unless_live("expose its pages")
        self._writing = set(self.peers)
        return self._advance(RoomState.BOOTSTRAPPING)

    def landed(self, peer: str) -> list[Effect]:
        """The last bytes of `peer` are here; it posts nothing more. A repeated or late report changes nothing."""
        if peer not in self.peers:
            raise Refusal(f"room {self.key}: {peer} takes no part in it")
        self._writing.discard(peer)
        self._landed.add(peer)
        if self.state in ABORTS:
            return self._settle()
        if len(self._landed) == len(self.peers):
            return self._advance(RoomState.LANDED)
        return []

    def verified(self) -> list[Effect]:
        """Every digest matched (or the policy asks for none). Raises Refusal before everything landed."""
        self._refuse_unless_live("be verified")
        if self._landed != set(self.peers):
            raise Refusal(f"room {self.key}: verified before everything landed")
        return self._advance(RoomState.VERIFIED)

    def forward_begin(self) -> list[Effect]:
        """A step reads the room's pages. Raises Refusal while a writer may still write, or once aborting."""
        self._refuse_unless_live("launch a forward")
        if self._writing:
            raise Refusal(f"room {self.key}: decode before everything landed")
        self.forwards += 1
        return self._advance(RoomState.DECODING if self.peers else RoomState.LOADING)

    def forward_end(self) -> list[Effect]:
        if not self.forwards:
            raise Refusal(f"room {self.key}: a forward ended that was not launched")
        self.forwards -= 1
        return self._settle()

    def decoding(self) -> list[Effect]:
        """Single engine: the prompt is computed, tokens follow."""
        self._refuse_unless_live("decode")
        return self._advance(RoomState.DECODING)

    def finished(self) -> list[Effect]:
        """The last token is out."""
        self._refuse_unless_live("finish")
        self.state = RoomState.CLOSED
        return [ReleasePages(), Enter(self.state)]

    def abort(self, source: AbortSource, reason: str) -> list[Effect]:
        """Begins the abort: every peer that may still write is told, and its ack awaited. Idempotent."""
        if not self.live:
            return []
        self.source, self.reason = source, reason
        self.state = RoomState.ABORTING
        told: list[Effect] = [TellPeer(peer, source, reason) for peer in self.peers]
        return [Enter(self.state), *told, *self._settle()]

    def ack(self, peer: str, outcome: Quiet) -> list[Effect]:
        """`peer` is quiet; poisoned: its writes ended without a known state, so the pages wait for its fence."""
        if peer not in self.peers:
            raise Refusal(f"room {self.key}: {peer} takes no part in it")
        if outcome is Quiet.POISONED:
            return self._quarantine((peer,))
        self._writing.discard(peer)
        return self._settle()

    def fenced(self, peer: str) -> list[Effect]:
        """The process of `peer` is gone: it writes nothing any more, and the room cannot go on without it.

        A room that already has everything goes on.
        """
        if peer not in self.peers:
            return []
        self._writing.discard(peer)
        if self.live and peer not in self._landed:
            return self.abort(AbortSource.ENGINE_FAULT, f"peer {peer} ended")
        return self._settle()

    def ack_overdue(self) -> list[Effect]:
        """The ack deadline passed: a time-out frees nothing, it quarantines."""
        if self.state is not RoomState.QUIESCING or not self._writing:
            return []
        return self._quarantine(tuple(sorted(self._writing)))

    def _quarantine(self, peers: tuple[str, ...]) -> list[Effect]:
        if self.quarantined or self.state in TERMINAL:
            return []
        self.quarantined = True
        return [*self.abort(AbortSource.ENGINE_FAULT, f"poisoned by {', '.join(peers)}"), Quarantine(peers)]

    def _refuse_unless_live(self, what: str) -> None:
        if not self.live:
            raise Refusal(f"room {self.key} is {self.state.value}: may not {what}")

    def _advance(self, state: RoomState) -> list[Effect]:
        if self.live and FORWARD.index(state) > FORWARD.index(self.state):
            self.state = state
            return [Enter(state)]
        return []

    def _settle(self) -> list[Effect]:
        if self.state not in ABORTS or self.state is RoomState.ABORTED:
            return []
        if not self._writing and not self.forwards:
            self.state = RoomState.ABORTED
            return [ReleasePages(), Enter(self.state)]
        if self.state is RoomState.ABORTING:
            self.state = RoomState.QUIESCING
            return [Enter(self.state)]
        return []
