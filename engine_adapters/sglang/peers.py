"""Frames of ours between a decode and a prefill rank, beside SGLang's own on the same ZeroMQ sockets.

To a prefill rank: SGLang's frame with two parts more, `MARK` and a `Trailer`; SGLang reads parts by their place and
never sees them. To a decode rank: `MARK` and one of `Ack`, `Digests`.
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey

MARK = b"dsv4ctl"


class Trailer(msgspec.Struct, frozen=True):
    """Who speaks to a prefill rank, and of which generation of the room (0: of none); of an abort, where it began."""

    incarnation: str
    generation: int
    source: AbortSource = AbortSource.ENGINE_FAULT
    reason: str = ""


class Ack(msgspec.Struct, tag=True, frozen=True):
    """The writer `incarnation` is quiet for the room."""

    key: RoomKey
    incarnation: str
    outcome: Quiet


class Digests(msgspec.Struct, tag=True, frozen=True):
    """What the pages that `incarnation` wrote were when they were sealed."""

    key: RoomKey
    incarnation: str
    pages: dict[str, int]  #: how many of each space
    values: bytes  #: uint64 [buffers, pages] of each space one after another, pages in logical order, little-endian

    def flat(self) -> npt.NDArray[np.uint64]:
        """Raises ValueError if the bytes make no such numbers."""
        return np.frombuffer(self.values, dtype="<u8")


ToDecode = Ack | Digests
_decoder: msgspec.msgpack.Decoder[ToDecode] = msgspec.msgpack.Decoder(ToDecode)


def decode(parts: list[bytes]) -> ToDecode:
    """Raises ValueError for what is no frame of ours."""
    if len(parts) != 2 or parts[0] != MARK:
        raise ValueError(f"{len(parts)} parts beginning with {parts[0][:16] if parts else b''!r}")
    try:
        return _decoder.decode(parts[1])
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error


def split_trailer(parts: list[bytes]) -> tuple[list[bytes], Trailer | None]:
    """SGLang's parts and our trailer, if there is one. Raises ValueError if it can't be read."""
    if len(parts) < 3 or parts[-2] != MARK:
        return parts, None
    try:
        return parts[:-2], msgspec.msgpack.decode(parts[-1], type=Trailer)
    except msgspec.DecodeError as error:
        raise ValueError(f"trailer: {error}") from error


def with_trailer(parts: list[bytes], trailer: Trailer) -> list[bytes]:
    return [*parts, MARK, msgspec.msgpack.encode(trailer)]


class Outbox:
    """Sends frames from a thread of its own: hooks of the agent must not block. A lost frame is counted.

    Nor does the thread wait for a peer that takes no more: behind its frames wait those of all others.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._counters = counters
        self._context = zmq.Context()
        self._sockets: dict[str, Any] = {}

    def send(self, endpoint: str, parts: list[bytes]) -> None:
        self._queue.put(lambda: self._send(endpoint, parts))

    def call(self, function: Callable[[], None]) -> None:
        """Runs `function` on the thread, after what was queued before; it may send."""
        self._queue.put(function)

    def close(self, endpoint: str) -> None:
        """Nobody listens there any more."""
        self.call(lambda: self._close(endpoint))

    def run(self) -> None:
        """The thread's body: never returns."""
        while True:
            self._queue.get()()

    def _send(self, endpoint: str, parts: list[bytes]) -> None:
        try:
            self._socket(endpoint).send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError:
            self._counters["unsent_frames"] += 1

    def _close(self, endpoint: str) -> None:
        found = self._sockets.pop(endpoint, None)
        if found is not None:
            found.close()

    def _socket(self, endpoint: str) -> Any:
        found = self._sockets.get(endpoint)
        if found is None:
            found = self._sockets[endpoint] = self._context.socket(zmq.PUSH)
            found.setsockopt(zmq.LINGER, 0)
            if "[" in endpoint:
                found.setsockopt(zmq.IPV6, 1)
            found.connect(endpoint)
        return found
