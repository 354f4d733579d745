"""HTTP without sockets: what the gateway needs of its client's request, and of an engine's server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import aiohttp
import anyio
import msgspec
from aiohttp.http import HttpVersion11

#: Seconds from the gateway to an engine's HTTP server or back.
_LATENCY = 0.001


class Server(Protocol):
    """An engine's HTTP server."""

    def accepts(self) -> bool:
        """Whether its process is there to take a connection."""

    def serve(self, body: dict[str, Any], headers: dict[str, str], answer: Answer) -> None: ...

    def left(self, answer: Answer) -> None:
        """The client of `answer` is gone before its end."""


class Answer:
    """One response of an engine, on its way to the gateway."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.streams = False
        self.complete = False  #: the engine has said all
        self._loop = asyncio.get_running_loop()
        self._chunks: list[bytes] = []
        self._ended = self._broken = False
        self._changed = anyio.Event()

    # ---- the engine's side ---------------------------------------------------------------------------

    def whole(self, status: int, body: Any) -> None:
        if self.status is None and not self.complete:
            self.complete = True
            self._later(self._take, status, False, msgspec.json.encode(body), True)

    def event(self, body: Any, last: bool = False) -> None:
        if not self.complete:
            self.complete = last
            done = b"data: [DONE]\n\n" if last and "error" not in body else b""
            self._later(self._take, 200, True, b"data: " + msgspec.json.encode(body) + b"\n\n" + done, last)

    def break_off(self) -> None:
        """The engine's process is gone."""
        self.complete = True
        self._later(self._break)

    # ---- the gateway's side --------------------------------------------------------------------------

    async def head(self) -> None:
        while self.status is None and not self._broken:
            await self._changed.wait()
        if self.status is None:
            raise aiohttp.ServerDisconnectedError

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            while self._chunks:
                yield self._chunks.pop(0)
            if self._broken:
                raise aiohttp.ClientPayloadError("the connection broke")
            if self._ended:
                return
            await self._changed.wait()

    def _later(self, call: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_later(_LATENCY, call, *arguments)

    def _take(self, status: int, streams: bool, data: bytes, last: bool) -> None:
        if self._broken:
            return
        if self.status is None:
            self.status, self.streams = status, streams
        self._chunks.append(data)
        self._ended = self._ended or last
        self._change()

    def _break(self) -> None:
        self._broken = not self._ended
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class _Response:
    """As much of `aiohttp.ClientResponse` as the gateway uses; it is its own `content`."""

    def __init__(self, answer: Answer) -> None:
        assert answer.status is not None
        self._answer = answer
        self.status = answer.status
        self.headers = {"content-type": "text/event-stream" if answer.streams else "application/json"}
        self.content = self

    def iter_any(self) -> AsyncIterator[bytes]:
        return self._answer.chunks()

    async def read(self, limit: int = -1) -> bytes:
        data = b"".join([chunk async for chunk in self._answer.chunks()])
        return data if limit < 0 else data[:limit]


class _Post:
    def __init__(self, server: Server | None, url: str, data: bytes, headers: dict[str, str]) -> None:
        self._server, self._url, self._data, self._headers = server, url, data, headers
        self._answer = Answer()

    async def __aenter__(self) -> _Response:
        await anyio.sleep(_LATENCY)
        if self._server is None or not self._server.accepts():
            raise aiohttp.ClientConnectionError(f"nobody listens at {self._url}")
        try:
            self._server.serve(msgspec.json.decode(self._data), self._headers, self._answer)
            await self._answer.head()
        except BaseException:
            self._leave()
            raise
        return _Response(self._answer)

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        assert self._server is not None
        if not self._answer.complete:
            asyncio.get_running_loop().call_later(_LATENCY, self._server.left, self._answer)


class Session:
    """As much of `aiohttp.ClientSession` as the gateway uses."""

    def __init__(self, find: Callable[[str], Server | None]) -> None:
        self._find = find

    def post(self, url: str, data: bytes, headers: dict[str, str]) -> _Post:
        base = url.rsplit("/generate", 1)[0]
        return _Post(self._find(base), base, data, headers)


class _Writer:
    """What the gateway writes to its client: kept, at the client's pace."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.length: int | None = None
        self.output_size = 0

    def enable_chunking(self) -> None:
        return

    def send_headers(self) -> None:
        return

    async def write_headers(self, status_line: str, headers: Any) -> None:
        return

    async def write(self, data: bytes, **_: Any) -> None:
        if self._request.gone:
            raise ConnectionResetError("the client is gone")
        self._request.received += data
        await anyio.sleep(self._request.pace)

    async def write_eof(self, data: bytes = b"") -> None:
        await self.write(data)


class Request:
    """As much of `aiohttp.web.Request` as the gateway uses. `pace`: seconds that the client takes for an event."""

    method = "POST"
    path = "/generate"
    version = HttpVersion11
    keep_alive = True

    def __init__(self, request_id: str, body: dict[str, Any], pace: float) -> None:
        self.headers = {"x-request-id": request_id}
        self.received = bytearray()
        self.gone = False
        self.pace = pace
        self._body = msgspec.json.encode(body)
        self._payload_writer = _Writer(self)

    async def read(self) -> bytes:
        return self._body

    async def _prepare_hook(self, response: object) -> None:
        return
