"""A single reference engine inside the test's process: rooms opened by hand, outputs collected."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from dsv4ctl.controlplane.config.schema import DeadlinesConfig, EngineConfig
from dsv4ctl.controlplane.link.wire import OpenRoom
from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.engine_adapters.protocol import LaunchRequest
from dsv4ctl.engine_adapters.reference.engine import Engine
from dsv4ctl.engine_adapters.reference.log import Log
from dsv4ctl.engine_adapters.reference.options import EngineOptions
from dsv4ctl.engine_adapters.reference.requests import Finished, Output, Request, Token

DEADLINES = msgspec.to_builtins(DeadlinesConfig())


def answer(outputs: queue.Queue[Output], deadline: float = 60.0) -> tuple[list[int], Finished]:
    """Every token of a request and how it ended; no output for `deadline` seconds fails the test."""
    tokens: list[int] = []
    while True:
        match outputs.get(timeout=deadline):
            case Token(token):
                tokens.append(token)
            case Finished() as finished:
                return tokens, finished


class Single:
    """`ask` submits a prompt, `answer` waits for its tokens. `deadline` bounds every wait (a hang fails the test)."""

    def __init__(self, config: EngineConfig, unsafe_off: tuple[str, ...] = (), integrity: str = "read") -> None:
        table = msgspec.to_builtins(config)
        launch = LaunchRequest(table, 0, "incarnation-0", "launch-0", "/nowhere", unsafe_off, integrity, "m")
        self.ended: list[str] = []
        self.engine = Engine(launch, msgspec.convert(table, EngineOptions), Log(), self.ended.append)
        self.engine.start()
        self._rooms = itertools.count(1)

    def open(self, *, fresh: bool = False) -> RoomKey:
        key = RoomKey(next(self._rooms), 1)
        self.engine._agent.handle(OpenRoom(key, "r", None, None, (), DEADLINES, "read", fresh=fresh))
        return key

    def ask(self, ids: list[int], new: int, key: RoomKey | None = None) -> tuple[RoomKey, queue.Queue[Output]]:
        key = key or self.open()
        outputs: queue.Queue[Output] = queue.Queue()
        self.engine.submit(Request(f"r{key.room}", key, tuple(ids), new, True, None, None, outputs.put))
        return key, outputs

    def answer(self, outputs: queue.Queue[Output], deadline: float = 60.0) -> tuple[list[int], Finished]:
        return answer(outputs, deadline)

    def settle(self) -> None:
        """Returns once nothing of any request is held, and what was asked of the loop before is done."""
        rounds, deadline = self.engine._loop.rounds, time.monotonic() + 60
        while self.engine._rooms.live or self.engine._loop.rounds < rounds + 2:
            assert time.monotonic() < deadline, "a sequence is still held"
            self.engine._loop.wake()
            time.sleep(0.001)

    @contextmanager
    def between_rounds(self) -> Iterator[None]:
        """What is asked inside is found by one round of the loop."""
        loop, entered, go = self.engine._loop, threading.Event(), threading.Event()
        plain = loop._take_orders

        def take() -> None:
            entered.set()
            go.wait(60)
            plain()

        loop._take_orders = take  # type: ignore[method-assign]
        loop.wake()
        assert entered.wait(60)
        yield
        loop._take_orders = plain  # type: ignore[method-assign]
        go.set()

    def owned(self) -> dict[str, int]:
        return self.engine.gate.counts()["owned"]

    def stop(self) -> None:
        self.engine._loop.stop()
        if self.engine._hicache is not None:
            self.engine._hicache.stop()
