"""Frames between the control plane and a rank.

A frame is one tagged msgspec Struct, encoded as msgpack behind a 4-byte big-endian length (`codec`).
The first frame of a rank is `Hello`; its `wire` field is read before anything else is believed.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from dsv4ctl.controlplane.rooms.states import AbortSource, Cancellable, Quiet, RoomKey, RoomState

#: Raised by one whenever a frame changes in a way an older peer would misread.
WIRE_VERSION = 2
#: One dated line a version: why it was raised.
WIRE_HISTORY: dict[int, str] = {
    1: "2026-11-29: first version",
    2: "2026-11-29: a room may be retracted (an abort source that version 1 refuses); rooms have a `turn`",
}


class Role(Enum):
    """What an engine is for. A `single` engine does both halves itself: no transfer."""

    PREFILL = "prefill"
    DECODE = "decode"
    SINGLE = "single"


class PoolGeometry(msgspec.Struct, frozen=True):
    """One pool of a rank. `page_bytes` is for one page of one layer; `layers` are model layers."""

    name: str
    space: str
    span: str
    page_bytes: int
    layers: tuple[int, ...]


class Geometry(msgspec.Struct, frozen=True):
    """What two ranks must agree on before a byte moves between them. `pages` is by space, and may differ."""

    page_tokens: int
    layers: int
    index_k_dtype: str
    context_tokens: int
    pools: tuple[PoolGeometry, ...]
    pages: dict[str, int]
    model: str

    def mismatch(self, other: Geometry) -> str | None:
        """The first disagreement with `other` as a readable sentence with both figures, or None."""
        for field in ("model", "page_tokens", "layers"):
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return f"{field} differs: {ours!r} here, {theirs!r} on the peer"
        for mine, peer in zip(self.pools, other.pools, strict=False):
            for field in PoolGeometry.__struct_fields__:
                ours, theirs = getattr(mine, field), getattr(peer, field)
                if ours != theirs:
                    return f"{mine.name} {field} differs: {ours!r} here, {theirs!r} on the peer"
        if len(self.pools) != len(other.pools):
            return f"pools differ: {len(self.pools)} here, {len(other.pools)} on the peer"
        if self.index_k_dtype != other.index_k_dtype:
            return f"index_k_dtype differs: {self.index_k_dtype!r} here, {other.index_k_dtype!r} on the peer"
        return None


class LedgerCounts(msgspec.Struct, frozen=True):
    """What a rank's ledger holds right now. `pages_*` are by space (device spaces and `host.` ones)."""

    tickets: int = 0
    pending: int = 0
    revoking: int = 0
    loads: int = 0
    pages_owned: dict[str, int] = {}
    pages_leased: dict[str, int] = {}
    pages_retiring: dict[str, int] = {}
    pages_quarantined: dict[str, int] = {}
    refused: int = 0  #: calls the ledger refused (a double release, a stale generation, ...)
    violations: int = 0  #: reads made without a right (only possible with a guard off)


class LoopStatus(msgspec.Struct, frozen=True):
    """One background loop of a rank. `error` is set once the loop has died."""

    runs: int
    error: str | None = None


# ---- rank -> control plane -------------------------------------------------------------------------


class Hello(msgspec.Struct, tag=True, frozen=True):
    wire: int
    engine: str
    role: Role
    rank: int
    ranks: int
    incarnation: str
    pid: int
    url: str  #: base URL of the engine's HTTP server
    bootstrap_port: int  #: 0 on an engine that no peer connects to
    geometry: Geometry
    cancellable: Cancellable = Cancellable.CHUNK  #: an engine that does not say is fenced if it takes longer
    #: It takes in what the link brought before any request or peer's frame that was sent later. What is written to a
    #: Unix socket is there; of a link over a network nobody could say so.
    in_order: bool = False


