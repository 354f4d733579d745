"""The transfer half of a rank: one thread, one event loop, every NIXL call and every peer connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dsv4ctl.controlplane.link.wire import Geometry, OpenRoom, Role
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey
from dsv4ctl.engine_adapters.agent import Agent
from dsv4ctl.engine_adapters.reference.peer_wire import Manifest
from dsv4ctl.engine_adapters.reference.pools import DevicePools
from dsv4ctl.engine_adapters.reference.receiver import Receiver
from dsv4ctl.engine_adapters.reference.sender import Sender

Ready = Callable[[RoomKey, Manifest], None]
"""The room's prompt is here and verified (or need not be). Called on the transfer thread; must not block."""


class Log(Protocol):
    """Thread-safe; must not block."""

    def __call__(self, event: str, level: str, **fields: object) -> None: ...


class TransferError(RuntimeError):
    """The transfer half could not start; the message says why."""


class Transfer:
    """`sender` (prefill) and `receiver` (decode) take work from any thread; so do all methods here.

    The gate is the agent's. `died` is called (on the transfer thread) when the loop ended by itself.
    """

    sender: Sender
    receiver: Receiver
    bootstrap_port: int  #: where decode ranks connect; 0 on a decode rank and before `start`
    fault: str | None  #: why the loop died

    def __init__(
        self,
        role: Role,
        engine: str,
        rank: int,
        incarnation: str,
        geometry: Geometry,
        pools: DevicePools,
        agent: Agent,
        ready: Ready,
        died: Callable[[str], None],
        log: Log,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        raise NotImplementedError

    def start(self, timeout: float) -> None:
        """Starts the thread and waits for NIXL and the listening socket. Raises TransferError."""

    def stop(self, timeout: float) -> None:
        """Ends the loop; writes in flight are given until then. Raises TransferError if the thread lives on."""

    # Calls of the agent's hooks of the same names, which the engine passes on.

    def opened(self, opening: OpenRoom) -> None: ...

    def dropped(self, key: RoomKey) -> None:
        """The room is aborting: nothing more of it is posted or expected."""

    def tell_peer(self, key: RoomKey, peer: str, source: AbortSource, reason: str) -> None: ...

    def ack_peer(self, key: RoomKey, peer: str, outcome: Quiet) -> None: ...

    def fenced(self, incarnation: str) -> None:
        """That process is gone: its connection, its NIXL agent and our writes to it end. Call it before the agent."""

    def counters(self) -> dict[str, int]:
        """What was counted and survived: `bad_frames`, `late_notifications`, `dropped_handles`, ..."""
        raise NotImplementedError
