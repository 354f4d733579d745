"""Lines between processes: frames with a latency, that faults lose, repeat, reorder, slow down or hold back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import anyio
import msgspec
from anyio.abc import ByteStream, Listener, TaskGroup

from dsv4ctl.controlplane.link.codec import Decoder, FrameError, encode
from dsv4ctl.controlplane.link.wire import Abort, Hello, Progress, Received, Refused, ToRank, Welcome

#: Seconds from one process of a host to another.
LATENCY = (0.0002, 0.003)
#: Seconds between two frames of a line: of what is due at one moment the order is open, and a stream keeps its own.
_APART = 1e-8
#: Frames that are sent again if they get lost. On a stream nothing else is lost but with the stream itself.
SENT_AGAIN = (Abort, Received, Progress)
#: Frames of a handshake: there is nothing yet that they could overtake.
_GREETINGS = (Hello, Welcome, Refused)
#: Frames in a socket's buffers before its writer waits.
_BUFFERED = 256


@dataclass
class Conditions:
    """What the lines of one rank are like at present. Probabilities are for each frame."""

    lose: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0
    slow: float = 1.0
    cut: bool = False
    lines: list[Line] = field(default_factory=list)

    def heal(self) -> None:
        """What was held back arrives, in order."""
        self.cut = False
        for line in self.lines:
            line.release()


class Line:
    """One direction. `deliver` gets each frame when it arrives."""

    def __init__(self, random: Random, conditions: Conditions, deliver: Callable[[Any], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._random = random
        self._conditions = conditions
        self._deliver = deliver
        self._last = 0.0
        self._held: list[Any] = []
        self.closed = False
        conditions.lines.append(self)

    def carry(self, frame: Any) -> None:
        now, conditions, random = self._loop.time(), self._conditions, self._random
        greeting = isinstance(frame, _GREETINGS)
        if isinstance(frame, SENT_AGAIN) and random.random() < conditions.lose:
            return
        at = now + random.uniform(*LATENCY) * conditions.slow
        if greeting or random.random() >= conditions.reorder:
            at = self._last = max(at, self._last + _APART)
        else:
            at += random.uniform(0.0, 0.05)
        self._loop.call_at(at, self._arrive, frame)
        if not greeting and random.random() < conditions.repeat:
            self._loop.call_at(at + random.uniform(0.0, 0.05), self._arrive, frame)

    def close(self) -> None:
        self.closed = True
        self._held.clear()
        if self in self._conditions.lines:
            self._conditions.lines.remove(self)

    def release(self) -> None:
        held, self._held = self._held, []
        for frame in held:
            self._arrive(frame)

    def _arrive(self, frame: Any) -> None:
        if self._conditions.cut:
            self._held.append(frame)
        elif not self.closed:
            self._deliver(frame)


class PlaneEnd(ByteStream):
    """The control plane's end of a link, as the link server takes it. The rank's end is `RankEnd`."""

    def __init__(self, to_rank: Line, closed: Callable[[], None]) -> None:
        self._decoder: Decoder[ToRank] = Decoder(ToRank)
        self._to_rank = to_rank
        self._tell_closed = closed
        self._buffer = bytearray()
        self._changed = anyio.Event()
        self._ended = self._closed = False
        self.unread = 0  #: frames that the rank has not taken yet

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return {}

    def feed(self, frame: msgspec.Struct) -> None:
        self._buffer += encode(frame)
        self._change()

    def end(self) -> None:
        """The rank's process is gone."""
        self._ended = True
        self._change()

    def taken(self) -> None:
        self.unread -= 1
        self._change()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not self._buffer:
            if self._closed:
                raise anyio.ClosedResourceError
            if self._ended:
                raise anyio.EndOfStream
            await self._changed.wait()
        data = bytes(self._buffer[:max_bytes])
        del self._buffer[:max_bytes]
        return data

    async def send(self, item: bytes) -> None:
        for frame in self._decoder.feed(item):
            if isinstance(frame, FrameError):
                raise frame
            while self.unread >= _BUFFERED and not (self._ended or self._closed):
                await self._changed.wait()
            if self._closed:
                raise anyio.ClosedResourceError
            if self._ended:
                raise anyio.BrokenResourceError
            self.unread += 1
            self._to_rank.carry(frame)
        await anyio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._change()
            self._tell_closed()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class RankEnd:
    """A rank's end of its link: `send` queues a frame, `arrived` gets those of the control plane."""

    def __init__(
        self, random: Random, conditions: Conditions, arrived: Callable[[ToRank], None], lost: Callable[[], None]
    ) -> None:
        self._lost = lost
        self._to_rank = Line(random, conditions, arrived)
        self.plane = PlaneEnd(self._to_rank, self._plane_closed)
        self._to_plane = Line(random, conditions, self.plane.feed)

    def send(self, frame: msgspec.Struct) -> None:
        if not self._to_plane.closed:
            self._to_plane.carry(frame)

    def close(self) -> None:
        self._to_plane.close()
        self._to_rank.close()
        self.plane.end()

    def _plane_closed(self) -> None:
        """Frames on their way still arrive, then the rank learns that nobody listens any more."""
        if not self._to_plane.closed:
            self._to_plane.close()
            asyncio.get_running_loop().call_later(2 * LATENCY[1], self._lost)


class MemoryListener(Listener[ByteStream]):
    def __init__(self) -> None:
        self._give, self._take = anyio.create_memory_object_stream[PlaneEnd](1024)
        self.open = True

    def connect(self, end: RankEnd) -> None:
        """Raises OSError if nobody listens."""
        if not self.open:
            raise ConnectionRefusedError("nobody listens")
        self._give.send_nowait(end.plane)

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return {}

    async def serve(self, handler: Callable[[ByteStream], Any], task_group: TaskGroup | None = None) -> None:
        assert task_group is not None
        async with self._take:
            async for stream in self._take:
                task_group.start_soon(handler, stream)

    async def aclose(self) -> None:
        self.open = False
        self._give.close()