class RoomReport(msgspec.Struct, tag=True, frozen=True):
    """A rank's view of a room, sent at each change of state.

    `detail` may carry: `cached_tokens`, `host_tokens` (loaded by HiCache), `prompt_tokens`,
    `bytes_by_pool`, `digests_compared`, `digest_mismatches` (list of pool names), `reason`.
    """

    key: RoomKey
    state: RoomState
    detail: dict[str, Any] = {}


class Received(msgspec.Struct, tag=True, frozen=True):
    """Every abort frame up to and including `seq` has been applied in order: stop re-sending."""

    seq: int


class AbortAck(msgspec.Struct, tag=True, frozen=True):
    """The rank is done with the aborted room: nothing of it is in flight there."""

    key: RoomKey
    outcome: Quiet


class Quarantined(msgspec.Struct, tag=True, frozen=True):
    """No ack from `peer` (an incarnation) by the deadline: the room's pages are quarantined until it is fenced."""

    key: RoomKey
    peer: str
    pages: dict[str, int]


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Sent about once in a `progress_interval`; if a loop stands, within a second; at once if it dies."""

    steps: int  #: forward steps since start
    work: int  #: what the rank could go on with by itself, 0 while it is paused: not requests that wait for a peer
    queues: dict[str, int]
    ledger: LedgerCounts
    loops: dict[str, LoopStatus]
    counters: dict[str, int] = {}  #: `digests_compared`, `digest_mismatches`, `host_tokens_loaded`, `tokens_out`, ...
    paused: bool = False  #: told to compute nothing until it is told to continue


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The answer to a `Query`."""

    id: int
    body: Any
    error: str | None = None


# ---- control plane -> rank -------------------------------------------------------------------------


class Welcome(msgspec.Struct, tag=True, frozen=True):
    wire: int
    progress_interval: float  #: seconds


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The handshake failed; the link is closed after this frame and the rank ends with the reason."""

    reason: str


class OpenRoom(msgspec.Struct, tag=True, frozen=True):
    """A room begins on this rank, which reports `allocated` (or `aborted`) when it takes this in.

    Before all ranks of the room have done so the request is not sent to any; unless all are `in_order`: then once this
    is written to all.

    `peers` are the incarnations of the other side's ranks by rank number, empty on a single engine;
    `bootstrap_ports`, on a decode rank, are the ports on which they listen. `fresh`: what came of the cached prefix
    was wrong, so the prompt is computed without it, and it is forgotten. `turn` is the room's place in the order in
    which rooms were first opened: of several that want pages, the one with the least is served.
    `deadlines` are seconds a state may last, by `RoomState` value.
    """

    key: RoomKey
    request_id: str
    session: str | None
    peer_engine: str | None
    peers: tuple[str, ...]
    deadlines: dict[str, float]
    integrity: str
    bootstrap_ports: tuple[int, ...] = ()
    fresh: bool = False
    turn: int = 0


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Abort a room. `seq` counts the aborts sent to this rank's incarnation from 1, without gaps."""

    seq: int
    key: RoomKey
    source: AbortSource
    reason: str


class Fenced(msgspec.Struct, tag=True, frozen=True):
    """The process of `incarnation` is gone (killed and reaped): no write of it can happen any more."""

    incarnation: str


class SetGuards(msgspec.Struct, tag=True, frozen=True):
    """Guards that are switched off from now on (names of `config.unsafe`). Empty: all on."""

    off: tuple[str, ...]


class Query(msgspec.Struct, tag=True, frozen=True):
    """Ask a rank: `tickets`, `rooms`, `stacks`, `trace N` (events from N on), `flush` (drop every cached page).

    `evidence ROOM`: what is known of a room that went wrong (digests, tickets, events); without ROOM, of all.
    """

    id: int
    what: str


ToControlPlane = Hello | RoomReport | Received | AbortAck | Quarantined | Progress | Answer
ToRank = Welcome | Refused | OpenRoom | Abort | Fenced | SetGuards | Query
