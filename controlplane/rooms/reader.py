"""The decode rank's half of a room: its pages are written by peers, and freed only when every writer is quiet (S3).

A single engine uses it too, with no peers: nobody else writes its pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dsv4ctl.controlplane.rooms.effects import Effect, Quarantine, Refusal, ReleasePages
from dsv4ctl.controlplane.rooms.half import Half, Move
from dsv4ctl.controlplane.rooms.states import ABORTS, LIVE, TERMINAL, AbortSource, Quiet, RoomState

_ALL = frozenset(RoomState)
_LANDED = frozenset({RoomState.LANDED, RoomState.VERIFIED, RoomState.DECODING})


@dataclass(slots=True)
class Reader(Half):
    """`peers` are the writing ranks."""

    quarantined: bool = False
    _writing: set[str] = field(default_factory=set)  #: peers that may still write: exposed and not yet quiet
    _poisoned: set[str] = field(default_factory=set)  #: of those, the ones that only a fence makes quiet
    _landed: set[str] = field(default_factory=set)
    _fenced: set[str] = field(default_factory=set)  #: what is still on its way from them says nothing

    MOVES: ClassVar[Mapping[str, Move]] = {
        "expose": Move(LIVE, RoomState.BOOTSTRAPPING),
        "landed": Move(_ALL - {RoomState.ALLOCATED}, RoomState.LANDED, "live, the last peer"),
        "verified": Move(_LANDED, RoomState.VERIFIED),
        "forward_begin": Move(_LANDED, RoomState.DECODING),
        "prefill_begin": Move(LIVE, RoomState.LOADING, "a single engine's `forward_begin`"),
        "decoding": Move(_LANDED | {RoomState.LOADING}, RoomState.DECODING),
        "finished": Move(frozenset({RoomState.DECODING}), RoomState.CLOSED, "no forward; otherwise refused"),
        "abort": Move(LIVE, RoomState.ABORTING),
        "busy": Move(ABORTS - TERMINAL, RoomState.QUIESCING, "a peer that may write, or a forward"),
        "quiet": Move(ABORTS - TERMINAL, RoomState.ABORTED, "no peer that may write, no forward"),
    }

    @property
    def awaiting(self) -> frozenset[str]:
        """Writers that may still write into the room's pages."""
        return frozenset(self._writing)

    def expose(self) -> list[Effect]:
        """The destination pages are about to be told to every peer: from here each of them may write. Idempotent."""
        entered = self._move("expose")
        if entered:
            self._writing = set(self.peers)
        return entered

    def landed(self, peer: str) -> list[Effect]:
        """The last bytes of `peer` are here; it posts nothing more. A repeated or late report changes nothing."""
        self._check_peer(peer)
        self._check("landed")
        self._landed.add(peer)
        self._writing -= {peer} - self._poisoned
        if self.live and len(self._landed) == len(self.peers):
            return self._move("landed")
        return self._settle()

    def verified(self) -> list[Effect]:
        """Every digest matched (or the policy asks for none). Raises Refusal before everything landed."""
        return self._move("verified")

    def forward_begin(self) -> list[Effect]:
        """A step reads the room's pages. Raises Refusal before everything landed, or once aborting."""
        return self._launch("forward_begin" if self.peers else "prefill_begin")

    def forward_end(self) -> list[Effect]:
        self._end_forward()
        return self._settle()

    def decoding(self) -> list[Effect]:
        """Single engine: the prompt is computed, tokens follow."""
        return self._move("decoding")

    def finished(self) -> list[Effect]:
        """The last token is out. Raises Refusal while a forward of the room runs."""
        self._check("finished")
        if self.forwards:
            raise Refusal(f"room {self.key}: finished with {self.forwards} forwards running")
        return [ReleasePages(), *self._move("finished")]

    def ack(self, peer: str, outcome: Quiet) -> list[Effect]:
        """`peer` is quiet; poisoned: its writes ended without a known state, so the pages wait for its fence.

        Its room is aborted in either case: without its bytes ours can't go on.
        """
        self._check_peer(peer)
        if self.state in TERMINAL or peer in self._fenced or (outcome is Quiet.QUIET and peer in self._poisoned):
            return []
        if outcome is Quiet.QUIET:
            return self._quiet(peer, f"peer {peer} aborted")
        self._poisoned.add(peer)
        self._writing.add(peer)
        return [*self.abort(AbortSource.ENGINE_FAULT, f"poisoned by {peer}"), *self._quarantine((peer,))]

    def fenced(self, peer: str) -> list[Effect]:
        """The process of `peer` is gone: it writes nothing any more, and the room cannot go on without it.

        A room that already has everything goes on.
        """
        if peer not in self.peers:
            return []
        self._fenced.add(peer)
        self._poisoned.discard(peer)
        return self._quiet(peer, f"peer {peer} ended")

    def ack_overdue(self) -> list[Effect]:
        """The ack deadline passed: a time-out frees nothing, it quarantines."""
        if self.state is not RoomState.QUIESCING or not self._writing:
            return []
        return self._quarantine(tuple(sorted(self._writing)))

    def _quiet(self, peer: str, why: str) -> list[Effect]:
        self._writing.discard(peer)
        if self.live and peer not in self._landed:
            return self.abort(AbortSource.ENGINE_FAULT, why)
        return self._settle()

    def _quarantine(self, peers: tuple[str, ...]) -> list[Effect]:
        if self.quarantined:
            return []
        self.quarantined = True
        return [Quarantine(peers)]

    def _settle(self) -> list[Effect]:
        if self.state not in ABORTS - TERMINAL:
            return []
        if self._writing or self.forwards:
            return self._move("busy")
        return [ReleasePages(), *self._move("quiet")]
