"""One attempt at one request: both legs at once, the first failure ends both, a client that leaves too."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import anyio
from aiohttp import web

from dsv4ctl.controlplane.gateway.client import Client, ClientGoneError
from dsv4ctl.controlplane.gateway.errors import EngineAnswerError, RequestError, message_in, of_abort, source_in
from dsv4ctl.controlplane.gateway.events import EventCutter, EventError, error_in, is_done
from dsv4ctl.controlplane.gateway.parsing import Parsed
from dsv4ctl.controlplane.gateway.seam import SeamError
from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.controlplane.scheduler.desk import RoomDesk
from dsv4ctl.controlplane.scheduler.fleet import Engine
from dsv4ctl.controlplane.scheduler.live import LiveRoom, RoomAbortedError
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import Telemetry

#: Seconds that the room's own reason may come after the HTTP error it caused; far below the 0.1 s a client waits.
REASON_GRACE = 0.03
#: The same where the engine's answer says that its room was aborted: the report of it is on the link already.
REPORT_GRACE = 5.0
#: Seconds that the prefill leg may end after the decode leg did; its answer is only checked.
PREFILL_TAIL = 5.0
#: Of an engine's error body, what is kept.
_MAX_ERROR_BYTES = 64 * 1024
_PASSED_HEADERS = ("content-type",)


class LegError(Exception):
    """One leg failed. `error` is what the client is told; `source` why the room is aborted.

    `reported`: the engine aborted the room itself, and its rank says why.
    """

    def __init__(self, error: RequestError, source: AbortSource, *, reported: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.source = source
        self.reported = reported


class Exchange:
    """Sends `parsed` to the engines of `live` and the decode engine's answer to `client`."""

    def __init__(
        self,
        client: Client,
        parsed: Parsed,
        live: LiveRoom,
        session: aiohttp.ClientSession,
        desk: RoomDesk,
        telemetry: Telemetry,
    ) -> None:
        self._client = client
        self._parsed = parsed
        self._live = live
        self._session = session
        self._desk = desk
        self._telemetry = telemetry
        self._body = parsed.with_fields(bootstrap(live))
        self._legs = anyio.create_task_group()
        self._prefilling = anyio.CancelScope()
        self._failed: RequestError | None = None
        self._response: web.StreamResponse | None = None

    async def run(self) -> web.StreamResponse:
        """The client's answer, complete.

        Raises RequestError if there is none (or, of a stream that began, no end); the room is aborted by then.
        """
        prefill, decode = self._live.pair
        with self._live.watched(self._aborted):
            async with self._legs:
                self._legs.start_soon(self._leg, decode, self._decode)
                if prefill is not None:
                    with self._prefilling:
                        await self._leg(prefill, self._prefill)
        if self._failed is not None or self._response is None:
            raise self._failed or RequestError(500, "internal", "the request ended without an answer")
        return self._response

    def _aborted(self, error: RoomAbortedError) -> None:
        """An abort from anywhere ends the exchange with its reason."""
        self._fail(of_abort(error))

    def _fail(self, error: RequestError) -> None:
        self._failed = self._failed or error
        self._legs.cancel_scope.cancel()

    async def _leg(self, engine: Engine, body: Callable[[Engine], Awaitable[None]]) -> None:
        """Runs one leg; its failure aborts the room, which both engines are told, and ends the other leg."""
        reported = False
        try:
            await body(engine)
            return
        except ClientGoneError:
            self._fail(RequestError(499, "client", "the client left"))
            self._desk.abort(self._live, AbortSource.CLIENT, "the client left")
            return
        except LegError as failed:
            error, source, reported = failed.error, failed.source, failed.reported
        except (aiohttp.ClientError, EventError, TimeoutError, OSError) as broken:
            text = f"{_called(engine)}: {_said(broken)}"
            error, source = RequestError(502, "engine_fault", text), AbortSource.ENGINE_FAULT
        if source is AbortSource.RETRACTION:
            await self._live.aborting.wait()  # the rank's report is on its way; without it, the room's deadline comes
        elif reported or source is AbortSource.ENGINE_FAULT:
            with anyio.move_on_after(REPORT_GRACE if reported else REASON_GRACE):
                await self._live.aborting.wait()
        aborted = self._live.aborted()
        if aborted is not None and self._live.retracted:
            self._fail(of_abort(aborted))
            return
        self._telemetry.emit(
            Event.GATEWAY_LEG_FAILED, "warning", **self._live.fields(),
            engine=engine.name, leg=engine.role, status=error.status, reason=error.message,
        )  # fmt: skip
        self._fail(error if aborted is None else of_abort(aborted))
        self._desk.abort(self._live, source, error.message)

    async def _prefill(self, engine: Engine) -> None:
        """Only checked: its text is the decode engine's to say."""
        async with self._post(engine) as answer:
            cutter = EventCutter()
            async for data in answer.content.iter_any():
                for event in cutter.feed(data) if _streams(answer) else ():
                    if (payload := error_in(event)) is not None:
                        raise _engine_fault(engine, 502, payload)

    async def _decode(self, engine: Engine) -> None:
        async with self._post(engine) as answer:
            headers = {name: answer.headers[name] for name in _PASSED_HEADERS if name in answer.headers}
            headers |= self.headers()
            if _streams(answer):
                self._response = await self._relay(answer, headers, engine)
            else:
                body = await answer.read()
                self._client.sent += len(body)
                self._response = web.Response(body=body, headers=headers)
        self._prefilling.deadline = anyio.current_time() + PREFILL_TAIL

    async def _relay(
        self, answer: aiohttp.ClientResponse, headers: Mapping[str, str], engine: Engine
    ) -> web.StreamResponse:
        """Passes events on as they come, but for what an earlier generation told. One without `[DONE]` has failed."""
        seam, cutter = self._client.told.seam(), EventCutter()
        async for data in answer.content.iter_any():
            for event in cutter.feed(data):
                payload = error_in(event)
                if payload is not None:
                    raise _engine_fault(engine, 502, payload)
                try:
                    rest = seam.rest(event)
                except SeamError as error:
                    text = f"{_called(engine)}: {error}"
                    raise LegError(RequestError(500, "integrity", text), AbortSource.INTEGRITY) from error
                if rest is None:
                    continue
                response = await self._client.pass_on(rest, headers)
                if is_done(event):
                    return response
        raise aiohttp.ClientPayloadError("its stream ended before its end was announced")

    @asynccontextmanager
    async def _post(self, engine: Engine) -> AsyncIterator[aiohttp.ClientResponse]:
        """The engine's answer with status 200. Raises LegError for any other."""
        url = engine.url
        if url is None:
            text = f"{_called(engine)} has ended"
            raise LegError(RequestError(502, "engine_fault", text), AbortSource.ENGINE_FAULT)
        headers = {
            "content-type": "application/json",
            "x-request-id": self._parsed.request_id,
            "x-dsv4ctl-generation": str(self._live.key.generation),
        }
        async with self._session.post(url + self._client.request.path, data=self._body, headers=headers) as answer:
            if answer.status != 200:
                raw = await answer.content.read(_MAX_ERROR_BYTES)
                raise _engine_fault(engine, answer.status, raw)
            yield answer

    def headers(self) -> dict[str, str]:
        return {"x-request-id": self._parsed.request_id, "x-dsv4ctl-room": str(self._live.key)}


