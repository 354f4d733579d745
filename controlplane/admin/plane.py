"""What the admin verbs see of the control plane. The supervisor implements it; tests have a fake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from anyio.streams.memory import MemoryObjectReceiveStream

from dsv4ctl.controlplane.config.schema import Config
from dsv4ctl.controlplane.telemetry.log import Telemetry

Json = dict[str, Any]


class Plane(Protocol):
    """Answers are JSON as the admin API shows it. What is not done raises AdminError."""

    config: Config
    telemetry: Telemetry

    async def status(self) -> Json:
        """state, version, pid, uptime_s, gateway, engines (state by name), paused (their names), rooms (count by
        state), unsafe, quarantined, dropped_log_lines."""

    async def engines(self) -> list[Json]:
        """One object an engine: name, role, state, pid, incarnations, url, restarts, queues, ledger, ..."""

    async def rooms(self, room: int | None) -> list[Json]:
        """Rooms in flight; with `room`: every generation of that one, ended ones too, with its history."""

    async def tickets(self) -> list[Json]:
        """One object a rank: engine, rank, incarnation, and tickets or error."""

    async def abort(self, room: int | None, reason: str) -> Json:
        """`aborted`: the keys of the rooms that are being aborted. `room` None: all in flight."""

    async def drain(self, engines: list[str], deadline_s: float | None) -> Json:
        """`drained`: engines; `left`: rooms that were aborted at the deadline. `engines` empty: all."""

    async def resume(self, engines: list[str]) -> Json:
        """`resumed`: engines. `engines` empty: all that drain or are drained."""

    async def set_guards(self, off: list[str]) -> Json:
        """`off`: the guards that are off from now on."""

    async def flush(self) -> Json:
        """`flushed`: engines whose cached pages were dropped."""

    def trace(self, follow: bool) -> AsyncIterator[Json]:
        """What the ranks' trace rings hold, in parts: engine, rank, incarnation, and identity and events (frames of
        the trace format) or error. `follow`: goes on with what is recorded later."""

    def subscribe(self) -> AbstractAsyncContextManager[MemoryObjectReceiveStream[Json]]:
        """Live events."""
