"""Several ranks of one single engine in the test's process, each on its own thread, meeting at barriers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from dsv4ctl.controlplane.config.schema import EngineConfig
from dsv4ctl.controlplane.link.wire import OpenRoom
from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.engine_adapters.protocol import LaunchRequest
from dsv4ctl.engine_adapters.reference.engine import Engine
from dsv4ctl.engine_adapters.reference.log import Log
from dsv4ctl.engine_adapters.reference.options import EngineOptions
from dsv4ctl.engine_adapters.reference.requests import Finished, Output, Request
from single import DEADLINES, answer

#: Tokens of an answer that is aborted: none is complete before.
ENDLESS = 4000
#: Seconds that ranks wait for one that is known not to come (`Meeting.timeout`).
HURRIED = 3.0


class Meeting:
    """What gloo is between processes. A rank that does not come within `timeout` seconds breaks it for all."""

    def __init__(self, ranks: int, timeout: float) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks)
        self.timeout = timeout
        self._slots: list[object] = [None] * ranks

    def exchange(self, rank: int, kind: str, mine: object) -> list[object]:
        """Every rank's value. Ranks that come with different kinds are in different collectives: it breaks."""
        self._slots[rank] = (kind, mine)
        self._barrier.wait(self.timeout)
        slots = list(self._slots)
        self._barrier.wait(self.timeout)
        kinds = {slot[0] for slot in slots if isinstance(slot, tuple)}
        if len(kinds) > 1:
            self._barrier.abort()
            raise threading.BrokenBarrierError(f"ranks are in different collectives: {sorted(kinds)}")
        return [slot[1] for slot in slots if isinstance(slot, tuple)]


class Place:
    """One rank's end of a meeting: an `Agreement`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.ranks = meeting.ranks

    def tell(self, message: bytes) -> bytes:
        told = self._meeting.exchange(self.rank, "tell", message)[0]
        assert isinstance(told, bytes)
        return told

    def least(self, values: Sequence[int]) -> list[int]:
        everyone = self._meeting.exchange(self.rank, f"least {len(values)}", list(values))
        return [min(column) for column in zip(*everyone, strict=True)]  # type: ignore[call-overload]

    def gather(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        shape = tuple(parts[0].shape)
        everyone = self._meeting.exchange(self.rank, f"gather {shape}", parts)
        return [part for rank in everyone for part in rank]  # type: ignore[attr-defined]


class Ranks:
    """`ask` goes to rank 0, as clients do; `room` opens a room on every rank, as the control plane does."""

    def __init__(self, config: EngineConfig, unsafe_off: tuple[str, ...] = (), timeout: float = 60.0) -> None:
        table = msgspec.to_builtins(config)
        self.meeting = meeting = Meeting(config.ranks, timeout)
        self.ended: list[str] = []
        self.engines: list[Engine] = []
        builders = [
            threading.Thread(target=self._build, args=(table, rank, meeting, unsafe_off))
            for rank in range(config.ranks)
        ]
        self._built: dict[int, Engine] = {}
        for builder in builders:
            builder.start()
        for builder in builders:
            builder.join()
        self.engines = [self._built[rank] for rank in range(config.ranks)]
        for engine in self.engines:
            engine.start()
        self._rooms = 0

    def _build(self, table: dict[str, object], rank: int, meeting: Meeting, off: tuple[str, ...]) -> None:
        launch = LaunchRequest(table, rank, f"incarnation-{rank}", "launch-0", "/nowhere", off, "read", "m")
        options = msgspec.convert(table, EngineOptions)
        self._built[rank] = Engine(launch, options, Log(), self.ended.append, Place(meeting, rank))

    def room(self) -> RoomKey:
        self._rooms += 1
        key = RoomKey(self._rooms, 1)
        for engine in self.engines:
            engine._agent.handle(OpenRoom(key, "r", None, None, (), DEADLINES, "read"))
        return key

    def ask(self, ids: list[int], new: int, key: RoomKey | None = None) -> tuple[RoomKey, queue.Queue[Output]]:
        key = key or self.room()
        outputs: queue.Queue[Output] = queue.Queue()
        self.engines[0].submit(Request(f"r{key.room}", key, tuple(ids), new, True, None, None, outputs.put))
        return key, outputs

    def answer(self, outputs: queue.Queue[Output], deadline: float = 60.0) -> tuple[list[int], Finished]:
        return answer(outputs, deadline)

    def until(self, what: str, holds: Callable[[], bool], deadline: float = 60.0) -> None:
        end = time.monotonic() + deadline
        while not holds():
            assert time.monotonic() < end, f"not within {deadline:g} s: {what}; ended: {self.ended}"
            time.sleep(0.002)

    def at_rest(self) -> bool:
        """No rank holds anything of any request, and none is retiring."""
        return all(
            not engine._rooms.live
            and engine.gate.totals()["tickets"] == 0
            and not any(engine.gate.counts()["retiring"].values())
            for engine in self.engines
        )

    def stop(self) -> None:
        self.engines[0]._loop.stop()
        for engine in self.engines:
            if engine._hicache is not None:
                engine._hicache.stop()
        for engine in self.engines:
            engine._thread.join(30)
