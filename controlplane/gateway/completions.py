"""The three generating routes: parse, open a room, exchange, and say what went wrong."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

import aiohttp
import anyio
from aiohttp import web

from dsv4ctl.controlplane.config.schema import GatewayConfig
from dsv4ctl.controlplane.gateway.client import Client
from dsv4ctl.controlplane.gateway.errors import RequestError, of_abort
from dsv4ctl.controlplane.gateway.exchange import Exchange
from dsv4ctl.controlplane.gateway.parsing import Parsed, parse
from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.controlplane.scheduler.desk import RoomDesk
from dsv4ctl.controlplane.scheduler.live import LiveRoom, RoomAbortedError, RoomRequest
from dsv4ctl.controlplane.scheduler.placement import NotServingError, OverAdmissionError
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import Telemetry
from dsv4ctl.policies.integrity import OnMismatch, on_mismatch

#: Codes of errors that are no refusal: there was a room.
_ABORTED = frozenset(source.value for source in AbortSource)
PATHS = ("/generate", "/v1/chat/completions", "/v1/completions")


class Completions:
    """Handles every path of `PATHS`."""

    def __init__(
        self, config: GatewayConfig, desk: RoomDesk, session: aiohttp.ClientSession, telemetry: Telemetry
    ) -> None:
        self._config = config
        self._desk = desk
        self._session = session
        self._telemetry = telemetry

    async def handle(self, request: web.Request) -> web.StreamResponse:
        began = anyio.current_time()
        parsed: Parsed | None = None
        try:
            parsed = parse(
                request.path, await self._body(request), request.headers, self._config.model, uuid.uuid4().hex
            )
            response = await self._answer(request, parsed)
        except RequestError as error:
            if parsed is None:
                self._telemetry.emit(
                    Event.GATEWAY_REFUSED, "warning", path=request.path,
                    status=error.status, code=error.code, reason=error.message,
                )  # fmt: skip
            else:
                error.headers["x-request-id"] = parsed.request_id
            response = error.response()
        self._telemetry.emit(
            Event.GATEWAY_REQUEST,
            request_id=parsed.request_id if parsed else None,
            session=parsed.session if parsed else None,
            room=response.headers.get("x-dsv4ctl-room"),
            path=request.path,
            status=response.status,
            stream=parsed.stream if parsed else None,
            seconds=round(anyio.current_time() - began, 4),
        )
        return response

    async def _body(self, request: web.Request) -> bytes:
        limit = self._config.max_body_bytes
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise RequestError(413, "body_too_large", f"the body is over {limit} bytes") from error

    async def _answer(self, request: web.Request, parsed: Parsed) -> web.StreamResponse:
        """One attempt, and a second in a new room if what landed was wrong before any byte went out.

        A retracted room is no attempt: its next generation goes on with the same answer.
        """
        client = Client(request)
        attempts, live = 1, await self._open(parsed)
        while True:
            with self._desk.answering(live), self._client_stays(live, client):
                exchange = Exchange(client, parsed, live, self._session, self._desk, self._telemetry)
                try:
                    return await exchange.run()
                except RequestError as failed:
                    error = failed
                try:
                    if live.retracted:
                        live = await self._opened(self._desk.open_again(live))
                        continue
                    if _retried(live, client.sent, attempts):
                        attempts += 1
                        live = await self._open(parsed, fresh=True)
                        continue
                except RequestError as failed:
                    error = failed
                error.headers.update({**exchange.headers(), **error.headers})
                if client.started is None:
                    raise error
                return await self._end_stream(client.started, error)

    @contextmanager
    def _client_stays(self, live: LiveRoom, client: Client) -> Iterator[None]:
        """Cancelled: it left, and the room is aborted."""
        try:
            yield
        except anyio.get_cancelled_exc_class():
            self._desk.abort(live, AbortSource.CLIENT, "the client left")
            self._telemetry.emit(Event.GATEWAY_CLIENT_GONE, **live.fields(), bytes=client.sent)
            raise

    async def _open(self, parsed: Parsed, *, fresh: bool = False) -> LiveRoom:
        request = RoomRequest(parsed.request_id, parsed.session, parsed.tokens, fresh)
        try:
            return await self._opened(self._desk.open(request))
        except RequestError as refused:
            if refused.code not in _ABORTED:
                self._telemetry.emit(
                    Event.GATEWAY_REFUSED, "warning", request_id=parsed.request_id, session=parsed.session,
                    status=refused.status, code=refused.code, reason=refused.message,
                )  # fmt: skip
            raise

    async def _opened(self, opening: Awaitable[LiveRoom]) -> LiveRoom:
        """The room, or RequestError with what its client is told."""
        try:
            return await opening
        except NotServingError as error:
            code = "draining" if error.draining else "no_engine"
            raise RequestError(503, code, f"no engine can serve: {error}") from error
        except OverAdmissionError as error:
            raise _over_admission(error) from error
        except RoomAbortedError as error:
            failed = of_abort(error)
            failed.headers["x-dsv4ctl-room"] = str(error.key)
            raise failed from error

    async def _end_stream(self, response: web.StreamResponse, error: RequestError) -> web.StreamResponse:
        """An error event with the reason, and no `[DONE]`."""
        try:
            await response.write(error.event())
            await response.write_eof()
        except ConnectionResetError:
            pass  # the client left: it learns nothing, and the room is aborted already
        return response


def _retried(live: LiveRoom, sent: int, attempts: int) -> bool:
    if live.room.source is not AbortSource.INTEGRITY:
        return False
    return on_mismatch(bytes_to_client=sent, attempts=attempts) is OnMismatch.RE_PREFILL


def _over_admission(error: OverAdmissionError) -> RequestError:
    if error.retry_after is None:
        return RequestError(400, "too_large", str(error))
    headers = {"Retry-After": str(error.retry_after)}
    return RequestError(429, "over_admission", str(error), headers=headers)
