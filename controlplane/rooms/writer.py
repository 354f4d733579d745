"""The prefill rank's half of a room: it writes into the peers' pages, and acks only when it is quiet (S3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dsv4ctl.controlplane.rooms.effects import AckPeer, Effect, Refusal, ReleasePages
from dsv4ctl.controlplane.rooms.half import Half, Move
from dsv4ctl.controlplane.rooms.states import ABORTS, LIVE, TERMINAL, AbortSource, Quiet, RoomState


@dataclass(slots=True)
class Writer(Half):
    """Source pages are released once every peer has all bytes, or the room is aborted and nothing is in flight.

    Those of a poisoned room never are: the write of which nobody knows may still read them until its process is
    fenced.
    `peers` are the reading ranks; each is an ack target of its own.
    """

    in_flight: int = 0  #: writes posted and not completed
    poisoned: bool = False
    destinations: set[str] = field(default_factory=set)  #: peers that told us their pages
    _sent_all: bool = False

    MOVES: ClassVar[Mapping[str, Move]] = {
        "destination": Move(LIVE | ABORTS, RoomState.BOOTSTRAPPING, "live"),
        "forward_begin": Move(LIVE, RoomState.LOADING),
        "post": Move(LIVE, RoomState.SENDING, "not all was sent"),
        "sent_all": Move(LIVE, RoomState.CLOSED, "no write in flight, no forward"),
        "abort": Move(LIVE, RoomState.ABORTING),
        "busy": Move(ABORTS - TERMINAL, RoomState.QUIESCING, "a write in flight or a forward"),
        "quiet": Move(ABORTS - TERMINAL, RoomState.ABORTED, "no write in flight, no forward"),
    }

    @property
    def told(self) -> bool:
        """Every peer has pages for the room, and told them."""
        return self.destinations == set(self.peers)

    def destination(self, peer: str) -> list[Effect]:
        """`peer` told us where to write. Raises Refusal for a peer that takes no part.

        In an aborted room the answer is the ack that the peer must not miss.
        """
        self._check_peer(peer)
        self._check("destination")
        self.destinations.add(peer)
        if self.state is RoomState.ABORTED:
            return [AckPeer(peer, self._outcome())]
        return self._move("destination")

    def forward_begin(self) -> list[Effect]:
        """Raises Refusal once the room is aborting: no forward is launched for it any more."""
        return self._launch("forward_begin")

    def forward_end(self) -> list[Effect]:
        self._end_forward()
        return self._settle()

    def post(self) -> list[Effect]:
        """A write is about to be posted.

        Raises Refusal once the room is aborting or all was sent: nothing is posted any more.
        """
        if self._sent_all:
            raise Refusal(f"room {self.key}: a write after the last one")
        entered = self._move("post")
        self.in_flight += 1
        return entered

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
        self._check("sent_all")
        self._sent_all = True
        return self._settle()

    def peer_abort(self, peer: str, source: AbortSource, reason: str) -> list[Effect]:
        """`peer` aborted the room and waits for our ack: one comes for it, now or when we are quiet."""
        self._check_peer(peer)
        if self.state in TERMINAL:
            return [AckPeer(peer, self._outcome())]
        return self.abort(source, reason)

    def fenced(self, peer: str) -> list[Effect]:
        """`peer` is gone: the room cannot go on."""
        return self.abort(AbortSource.ENGINE_FAULT, f"peer {peer} ended") if peer in self.peers else []

    def _outcome(self) -> Quiet:
        return Quiet.POISONED if self.poisoned else Quiet.QUIET

    def _settle(self) -> list[Effect]:
        quiet = not self.in_flight and not self.forwards
        if self.live:
            return [ReleasePages(), *self._move("sent_all")] if quiet and self._sent_all else []
        if self.state in TERMINAL:
            return []
        if not quiet:
            return self._move("busy")
        acks: list[Effect] = [AckPeer(peer, self._outcome()) for peer in self.peers]
        return [*acks, *([] if self.poisoned else [ReleasePages()]), *self._move("quiet")]
