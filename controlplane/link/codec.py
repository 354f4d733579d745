"""Length-prefixed msgpack frames as a sans-I/O codec: bytes in, frames out.

The same code serves the control plane's async endpoint, a rank's thread, and the channel between two ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

#: A longer frame is refused before it is read: a peer cannot make us buffer without bound.
MAX_FRAME_BYTES = 16 * 1024 * 1024
_PREFIX = 4

Frame = TypeVar("Frame")


class FrameError(ValueError):
    """A frame that cannot be believed: too long, not msgpack, or not one of the expected kinds."""


_encoder = msgspec.msgpack.Encoder()


def encode(frame: msgspec.Struct) -> bytes:
    """The frame's bytes, length first.

    Raises FrameError if it is longer than `MAX_FRAME_BYTES`.
    """
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"{type(frame).__name__} is {len(body)} bytes, the limit is {MAX_FRAME_BYTES}")
    return len(body).to_bytes(_PREFIX, "big") + body


class Decoder(Generic[Frame]):
    """Cuts a byte stream into frames of one union of tagged Structs."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame | FrameError]:
        """Yields each frame completed by `data`.

        A malformed or unknown frame is yielded as a FrameError, so that the caller counts it and goes on.
        Raises FrameError if the stream itself is lost (a length above the limit).
        """
        self._buffer += data
        while len(self._buffer) >= _PREFIX:
            length = int.from_bytes(self._buffer[:_PREFIX], "big")
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes was announced, the limit is {MAX_FRAME_BYTES}")
            if len(self._buffer) < _PREFIX + length:
                return
            body = bytes(self._buffer[_PREFIX : _PREFIX + length])
            del self._buffer[: _PREFIX + length]
            try:
                yield self._decoder.decode(body)
            except (msgspec.DecodeError, RecursionError) as error:
                yield FrameError(str(error))
