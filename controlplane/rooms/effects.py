"""What a rank's half of a room asks its shell to do."""

from __future__ import annotations

from typing import NamedTuple

from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomState


class Enter(NamedTuple):
    """Report the new state to the control plane."""

    state: RoomState


class TellPeer(NamedTuple):
    """Tell `peer` (an incarnation) that the room is aborted."""

    peer: str
    source: AbortSource
    reason: str


class AckPeer(NamedTuple):
    """Tell `peer` that this writer is quiet (or poisoned) for the room."""

    peer: str
    outcome: Quiet


class ReleasePages(NamedTuple):
    """The room's pages on this rank are quiet on the writing side: free them (readers still hold theirs)."""


class Quarantine(NamedTuple):
    """No ack from these peers by the deadline: the pages stay untouched until each is fenced."""

    peers: tuple[str, ...]


Effect = Enter | TellPeer | AckPeer | ReleasePages | Quarantine


class Refusal(ValueError):
    """An event that the room's state does not allow; the room is unchanged."""
