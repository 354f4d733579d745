"""A prefill and a decode engine inside the test's process, with real NIXL between them and no control plane."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

import msgspec

from dsv4ctl.controlplane.config.schema import EngineConfig, HiCacheConfig
from dsv4ctl.controlplane.link.wire import OpenRoom
from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.engine_adapters.protocol import LaunchRequest
from dsv4ctl.engine_adapters.reference.engine import Engine
from dsv4ctl.engine_adapters.reference.log import Log
from dsv4ctl.engine_adapters.reference.options import EngineOptions
from dsv4ctl.engine_adapters.reference.requests import Output, Request
from dsv4ctl.engine_adapters.reference.sequences import Sequence
from single import DEADLINES


class Pair:
    """Rooms are opened under the policy `integrity`; what decode emits comes out of a queue."""

    def __init__(self, integrity: str) -> None:
        self._integrity = integrity
        self._rooms = 0
        self.ended: list[str] = []
        self.prefill, self.decode = self._engine("prefill"), self._engine("decode")

    def _engine(self, role: str) -> Engine:
        config = EngineConfig(name=role, role=role, hicache=HiCacheConfig(enabled=False))  # type: ignore[arg-type]
        table = msgspec.to_builtins(config)
        launch = LaunchRequest(table, 0, role, "launch-0", "/nowhere", (), self._integrity, "m")
        engine = Engine(launch, msgspec.convert(table, EngineOptions), Log(), self.ended.append)
        engine.start()
        return engine

    def ask(self, ids: list[int], new: int) -> tuple[Sequence, queue.Queue[Output]]:
        """The decode engine's sequence, and its outputs."""
        self._rooms += 1
        key, outputs = RoomKey(self._rooms, 1), queue.Queue[Output]()
        assert self.prefill._transfer is not None
        port = self.prefill._transfer.bootstrap_port
        for engine, peer, ports, emit in (
            (self.prefill, "decode", (), lambda output: None),
            (self.decode, "prefill", (port,), outputs.put),
        ):
            opening = OpenRoom(key, "r", None, peer, (peer,), DEADLINES, self._integrity, ports)
            engine._agent.handle(opening)
            engine.submit(Request("r", key, tuple(ids), new, True, "127.0.0.1", port, emit))
        return self.decode._rooms.live[key], outputs

    def until(self, what: str, holds: Callable[[], bool], deadline: float = 60.0) -> None:
        end = time.monotonic() + deadline
        while not holds():
            assert time.monotonic() < end, f"not within {deadline:g} s: {what}; ended: {self.ended}"
            time.sleep(0.002)

    def stop(self) -> None:
        for engine in (self.decode, self.prefill):
            engine._loop.stop()
            engine._thread.join(30)
            assert engine._transfer is not None
            engine._transfer.stop(10)
