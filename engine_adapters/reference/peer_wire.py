"""Frames between a prefill rank and a decode rank (the peer channel), and what NIXL notifications carry.

Frames are framed as on the link (`controlplane.link.codec`). The first frame of both sides is `PeerHello`; its
`wire` field is read before anything else is believed.
"""

from __future__ import annotations

import msgspec

from dsv4ctl.controlplane.link.wire import Geometry
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey
from dsv4ctl.engine_adapters.reference.pools import Region

#: Raised by one whenever a frame or a notification changes in a way an older peer would misread.
PEER_WIRE_VERSION = 2
#: One dated line a version: why it was raised.
PEER_WIRE_HISTORY: dict[int, str] = {
    1: "2026-11-29: first version",
    2: "2026-11-29: a room may be retracted: an abort source that version 1 refuses",
}


class PeerHello(msgspec.Struct, tag=True, frozen=True):
    wire: int
    engine: str
    rank: int
    incarnation: str
    geometry: Geometry
    metadata: bytes  #: of the rank's NIXL agent, whose name is the incarnation
    regions: tuple[Region, ...]


class PeerRefused(msgspec.Struct, tag=True, frozen=True):
    """The greeting failed; the connection is closed after this frame."""

    reason: str


class Destination(msgspec.Struct, tag=True, frozen=True):
    """decode -> prefill: where the room's bytes go. Physical pages; `full[i]` is logical page i.

    `swa` holds the logical pages inside the window, `state` is the room's slot. Sent again after a reconnect.
    """

    key: RoomKey
    full: list[int]
    swa: dict[int, int]
    state: int
    prompt_tokens: int


class PeerAbort(msgspec.Struct, tag=True, frozen=True):
    """Both ways. A decode rank sends it again after each reconnect, until `PeerAck`."""

    key: RoomKey
    source: AbortSource
    reason: str


class PeerAck(msgspec.Struct, tag=True, frozen=True):
    """prefill -> decode: the writer of an aborted room is quiet (or poisoned)."""

    key: RoomKey
    outcome: Quiet


PeerFrame = PeerHello | PeerRefused | Destination | PeerAbort | PeerAck


class Manifest(msgspec.Struct, frozen=True):
    """What a complete prompt is. `digests`: pool -> one folded digest a pool layer, over what the peer asked for."""

    prompt_tokens: int
    first_token: int
    chunks: int  #: logical pages sent
    cached_tokens: int = 0
    host_tokens: int = 0  #: of them, loaded by HiCache
    digests: dict[str, list[int]] = {}


class ChunkLanded(msgspec.Struct, tag=True, frozen=True):
    """Rides on the write of one logical page: it is read only once the bytes are in place."""

    key: RoomKey
    incarnation: str  #: of the writer
    logical: int


class LastLanded(msgspec.Struct, tag=True, frozen=True):
    """Rides on the write of the prompt's tail page and state."""

    key: RoomKey
    incarnation: str
    logical: int
    manifest: Manifest


Landed = ChunkLanded | LastLanded
