"""A fake engine behind the real HTTP server on a real socket, and clients for it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from aiohttp import ClientResponse, ClientSession
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey
from dsv4ctl.engine_adapters.reference.http.ask import Role
from dsv4ctl.engine_adapters.reference.requests import (
    BusyError,
    Finished,
    Output,
    Request,
    RequestRefusedError,
    Token,
)
from dsv4ctl.engine_adapters.reference.server import serve

MODEL = "dsv4-reference"
MAX_BODY = 64 * 1024
CONTEXT = 1024
#: Seconds for what takes milliseconds.
PATIENCE = 60.0


class FakeEngine:
    """Serving, with answers told in advance; they are emitted from a thread of its own."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.aborts: list[tuple[str | None, str]] = []
        self.answer: list[Output] | None = None  #: None: the request stays open
        self.live_generation = 1
        self.rooms_only = False
        self.why_faulty: str | None = None
        self.busy = False
        self.flushed = 0
        self.paused: list[str] = []
        self.submitted = asyncio.Event()
        self.aborted = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._threads: list[threading.Thread] = []

    def room_of(self, room: int | None) -> RoomKey:
        if room is None and self.rooms_only:
            raise RequestRefusedError("bootstrap_room is missing")
        if room == 404:
            raise RequestRefusedError("room 404 is unknown: the gateway opens rooms")
        return RoomKey(room or 0, self.live_generation)

    def submit(self, request: Request) -> None:
        total = len(request.input_ids) + request.max_new_tokens
        if total > CONTEXT:
            raise RequestRefusedError(f"{total} tokens asked for, the context holds {CONTEXT}")
        self.requests.append(request)
        self.submitted.set()
        if self.answer is not None:
            self.emit(request, self.answer)

    def emit(self, request: Request, outputs: list[Output]) -> None:
        def work() -> None:
            for output in outputs:
                request.emit(output)

        thread = threading.Thread(target=work)
        thread.start()
        self._threads.append(thread)

    def abort(self, rid: str | None, reason: str) -> int:
        self.aborts.append((rid, reason))
        self.aborted.set()
        return sum(rid is None or request.rid.startswith(rid) for request in self.requests)

    def flush(self) -> None:
        if self.busy:
            raise BusyError("2 requests are running")
        self.flushed += 1

    def pause_generation(self, *, abort: bool) -> None:
        self.paused.append("aborting" if abort else "keeping")

    def continue_generation(self) -> None:
        self.paused.append("continued")

    def info(self) -> dict[str, Any]:
        return {"queues": {"waiting": 0}}

    def fault(self) -> str | None:
        return self.why_faulty

    def join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=PATIENCE)


def tokens(data: bytes | list[int]) -> list[Output]:
    return [Token(one) for one in data]


def ended(reason: str = "length", cached: int = 0) -> Finished:
    return Finished(reason, None, None, 0, cached)


def aborted(source: AbortSource | None, message: str = "why") -> Finished:
    return Finished("abort", message, source, 0, 0)


def events(raw: str) -> list[Any]:
    """The data of server-sent events, JSON decoded but for [DONE]."""
    assert raw.endswith("\n\n")
    data = [event.removeprefix("data: ") for event in raw.removesuffix("\n\n").split("\n\n")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


class Client:
    """One server on a free port, its engine and clients for it."""

    def __init__(self, engine: FakeEngine, url: str, http: ClientSession, openai: AsyncOpenAI) -> None:
        self.engine = engine
        self.url = url
        self.http = http
        self.openai = openai

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> ClientResponse:
        response = await self.http.post(f"{self.url}{path}", json=body, headers=headers)
        await response.read()
        return response


@asynccontextmanager
async def served(answer: list[Output] | None = None, role: Role = "single") -> AsyncIterator[Client]:
    engine = FakeEngine()
    engine.answer = answer
    async with running(engine, role) as port:
        url = f"http://127.0.0.1:{port}"
        async with (
            ClientSession() as http,
            AsyncOpenAI(
                base_url=f"{url}/v1",
                api_key="none",
                max_retries=0,
                timeout=PATIENCE,
                http_client=DefaultAsyncHttpxClient(trust_env=False),
            ) as openai,
        ):
            yield Client(engine, url, http, openai)
    await asyncio.to_thread(engine.join)


@asynccontextmanager
async def running(engine: FakeEngine, role: Role = "single", port: int = 0) -> AsyncIterator[int]:
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with anyio.create_task_group() as tasks:

        async def server() -> None:
            await serve(engine, role, MODEL, "127.0.0.1", port, max_body_bytes=MAX_BODY, ready=bound.set_result)

        tasks.start_soon(server)
        with anyio.fail_after(PATIENCE):
            yield await bound
        tasks.cancel_scope.cancel()


async def soon(waiting: Awaitable[Any]) -> None:
    with anyio.fail_after(PATIENCE):
        await waiting


async def next_event(response: ClientResponse) -> Any:
    """The next server-sent event of a stream that stays open."""
    with anyio.fail_after(PATIENCE):
        raw = await response.content.readuntil(b"\n\n")
    return events(raw.decode())[0]
