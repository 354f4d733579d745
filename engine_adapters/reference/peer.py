"""The peer channel: one TCP connection between a prefill rank (listens) and a decode rank (connects).

A frame that can't be read is counted and survived; a connection that ends takes no room with it: the decode rank
connects again and repeats what still stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import anyio
import msgspec
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from dsv4ctl.controlplane.link.codec import MAX_FRAME_BYTES, Decoder, FrameError, encode
from dsv4ctl.engine_adapters.reference.peer_wire import (
    PEER_WIRE_VERSION,
    Destination,
    PeerAbort,
    PeerAck,
    PeerFrame,
    PeerHello,
    PeerRefused,
)

Address = tuple[str, int]

#: Seconds for a connection and both greetings: a peer that says nothing must not hold a task.
GREETING_SECONDS = 5.0
#: First and longest pause between two attempts to connect.
_BACK_OFF = (0.05, 1.0)
#: Frames waiting for a peer that does not read; above that the connection is given up, and repeated later.
_MAX_QUEUED = 8192
_LOST = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


class PeerRefusedError(Exception):
    """The two ranks don't fit; the message says why, with both figures."""


class _Opening(msgspec.Struct, tag="PeerHello"):
    """The one field of a PeerHello that every wire version keeps."""

    wire: int


class Channel:
    """One greeted connection. All methods are for the loop's thread."""

    def __init__(self, peer: PeerHello, address: Address | None) -> None:
        self.peer = peer
        self.address = address  #: that was dialled; None on the listening side
        self._scope = anyio.CancelScope()
        self._put, self._take = anyio.create_memory_object_stream[bytes](_MAX_QUEUED)

    def send(self, frame: PeerFrame) -> None:
        """Queues a frame. A peer that does not read loses the connection."""
        try:
            self._put.send_nowait(encode(frame))
        except (anyio.WouldBlock, *_LOST):
            self.close()

    def close(self) -> None:
        self._scope.cancel()

    async def serve(
        self, stream: SocketStream, source: BufferedByteReceiveStream, received: Callable[[object], None]
    ) -> None:
        """Returns when the connection ends or is closed. `source` reads `stream`, and holds what was read already."""
        with self._scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write, stream)
                decoder: Decoder[PeerFrame] = Decoder(PeerFrame)
                try:
                    while True:
                        for frame in decoder.feed(await source.receive()):
                            received(frame)
                except FrameError as error:
                    received(error)
                except _LOST:
                    pass
                tasks.cancel_scope.cancel()

    async def _write(self, stream: SocketStream) -> None:
        async with self._take:
            try:
                async for data in self._take:
                    await stream.send(data)
            except _LOST:
                self.close()


class PeerEvents(Protocol):
    """What the channel's owner does; called on the loop, must not block."""

    def hello(self) -> PeerHello: ...

    def refuse(self, peer: PeerHello) -> str | None:
        """Why this peer can't be let in, or None."""

    def up(self, channel: Channel) -> None: ...

    def received(self, channel: Channel, frame: Destination | PeerAbort | PeerAck) -> None: ...

    def down(self, channel: Channel) -> None: ...

    def refused(self, address: Address | None, reason: str) -> None:
        """A greeting failed, here or on the peer."""

    def bad_frame(self, incarnation: str, why: str) -> None: ...


async def answer(stream: SocketStream, events: PeerEvents) -> None:
    """Serves one connection that a decode rank opened. Raises nothing: a connection can't end the loop."""
    async with stream:
        buffered = BufferedByteReceiveStream(stream)
        try:
            with anyio.fail_after(GREETING_SECONDS):
                peer = await _greeted(buffered, events)
                await stream.send(encode(events.hello()))
        except PeerRefusedError as error:
            events.refused(None, str(error))
            await _refuse(stream, str(error))
            return
        except (TimeoutError, *_LOST, anyio.IncompleteRead):
            return
        await _converse(Channel(peer, None), stream, buffered, events)


async def dial(address: Address, events: PeerEvents, wanted: Callable[[], bool]) -> None:
    """Keeps one connection to a prefill rank, with back-off, for as long as it is `wanted`. Ends if refused."""
    pause, longest = _BACK_OFF
    while wanted():
        try:
            async with await _connect(address) as stream:
                buffered = BufferedByteReceiveStream(stream)
                with anyio.fail_after(GREETING_SECONDS):
                    await stream.send(encode(events.hello()))
                    peer = await _greeted(buffered, events)
                pause = _BACK_OFF[0]
                await _converse(Channel(peer, address), stream, buffered, events)
        except PeerRefusedError as error:
            events.refused(address, str(error))
            return
        except (OSError, UnicodeError, *_LOST, anyio.IncompleteRead):  # UnicodeError: a host that can be no name
            pass
        await anyio.sleep(pause)
        pause = min(2 * pause, longest)


async def _connect(address: Address) -> SocketStream:
    with anyio.fail_after(GREETING_SECONDS):
        return await anyio.connect_tcp(*address)


async def _converse(
    channel: Channel, stream: SocketStream, source: BufferedByteReceiveStream, events: PeerEvents
) -> None:
    def received(frame: object) -> None:
        match frame:
            case Destination() | PeerAbort() | PeerAck():
                events.received(channel, frame)
            case FrameError():
                events.bad_frame(channel.peer.incarnation, str(frame))
            case _:
                events.bad_frame(channel.peer.incarnation, f"{type(frame).__name__} after the greeting")

    events.up(channel)
    try:
        await channel.serve(stream, source, received)
    finally:
        events.down(channel)


async def _greeted(source: BufferedByteReceiveStream, events: PeerEvents) -> PeerHello:
    """The peer's greeting. Raises PeerRefusedError for one that does not fit ours, or is none."""
    peer = _decode_greeting(await _read_greeting(source))
    reason = events.refuse(peer)
    if reason is not None:
        raise PeerRefusedError(reason)
    return peer


async def _read_greeting(stream: BufferedByteReceiveStream) -> bytes:
    length = int.from_bytes(await stream.receive_exactly(4), "big")
    if length > MAX_FRAME_BYTES:
        raise PeerRefusedError(f"the first frame of a peer is PeerHello, not {length} bytes")
    return await stream.receive_exactly(length)


def _decode_greeting(body: bytes) -> PeerHello:
    try:
        opening = msgspec.msgpack.decode(body, type=_Opening | PeerRefused)
        if isinstance(opening, PeerRefused):
            raise PeerRefusedError(opening.reason)
        if opening.wire != PEER_WIRE_VERSION:
            raise PeerRefusedError(f"peer wire version {PEER_WIRE_VERSION} here, {opening.wire} on the peer")
        return msgspec.msgpack.decode(body, type=PeerHello)
    except msgspec.DecodeError as error:
        raise PeerRefusedError(f"the first frame of a peer is PeerHello: {error}") from error


async def _refuse(stream: SocketStream, reason: str) -> None:
    with anyio.move_on_after(GREETING_SECONDS):
        try:
            await stream.send(encode(PeerRefused(reason)))
        except _LOST:
            return
