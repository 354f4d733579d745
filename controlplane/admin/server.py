"""The admin API: verbs as routes on a Unix socket."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
from aiohttp import web

from dsv4ctl.controlplane.admin import openapi
from dsv4ctl.controlplane.admin.errors import STATUS, AdminError
from dsv4ctl.controlplane.admin.plane import Plane
from dsv4ctl.controlplane.admin.registry import VERBS
from dsv4ctl.controlplane.admin.socket import AdminSocket, peer_credentials
from dsv4ctl.controlplane.admin.verb import JSON, LINES, Verb
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import Telemetry

MAX_BODY_BYTES = 64 * 1024
#: Seconds that calls in progress are given when the server ends: an answer that is made reaches its caller.
CLOSE_TIMEOUT = 2.0

_PLANE = web.AppKey("plane", Plane)
_CLOSING = web.AppKey("closing", anyio.Event)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def admin_server(plane: Plane, path: Path) -> AsyncIterator[None]:
    """Serves the admin API at `path` while the block runs. Raises SocketError before anything is served."""
    telemetry = plane.telemetry
    owned = AdminSocket(path)
    try:
        app = _app(plane)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_TIMEOUT)
        await runner.setup()
        try:
            await web.SockSite(runner, owned.socket).start()
            telemetry.emit(Event.ADMIN_LISTENING, socket=str(path), replaced_stale=owned.replaced or None)
            yield
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_TIMEOUT + 1):
                await runner.cleanup()
    finally:
        owned.close()


def _app(plane: Plane) -> web.Application:
    # The outermost stands first: errors of all the others, and of aiohttp, leave as our error bodies.
    app = web.Application(middlewares=[_errors, _callers], client_max_size=MAX_BODY_BYTES)
    app[_PLANE] = plane
    app[_CLOSING] = anyio.Event()
    app.on_shutdown.append(_end_streams)
    for verb in VERBS:
        for path in verb.paths:
            app.router.add_route(verb.method, path, partial(_call, verb))
    app.router.add_get(openapi.PATH, _openapi)
    return app


async def _end_streams(app: web.Application) -> None:
    app[_CLOSING].set()


@web.middleware
async def _callers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Only the owner's uid and root may call, whatever the socket's mode has become."""
    assert request.transport is not None
    pid, uid = peer_credentials(request.transport.get_extra_info("socket"))
    if uid not in (0, os.getuid()):
        request.app[_PLANE].telemetry.emit(Event.ADMIN_DENIED, "warning", uid=uid, pid=pid, path=request.path)
        raise AdminError("denied", f"uid {uid} may not call: this control plane belongs to uid {os.getuid()}")
    return await handler(request)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    telemetry = request.app[_PLANE].telemetry
    try:
        return await handler(request)
    except AdminError as error:
        _log_refusal(telemetry, request, error)
        return _error(STATUS[error.code], error.code, error.message)
    except web.HTTPNotFound:
        paths = ", ".join([path for verb in VERBS for path in verb.paths] + [openapi.PATH])
        return _error(404, "not_found", f"no such path {request.path}; there are: {paths}")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _error(405, "bad_request", f"{request.path} is called with {allowed}, not {request.method}")
    except web.HTTPRequestEntityTooLarge:
        return _error(413, "bad_request", f"expected a body of at most {MAX_BODY_BYTES} bytes")
    except Exception as error:  # noqa: BLE001 - whatever fails is told to the caller and logged; we serve on
        telemetry.emit(Event.ADMIN_FAILED, "error", path=request.path, error=repr(error))
        return _error(STATUS["failed"], "failed", f"{type(error).__name__}: {error}")


def _log_refusal(telemetry: Telemetry, request: web.Request, error: AdminError) -> None:
    telemetry.emit(Event.ADMIN_REQUEST, "warning", path=request.path, status=STATUS[error.code], reason=error.message)


async def _call(verb: Verb[Any], request: web.Request) -> web.StreamResponse:
    plane = request.app[_PLANE]
    args = await _arguments(verb, request)
    if not verb.reads:
        plane.telemetry.emit(Event.ADMIN_REQUEST, verb=verb.name, arguments=msgspec.to_builtins(args))
    answer = await verb.answer(plane, args)
    if verb.content_type == LINES:
        return await _stream(answer, request)
    body = msgspec.json.encode(answer) if verb.content_type == JSON else str(answer).encode()
    return web.Response(body=body, headers={"Content-Type": verb.content_type})


async def _arguments(verb: Verb[Any], request: web.Request) -> Any:
    try:
        if verb.reads:
            given = {**request.query, **request.match_info}
            return msgspec.convert(given, verb.args, strict=False)
        return msgspec.json.decode(await request.read() or b"{}", type=verb.args)
    except msgspec.ValidationError as error:
        known = ", ".join(verb.args.__struct_fields__) or "none"
        raise AdminError("bad_request", f"{verb.name}: {error}. Arguments: {known}") from error
    except msgspec.DecodeError as error:
        raise AdminError("bad_request", f"{verb.name}: expected a JSON object: {error}") from error


async def _stream(records: AsyncGenerator[Any, None], request: web.Request) -> web.StreamResponse:
    """JSON lines until the iterator ends, the caller leaves, or the server closes."""
    response = web.StreamResponse(headers={"Content-Type": LINES})
    await response.prepare(request)
    closing = request.app[_CLOSING]

    async def send() -> None:
        async with aclosing(records):
            async for record in records:
                await response.write(msgspec.json.encode(record, enc_hook=str) + b"\n")
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        await closing.wait()
        tasks.cancel_scope.cancel()
    await response.write_eof()
    return response


async def _openapi(request: web.Request) -> web.Response:
    return web.Response(body=msgspec.json.encode(openapi.document()), headers={"Content-Type": JSON})


def _error(status: int, code: str, message: str) -> web.Response:
    body = msgspec.json.encode({"error": {"code": code, "message": message}})
    return web.Response(status=status, body=body, headers={"Content-Type": JSON})
