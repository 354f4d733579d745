"""The HTTP server of one reference engine."""

from __future__ import annotations

import errno
import time
import uuid
from collections.abc import Callable

import anyio
from aiohttp import web
from aiohttp.typedefs import Handler

from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.http.ask import Role
from dsv4ctl.engine_adapters.reference.http.front import Front
from dsv4ctl.engine_adapters.reference.requests import Serving

DEFAULT_VOCAB = Geometry().vocab
#: Answers under way may still end for this long once the server is told to stop.
LAST_ANSWERS_S = 1.0
CLEAN_UP_S = 10.0


class ListenError(RuntimeError):
    """The server cannot listen where it was told to; the message says why."""


def build_app(front: Front) -> web.Application:
    @web.middleware
    async def tell_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await front.tell_errors(request, handler)

    app = web.Application(client_max_size=front.max_body_bytes, middlewares=[tell_errors])
    app.add_routes(front.routes())
    return app


async def serve(
    serving: Serving,
    role: Role,
    model: str,
    host: str,
    port: int,
    *,
    max_body_bytes: int,
    ready: Callable[[int], None],
    vocab: int = DEFAULT_VOCAB,
) -> None:
    """Serves until cancelled. Port 0 takes a free one; `ready` is told the port once clients can connect.

    A client that leaves cancels its handler, which aborts its request. Raises ListenError.
    """
    front = Front(
        serving=serving,
        role=role,
        model=model,
        vocab=vocab,
        max_body_bytes=max_body_bytes,
        clock=time.monotonic,
        wall=time.time,
        new_id=lambda: uuid.uuid4().hex,
    )
    runner = web.AppRunner(
        build_app(front),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=LAST_ANSWERS_S,
    )
    await runner.setup()
    try:
        await _listen(runner, host, port)
        ready(runner.addresses[0][1])
        await anyio.sleep_forever()
    finally:
        with anyio.move_on_after(CLEAN_UP_S, shield=True):
            await runner.cleanup()


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port, reuse_address=True).start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"port {port} of {host} is taken: choose another, or 0 for a free one") from error
        raise ListenError(f"cannot listen on port {port} of {host}: {error}") from error
