"""An engine that computes nothing: HTTP and the real link frames, doing per request what its body asks for.

`python fake_engine.py` runs one as a process (DSV4CTL_ENGINE as for any engine); `FakeRank` runs in a test's
own loop. A request's field `fake` says what each leg does, by role:
  status: answer with this status; wait: seconds before anything; tokens, interval: the stream;
  die_after: drop the connection after so many tokens; error_after, end_after: say so, or
  end the stream without a word, instead;
  wedge: stop stepping for ever; silent: never answer; mismatch: report what landed as wrong;
  closes_first: close the room before the stream;
  retract_after: retract the first generation after so many tokens (`quietly`: only the link says so);
  later: what the next generations do instead.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
from aiohttp import web

from dsv4ctl.controlplane.link.codec import Decoder, FrameError, encode
from dsv4ctl.controlplane.link.wire import (
    WIRE_VERSION,
    Abort,
    AbortAck,
    Answer,
    Fenced,
    Geometry,
    Hello,
    LedgerCounts,
    OpenRoom,
    PoolGeometry,
    Progress,
    Query,
    Received,
    Refused,
    Role,
    RoomReport,
    SetGuards,
    ToRank,
    Welcome,
)
from dsv4ctl.controlplane.rooms.states import FORWARD, AbortSource, Cancellable, Quiet, RoomKey, RoomState

CONTEXT_TOKENS = 4096
_RETRACTED = b'{"error": {"message": "no page", "source": "retraction"}}'
GEOMETRY = Geometry(
    page_tokens=256,
    layers=4,
    index_k_dtype="bf16",
    context_tokens=CONTEXT_TOKENS,
    pools=(
        PoolGeometry("c4_kv", "full", "full", 8192, (1, 2)),
        PoolGeometry("index_k", "full", "full", 16384, (1, 2)),
        PoolGeometry("swa_kv", "swa", "window", 32768, (0, 1, 2, 3)),
        PoolGeometry("c4_state", "state", "point", 4096, (1, 2)),
    ),
    pages={"full": 64, "swa": 64, "state": 64},
    model="fake",
)


@dataclass
class FakeRank:
    """One rank. `log` is what happened to it: ("open" | "abort" | "leg" | "leg_cancelled" | ..., key or rid)."""

    engine: str
    role: Role
    incarnation: str
    link: str
    rank: int = 0
    ranks: int = 1
    geometry: Geometry = GEOMETRY
    wire: int = WIRE_VERSION
    cancellable: Cancellable = Cancellable.CHUNK
    in_order: bool = False  #: as it declares; its legs wait for the openings that were written before them
    answers: bool = True  #: whether it answers queries
    allocates: bool = True  #: whether it reports a room as known
    quiet: anyio.Event | None = None  #: a retracted room is acknowledged only then
    acks: bool = True  #: whether aborts are acknowledged
    deaf: bool = False  #: whether it takes no notice of aborts at all
    log: list[tuple[str, str]] = field(default_factory=list)
    rooms: dict[int, RoomKey] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)  #: of the room that was opened last
    scopes: dict[RoomKey, anyio.CancelScope] = field(default_factory=dict)
    aborted: dict[RoomKey, tuple[AbortSource, str]] = field(default_factory=dict)
    steps: int = 0
    running: int = 0
    wedged: bool = False
    quarantined: int = 0
    paused: bool = False
    guards_off: tuple[str, ...] = ()
    refused: str | None = None
    url: str = ""
    ports: list[int] = field(default_factory=list)  #: of the other end of each leg's connection

    async def run(self) -> None:
        """Serves until the link ends. Raises RuntimeError if the control plane refused the rank."""
        async with self._http(), await anyio.connect_unix(self.link) as stream:
            self.stream = stream
            await stream.send(
                encode(
                    Hello(
                        wire=self.wire,
                        engine=self.engine,
                        role=self.role,
                        rank=self.rank,
                        ranks=self.ranks,
                        incarnation=self.incarnation,
                        pid=os.getpid(),
                        url=self.url,
                        bootstrap_port=9 if self.role is Role.PREFILL else 0,
                        geometry=self.geometry,
                        cancellable=self.cancellable,
                        in_order=self.in_order,
                    )
                )
            )
            async with anyio.create_task_group() as tasks:
                self._start_soon = tasks.start_soon
                await self._frames()
                tasks.cancel_scope.cancel()
        if self.refused is not None:
            raise RuntimeError(self.refused)

    # ---- link -------------------------------------------------------------------------------------

    async def _frames(self) -> None:
        decoder: Decoder[ToRank] = Decoder(ToRank)
        while True:
            try:
                data = await self.stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return
            for frame in decoder.feed(data):
                if isinstance(frame, Welcome):
                    self._start_soon(self._progress, frame.progress_interval)
                elif isinstance(frame, FrameError):
                    raise frame
                else:
                    await self._frame(frame)

    async def _frame(self, frame: ToRank) -> None:
        match frame:
            case Refused():
                self.refused = frame.reason
            case OpenRoom():
                self.rooms[frame.key.room] = frame.key
                self.log.append(("open", str(frame.key)))
                self.deadlines = frame.deadlines
                if self.allocates:
                    await self.send(RoomReport(frame.key, RoomState.ALLOCATED))
            case Abort() if not self.deaf:
                await self._abort(frame)
            case Fenced():
                self.log.append(("fenced", frame.incarnation))
            case SetGuards():
                self.guards_off = frame.off
            case Query() if not self.answers:
                pass
            case Query(what="stacks"):
                await self.send(Answer(frame.id, "File fake_engine.py, in _leg"))
            case Query(what="flush") if self.running:
                await self.send(Answer(frame.id, None, error="busy: 1 request is running"))
            case Query():
                await self.send(Answer(frame.id, {"what": frame.what}))

    async def _abort(self, frame: Abort) -> None:
        await self.send(Received(frame.seq))
        if frame.key in self.aborted:
            return
        self.aborted[frame.key] = (frame.source, frame.reason)
        self.log.append(("abort", str(frame.key)))
        if frame.source is AbortSource.RETRACTION:
            self._start_soon(self._acknowledge, frame.key)  # its leg says so itself
            return
        if frame.key in self.scopes:
            self.scopes[frame.key].cancel()
        if self.acks:
            await self.send(AbortAck(frame.key, Quiet.QUIET))

    async def _acknowledge(self, key: RoomKey) -> None:
        if self.quiet is not None:
            await self.quiet.wait()
        await self.send(AbortAck(key, Quiet.QUIET))

    async def send(self, frame: msgspec.Struct) -> None:
        # If the control plane left, `run` is about to end.
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self.stream.send(encode(frame))

    async def _progress(self, interval: float) -> None:
        while True:
            if not self.wedged:
                self.steps += 1
            ledger = LedgerCounts(pages_quarantined={"full": self.quarantined})
            queues = {"running": self.running}
            await self.send(Progress(self.steps, self.running, queues, ledger, {}, paused=self.paused))
            await anyio.sleep(interval)

    # ---- HTTP -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        for path in ("/generate", "/v1/chat/completions", "/v1/completions"):
            app.router.add_post(path, self._leg)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            listening = socket.create_server(("127.0.0.1", 0))
            await web.SockSite(runner, listening).start()
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            yield
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1):
                await runner.cleanup()

    async def _leg(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        while self.in_order and body["bootstrap_room"] not in self.rooms:
            await anyio.lowlevel.checkpoint()
        key = self.rooms[body["bootstrap_room"]]
        assert request.headers["x-dsv4ctl-generation"] == str(key.generation)
        self.log.append(("leg", request.headers["x-request-id"]))
        assert request.transport is not None
        self.ports.append(request.transport.get_extra_info("peername")[1])
        does = body.get("fake", {}).get(self.role.value, {})
        if key.generation > 1:
            does = does.get("later", {})
        self.running += 1
        response: web.StreamResponse | None = None
        scope = self.scopes[key] = anyio.CancelScope()
        try:
            with scope:
                response = await self._answer(request, body, key, does)
        finally:
            if response is None:
                self.log.append(("leg_cancelled", str(key)))
            self.running -= 0 if does.get("wedge") else 1
            del self.scopes[key]
        if response is None:
            source, reason = self.aborted[key]
            return _error(500, f"aborted by {source.value}: {reason}")
        return response

    async def _answer(
        self, request: web.Request, body: dict[str, Any], key: RoomKey, does: dict[str, Any]
    ) -> web.StreamResponse:
        await anyio.sleep(does.get("wait", 0))
        if does.get("wedge"):
            self.wedged = True
        if does.get("wedge") or does.get("silent"):
            await anyio.sleep_forever()
        if "status" in does:
            return _error(does["status"], f"told to answer {does['status']}")
        if len(json.dumps(body)) > CONTEXT_TOKENS:
            return _error(400, f"the prompt is longer than {CONTEXT_TOKENS} tokens", "context_length_exceeded")
        if "mismatch" in does and key.room not in self.aborted:
            self._start_soon(self._late_verdict, key)
            return _error(500, "index_k differs", source="integrity")
        if self.role is Role.PREFILL:
            await self._advance(key, RoomState.BOOTSTRAPPING, RoomState.SENDING)
            await self._close(key, {"bytes_by_pool": {"index_k": 4096}})
            return web.json_response({"prefilled": True})
        await self._advance(key, RoomState.LANDED, RoomState.DECODING)
        tokens = [does.get("token", f"{number} ") for number in range(does.get("tokens", 3))]
        if not body.get("stream"):
            if "retract_after" in does:
                await self._retract(key)
                return web.Response(status=503, body=_RETRACTED, content_type="application/json")
            await self._close(key, {"digests_compared": 4})
            return web.json_response(_whole(request.path, "".join(tokens)))
        return await self._stream(request, key, does, tokens)

    async def _stream(
        self, request: web.Request, key: RoomKey, does: dict[str, Any], tokens: list[str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if does.get("closes_first"):
            await self._close(key, {})
        for number, token in enumerate(tokens):
            if number == does.get("die_after"):
                assert request.transport is not None
                await response.write(b'data: {"half of an ev')
                request.transport.abort()
                return response
            if number == does.get("error_after"):
                await response.write(b'data: {"error": {"message": "told to fail"}}\n\ndata: [DONE]\n\n')
                return response
            if number == does.get("retract_after"):
                await self._retract(key)
                if does.get("quietly"):
                    await anyio.sleep_forever()
                await response.write(b"data: " + _RETRACTED + b"\n\n")
                return response
            if number == does.get("end_after"):
                await response.write_eof()
                return response
            await response.write(b"data: " + json.dumps(_chunk(request.path, token)).encode() + b"\n\n")
            await anyio.sleep(does.get("interval", 0))
        if not does.get("closes_first"):
            await self._close(key, {})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _retract(self, key: RoomKey) -> None:
        await self.send(RoomReport(key, RoomState.ABORTING, {"source": "retraction", "reason": "no page"}))

    async def _late_verdict(self, key: RoomKey) -> None:
        """The link is slower than the HTTP answer."""
        await anyio.sleep(0.05)
        detail = {"source": "integrity", "reason": "index_k differs", "digest_mismatches": ["index_k"]}
        await self.send(RoomReport(key, RoomState.ABORTED, detail))

    async def _advance(self, key: RoomKey, first: RoomState, last: RoomState) -> None:
        for state in FORWARD[FORWARD.index(first) : FORWARD.index(last) + 1]:
            await self.send(RoomReport(key, state))

    async def _close(self, key: RoomKey, detail: dict[str, Any]) -> None:
        await self.send(RoomReport(key, RoomState.CLOSED, detail))


def _whole(path: str, text: str) -> dict[str, Any]:
    if path == "/generate":
        return {"text": text, "meta_info": {"finish_reason": {"type": "stop"}}}
    shared = {"id": "x", "created": 0, "model": "dsv4-reference", "object": "chat.completion"}
    if path == "/v1/completions":
        return {**shared, "object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}
    message = {"role": "assistant", "content": text}
    return {**shared, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def _chunk(path: str, token: str) -> dict[str, Any]:
    if path == "/generate":
        return {"text": token, "meta_info": {"finish_reason": None}}
    shared = {"id": "x", "created": 0, "model": "dsv4-reference", "object": "chat.completion.chunk"}
    if path == "/v1/completions":
        return {**shared, "object": "text_completion", "choices": [{"index": 0, "text": token, "finish_reason": None}]}
    return {**shared, "choices": [{"index": 0, "delta": {"content": token}, "finish_reason": None}]}


def _error(status: int, message: str, code: str | None = None, **more: str) -> web.Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code, **more}}
    return web.json_response(body, status=status)


def from_request(request: dict[str, Any]) -> FakeRank:
    """A rank for a LaunchRequest."""
    engine = request["engine"]
    return FakeRank(
        engine["name"],
        Role(engine["role"]),
        request["incarnation"],
        request["link"],
        rank=request["rank"],
        ranks=engine["ranks"],
    )


if __name__ == "__main__":
    print(json.dumps({"event": "fake.starting", "level": "info"}), flush=True)
    main: Callable[[], Awaitable[None]] = from_request(json.loads(os.environ["DSV4CTL_ENGINE"])).run
    try:
        anyio.run(main)
    except* RuntimeError as failed:
        sys.exit(str(failed.exceptions[0]))
