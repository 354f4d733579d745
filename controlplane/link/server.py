"""The control plane's end of the links: a Unix-socket listener and one `Link` a connected rank."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

import anyio
import msgspec
from anyio.abc import ByteStream, Listener, SocketAttribute, TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream

from dsv4ctl.controlplane.link.codec import Decoder, FrameError, encode
from dsv4ctl.controlplane.link.handshake import Expected, decode_hello, refusal
from dsv4ctl.controlplane.link.wire import (
    WIRE_VERSION,
    Answer,
    Hello,
    Query,
    Refused,
    ToControlPlane,
    ToRank,
    Welcome,
)

#: Frames waiting for one rank. More means that it stopped reading: its link is lost.
QUEUE_FRAMES = 4096
#: A rank that connects says Hello within this many seconds.
HELLO_DEADLINE = 5.0
#: A look that comes so many seconds late: this process did not run, and what was said meanwhile waits in its sockets.
LATE = 1.0
_CHUNK = 65536

_frames = msgspec.msgpack.Decoder(ToControlPlane)


class LinkLostError(ConnectionError):
    """The link of a rank is gone; the message says why."""


class QueryError(RuntimeError):
    """A rank refused a query; the message is the rank's."""


class LinkHandler(Protocol):
    """What the owner of the links is told. Every call returns at once."""

    def expected(self) -> Mapping[str, Expected]: ...
    def connected(self, link: Link) -> None: ...
    def received(self, link: Link, frame: ToControlPlane) -> None:
        """A frame of a connected rank. Raises FrameError to refuse it; it is then counted as malformed."""

    def malformed(self, hello: Hello | None, error: str, count: int) -> None: ...
    def refused(self, hello: Hello | None, reason: str) -> None: ...
    def lost(self, link: Link, reason: str) -> None: ...


class _Waiting:
    """A query's answer to come."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.answer: Answer | None = None


class _Outgoing(NamedTuple):
    data: bytes
    written: Callable[[], None]


class Link:
    """One connected rank. `send` never blocks; `query` awaits the rank's answer."""

    def __init__(self, hello: Hello, scope: anyio.CancelScope) -> None:
        self.hello = hello
        self.incarnation = hello.incarnation
        self.malformed = 0
        self.lost: str | None = None
        self._scope = scope
        self._out, self.outgoing = anyio.create_memory_object_stream[_Outgoing](QUEUE_FRAMES)
        self._waiting: dict[int, _Waiting] = {}
        self._queries = 0

    def send(self, frame: ToRank, written: Callable[[], None] = lambda: None) -> None:
        """Queues a frame; `written` is called once it is in the rank's socket (a Unix one), and must not raise.

        Raises LinkLostError if the link is, or becomes, lost.
        """
        if self.lost is None:
            try:
                self._out.send_nowait(_Outgoing(encode(frame), written))
            except anyio.WouldBlock:
                self.close(f"the rank does not read: {QUEUE_FRAMES} frames are queued for it")
        if self.lost is not None:
            raise LinkLostError(self.lost)

    async def query(self, what: str, deadline: float) -> Any:
        """The body of the rank's answer.

        Raises LinkLostError, QueryError (the rank's own words) or TimeoutError after `deadline` seconds.
        """
        self._queries += 1
        number, waiting = self._queries, _Waiting()
        self._waiting[number] = waiting
        try:
            self.send(Query(number, what))
            with anyio.fail_after(deadline):
                await waiting.done.wait()
        finally:
            del self._waiting[number]
        if waiting.answer is None:
            raise LinkLostError(self.lost)
        if waiting.answer.error is not None:
            raise QueryError(waiting.answer.error)
        return waiting.answer.body

    def answered(self, answer: Answer) -> None:
        """An answer to nobody is one that came after its deadline: dropped."""
        waiting = self._waiting.get(answer.id)
        if waiting is not None:
            waiting.answer = answer
            waiting.done.set()

    def close(self, reason: str) -> None:
        """The link is lost: nothing is sent any more and every waiting query fails. Idempotent."""
        if self.lost is not None:
            return
        self.lost = reason
        self._out.close()
        for waiting in self._waiting.values():
            waiting.done.set()
        self._scope.cancel()


Listen = Callable[[str], Awaitable[Listener[ByteStream]]]
"""Begins to listen at a path. Raises OSError."""


async def listen(path: str) -> Listener[ByteStream]:
    return await anyio.create_unix_listener(path, mode=0o600)


