"""Handlers: from an HTTP request to a request of the engine, and its outputs back to the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import anyio
from aiohttp import web
from aiohttp.typedefs import Handler

from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.engine_adapters.reference.http import openai_format, sglang_format
from dsv4ctl.engine_adapters.reference.http.answer import Answer, Outputs, Step
from dsv4ctl.engine_adapters.reference.http.ask import Ask, Bootstrap, Role
from dsv4ctl.engine_adapters.reference.http.errors import (
    AnswerError,
    aborted,
    invalid,
    openai_error,
    sglang_error,
)
from dsv4ctl.engine_adapters.reference.http.fields import Body, flag, parse, shown, string
from dsv4ctl.engine_adapters.reference.requests import (
    BusyError,
    Request,
    RequestRefusedError,
    Serving,
)
from dsv4ctl.engine_adapters.reference.tokenizer import BOS

GENERATION_HEADER = "x-dsv4ctl-generation"
#: A client that sends or reads nothing for this long has stalled: its connection is given up.
STALL_S = 60.0
HEALTH_GENERATE_S = 20.0
#: SGLang's rids are matched by prefix, so one must be as long as a rid with its suffix can be.
ABORT_RID_LENGTH = 512

#: Of /pause_generation; without one it aborts, as SGLang does.
PAUSE_MODES = ("abort", "in_place")
_MODE_LENGTH = 32


class Reply(Protocol):
    """How one dialect tells an answer."""

    def whole(self, answer: Answer) -> dict[str, Any]: ...

    def chunks(self, answer: Answer, step: Step) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Front:
    """The engine as HTTP clients see it. `new_id` never gives the same id twice."""

    serving: Serving
    role: Role
    model: str
    vocab: int
    max_body_bytes: int
    clock: Callable[[], float]  #: monotonic seconds
    wall: Callable[[], float]  #: Unix seconds
    new_id: Callable[[], str]

    def routes(self) -> list[web.RouteDef]:
        started = int(self.wall())

        async def models(_: web.Request) -> web.Response:
            return web.json_response(openai_format.models(self.model, started))

        return [
            web.post("/generate", self.generate),
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completion),
            web.get("/v1/models", models),
            web.get("/health", self.health),
            web.get("/health_generate", self.health_generate),
            web.post("/abort_request", self.abort_request),
            web.post("/flush_cache", self.flush_cache),
            web.get("/flush_cache", self.flush_cache),
            web.post("/pause_generation", self.pause_generation),
            web.post("/continue_generation", self.continue_generation),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
        ]

    # ---- inference

    async def generate(self, http: web.Request) -> web.StreamResponse:
        begun = self.clock()
        ask = sglang_format.parse(await _body(http), self.role, self.vocab)
        request_id = ask.rid or self.new_id()
        reply = sglang_format.GenerateReply(request_id, elapsed=lambda: self.clock() - begun)
        return await self._answer(http, ask, request_id, reply)

    async def chat(self, http: web.Request) -> web.StreamResponse:
        ask = openai_format.parse_chat(await _body(http), self.role, self.model)
        return await self._openai(http, ask, chat=True)

    async def completion(self, http: web.Request) -> web.StreamResponse:
        ask = openai_format.parse_completion(await _body(http), self.role, self.model, self.vocab)
        return await self._openai(http, ask, chat=False)

    async def _openai(self, http: web.Request, ask: Ask, *, chat: bool) -> web.StreamResponse:
        request_id = ask.rid or f"{'chatcmpl' if chat else 'cmpl'}-{self.new_id()}"
        reply = openai_format.OpenAIReply(request_id, self.model, int(self.wall()), chat, ask.include_usage)
        return await self._answer(http, ask, request_id, reply)

    async def _answer(self, http: web.Request, ask: Ask, request_id: str, reply: Reply) -> web.StreamResponse:
        if fault := self.serving.fault():
            raise AnswerError(HTTPStatus.SERVICE_UNAVAILABLE, fault, code="engine_fault")
        key = self.serving.room_of(ask.bootstrap.room)
        _check_generation(http, key)
        # As SGLang's prefill side: the answer proper is the decode engine's.
        keep = 1 if self.role == "prefill" else ask.max_new_tokens
        answer = Answer(len(ask.input_ids), keep)
        with self._submitted(ask, request_id, key) as outputs:
            step = answer.add(await outputs.take())
            if ask.stream:
                return await self._stream(http, outputs, answer, step, reply)
            while not step.last:
                step = answer.add(await outputs.take())
        if (finished := answer.aborted()) is not None:
            raise aborted(finished)
        return web.json_response(reply.whole(answer))

    @contextmanager
    def _submitted(self, ask: Ask, request_id: str, key: RoomKey) -> Iterator[Outputs]:
        """The request in the engine; leaving before its end (the client went away) aborts it.

        Rids are aborted by prefix: the unguessable suffix, never told to anybody, makes sure that
        no other request begins with this one's.
        """
        rid = f"{request_id}-{self.new_id()}"
        outputs = Outputs(asyncio.get_running_loop(), ask.max_new_tokens)
        request = Request(
            rid=rid,
            key=key,
            input_ids=ask.input_ids,
            max_new_tokens=ask.max_new_tokens,
            ignore_eos=ask.ignore_eos,
            bootstrap_host=ask.bootstrap.host,
            bootstrap_port=ask.bootstrap.port,
            emit=outputs.emit,
        )
        self.serving.submit(request)
        try:
            yield outputs
        finally:
            if not outputs.ended_by_engine:
                self.serving.abort(rid, "the client went away before the answer was complete")

    async def _stream(
        self, http: web.Request, outputs: Outputs, answer: Answer, step: Step, reply: Reply
    ) -> web.StreamResponse:
        """Server-sent events. The status waits for the first output, so that an early abort has its own."""
        if (finished := answer.aborted()) is not None:
            raise aborted(finished)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        try:
            await response.prepare(http)
            while (finished := answer.aborted()) is None:
                await _send(response, [json.dumps(chunk) for chunk in reply.chunks(answer, step)])
                if step.last:
                    await _send(response, ["[DONE]"])
                    break
                step = answer.add(await outputs.take())
            else:
                # Tokens that came together with the abort are not told: they may be why it was aborted.
                await _send(response, [json.dumps(_error_body(http, aborted(finished)))])
            await response.write_eof()
        except ConnectionResetError:
            return response  # the client went away between two events
        except TimeoutError:
            if http.transport is not None:
                http.transport.abort()
        return response

    # ---- the rest

    async def health(self, http: web.Request) -> web.Response:
        if fault := self.serving.fault():
            raise AnswerError(HTTPStatus.SERVICE_UNAVAILABLE, fault, code="engine_fault")
        return web.json_response({"status": "ok"})

    async def health_generate(self, http: web.Request) -> web.StreamResponse:
        """Generates a token. An engine that serves requests of rooms only cannot: there it is /health."""
        try:
            self.serving.room_of(None)
        except RequestRefusedError:
            return await self.health(http)
        ask = Ask((BOS,), 1, True, False, None, Bootstrap(None, None, None))
        reply = sglang_format.GenerateReply("health", elapsed=lambda: 0.0)
        try:
            with anyio.fail_after(HEALTH_GENERATE_S):
                return await self._answer(http, ask, f"health-{self.new_id()}", reply)
        except TimeoutError as error:
            message = f"no token within {HEALTH_GENERATE_S:g} s"
            raise AnswerError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="engine_fault") from error

    async def abort_request(self, http: web.Request) -> web.Response:
        """SGLang's rule: every request whose rid begins with the given one."""
        body = await _body(http)
        everything, rid = flag(body, "abort_all"), string(body, "rid", ABORT_RID_LENGTH)
        if not everything and rid is None:
            raise invalid("rid is missing: the beginning of a request's rid, or abort_all: true", "rid")
        count = self.serving.abort(None if everything else rid, "aborted by /abort_request")
        return web.json_response({"aborted": count})

    async def flush_cache(self, http: web.Request) -> web.Response:
        try:
            self.serving.flush()
        except BusyError as error:
            raise AnswerError(HTTPStatus.BAD_REQUEST, str(error), code="busy") from error
        return web.Response(text="Cache flushed.\n")

    async def pause_generation(self, http: web.Request) -> web.Response:
        """SGLang's, but for its mode `retract`. The answer does not wait: /server_info says `paused` when it is so."""
        mode = string(await _body(http, optional=True), "mode", _MODE_LENGTH) or "abort"
        if mode not in PAUSE_MODES:
            raise invalid(f"mode is {shown(mode)}: {' or '.join(map(shown, PAUSE_MODES))} expected", "mode")
        self.serving.pause_generation(abort=mode == "abort")
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, http: web.Request) -> web.Response:
        # SGLang's; nothing is cached here that it would free
        flag(await _body(http, optional=True), "torch_empty_cache")
        self.serving.continue_generation()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def server_info(self, http: web.Request) -> web.Response:
        mode = "null" if self.role == "single" else self.role
        named = {"served_model_name": self.model, "disaggregation_mode": mode}
        return web.json_response(named | self.serving.info())

    # ---- errors

    async def tell_errors(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware: every error as JSON, in the dialect of the path."""
        headers: dict[str, str] = {}
        try:
            return await handler(http)
        except AnswerError as raised:
            error = raised
        except RequestRefusedError as refused:
            error = invalid(str(refused))
        except web.HTTPRequestEntityTooLarge as raised:
            error = AnswerError(raised.status, f"the body is larger than {self.max_body_bytes} bytes")
        except web.HTTPMethodNotAllowed as raised:
            allowed = ", ".join(sorted(raised.allowed_methods))
            headers["Allow"] = allowed
            error = AnswerError(raised.status, f"{http.path} takes {allowed}, not {http.method}")
        except web.HTTPNotFound as raised:
            error = AnswerError(raised.status, f"there is nothing at {http.path}")
        return web.json_response(_error_body(http, error), status=error.status, headers=headers)


def _error_body(http: web.Request, error: AnswerError) -> dict[str, Any]:
    return openai_error(error) if http.path.startswith("/v1/") else sglang_error(error)


async def _body(http: web.Request, *, optional: bool = False) -> Body:
    """The JSON object of a request; without a body an empty one, where it is `optional`.

    Raises AnswerError: 400, or 408 for a client that stalls.
    """
    try:
        with anyio.fail_after(STALL_S):
            raw = await http.read()
    except TimeoutError as error:
        message = f"the body did not come within {STALL_S:g} s"
        raise AnswerError(HTTPStatus.REQUEST_TIMEOUT, message) from error
    return {} if optional and not raw else parse(raw)


async def _send(response: web.StreamResponse, events: list[str]) -> None:
    """Raises TimeoutError when the client has stopped reading, ConnectionResetError when it left."""
    if events:
        with anyio.fail_after(STALL_S):
            await response.write("".join(f"data: {event}\n\n" for event in events).encode())


def _check_generation(http: web.Request, key: RoomKey) -> None:
    """A request that names another generation than the room's live one is late: refused (409)."""
    named = http.headers.get(GENERATION_HEADER)
    if named is None:
        return
    if not (named.isascii() and named.isdigit()):
        raise invalid(f"header {GENERATION_HEADER} is {shown(named)}: a whole number expected")
    if named.lstrip("0") != str(key.generation).lstrip("0"):
        message = f"room {key.room} is at generation {key.generation}, the request names {named}"
        raise AnswerError(HTTPStatus.CONFLICT, message, code="stale_generation")