def bootstrap(live: LiveRoom) -> dict[str, Any]:
    """The fields by which the engines of a room find each other, as SGLang names them."""
    prefill = live.pair.prefill
    if prefill is None or prefill.url is None:
        return {"bootstrap_room": live.key.room}
    return {
        "bootstrap_host": urlsplit(prefill.url).hostname,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": live.key.room,
    }


def _engine_fault(engine: Engine, status: int, raw: bytes) -> LegError:
    """A 4xx is the request's fault and passed on as it came; anything else is the engine's, or a retraction."""
    message = f"{_called(engine)} answered {status}: {message_in(raw)}"
    source = source_in(raw)
    reported = source is not None
    if source == AbortSource.RETRACTION.value:
        return LegError(RequestError(503, source, message), AbortSource.RETRACTION, reported=reported)
    if 400 <= status < 500:
        return LegError(EngineAnswerError(status, message, raw), AbortSource.CLIENT, reported=reported)
    status = status if status >= 500 else 502
    return LegError(RequestError(status, "engine_fault", message), AbortSource.ENGINE_FAULT, reported=reported)


def _called(engine: Engine) -> str:
    return f"{engine.role.value} engine {engine.name}"


def _streams(answer: aiohttp.ClientResponse) -> bool:
    return answer.headers.get("content-type", "").startswith("text/event-stream")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