class LinkServer:
    """Accepts ranks at `path` (a Unix socket, mode 0600, unless `listening` is another) until cancelled."""

    def __init__(self, path: str, handler: LinkHandler, progress_interval: float, listening: Listen = listen) -> None:
        self.path = path
        self._handler = handler
        self._interval = progress_interval
        self._listening = listening
        self._links: dict[str, Link] = {}

    @property
    def links(self) -> Iterable[Link]:
        return self._links.values()

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        listener = await self._listening(self.path)
        async with listener, anyio.create_task_group() as tasks:
            task_status.started()
            await listener.serve(self._connection, tasks)

    async def _connection(self, stream: ByteStream) -> None:
        """From Hello to the end of one link."""
        async with stream, aclosing(_bodies(stream)) as bodies:
            hello = await self._handshake(stream, bodies)
            if hello is None:
                return
            async with anyio.create_task_group() as tasks:
                link = Link(hello, tasks.cancel_scope)
                self._links[link.incarnation] = link
                try:
                    link.send(Welcome(WIRE_VERSION, self._interval))
                    tasks.start_soon(_write, link, stream)
                    self._handler.connected(link)
                    await self._read(link, bodies)
                except Exception as error:  # noqa: BLE001 - one rank's link must not take the others with it
                    link.close(f"control plane fault: {error!r}")
                finally:
                    link.close("the control plane stops")
                    del self._links[link.incarnation]
                    self._handler.lost(link, link.lost or "")

    async def _handshake(self, stream: ByteStream, bodies: AsyncIterator[bytes | FrameError]) -> Hello | None:
        hello: Hello | None = None
        reason: str | None
        try:
            with anyio.fail_after(HELLO_DEADLINE):
                body = await anext(bodies)
            if isinstance(body, FrameError):
                raise body
            hello = decode_hello(body)
            reason = refusal(hello, self._handler.expected(), [link.hello for link in self._links.values()])
        except TimeoutError:
            reason = f"no Hello within {HELLO_DEADLINE} s"
        except (StopAsyncIteration, anyio.BrokenResourceError):
            reason = "the rank hung up before Hello"
        except ValueError as error:  # FrameError is one
            reason = str(error)
        if reason is None:
            return hello
        self._handler.refused(hello, reason)
        try:
            with anyio.fail_after(HELLO_DEADLINE):
                await stream.send(encode(Refused(reason)))
        except (anyio.BrokenResourceError, TimeoutError):
            pass  # it left, or does not read: it learns nothing, and is not let in either way
        return None

    async def _read(self, link: Link, bodies: AsyncIterator[bytes | FrameError]) -> None:
        try:
            async for body in bodies:
                try:
                    if isinstance(body, FrameError):
                        raise body
                    frame = _decode(body)
                    if isinstance(frame, Answer):
                        link.answered(frame)
                    else:
                        self._handler.received(link, frame)
                except FrameError as error:
                    link.malformed += 1
                    self._handler.malformed(link.hello, str(error), link.malformed)
            link.close("the rank closed the link")
        except FrameError as error:
            link.close(f"the stream is lost: {error}")
        except anyio.BrokenResourceError:
            link.close("the link broke")


def _decode(body: bytes) -> ToControlPlane:
    try:
        return _frames.decode(body)
    except msgspec.DecodeError as error:
        raise FrameError(str(error)) from error


async def _bodies(stream: ByteStream) -> AsyncGenerator[bytes | FrameError, None]:
    """The bodies of the frames on `stream`, undecoded. Raises FrameError once the stream itself is lost."""
    decoder: Decoder[msgspec.Raw] = Decoder(msgspec.Raw)
    raw = stream.extra(SocketAttribute.raw_socket, None)
    while True:
        if raw is not None:
            # Where `receive` waits itself, a link that ends as bytes come makes an error in asyncio's log (anyio 4.16).
            await anyio.wait_readable(raw)
        try:
            data = await stream.receive(_CHUNK)
        except anyio.EndOfStream:
            return
        for body in decoder.feed(data):
            yield body if isinstance(body, FrameError) else bytes(body)


async def _write(link: Link, stream: ByteStream) -> None:
    """Sends what is queued. No deadline: a rank that stops reading fills its queue, which ends the link."""
    outgoing: MemoryObjectReceiveStream[_Outgoing] = link.outgoing
    try:
        async for first in outgoing:
            batch, told = bytearray(first.data), [first.written]
            while len(batch) < _CHUNK:
                try:
                    frame = outgoing.receive_nowait()
                except (anyio.WouldBlock, anyio.EndOfStream):
                    break
                batch += frame.data
                told.append(frame.written)
            await stream.send(bytes(batch))
            for written in told:
                written()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        link.close("the link broke")
