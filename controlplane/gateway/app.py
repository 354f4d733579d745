"""The gateway as a server: routes, errors of its own, start and stop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from dsv4ctl.controlplane.config.schema import GatewayConfig
from dsv4ctl.controlplane.gateway.completions import PATHS, Completions
from dsv4ctl.controlplane.gateway.errors import RequestError
from dsv4ctl.controlplane.gateway.looking import Backend, Looking
from dsv4ctl.controlplane.link.url import local_url
from dsv4ctl.controlplane.scheduler.desk import RoomDesk
from dsv4ctl.controlplane.scheduler.fleet import Fleet
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import Telemetry

#: Seconds to connect to an engine. It is on this host and refuses at once if it is gone: this is no verdict on it, and
#: a wave of requests on a busy machine keeps this loop from its own sockets for seconds. No total time-out: the
#: room's deadlines end everything.
CONNECT_TIMEOUT = 30.0
#: Seconds that an idle connection to an engine may be used again: SGLang's server closes its own after 5, and a request
#: that is being written then is lost.
KEEPALIVE = 2.0
#: Seconds that answers under way have to reach their clients once the gateway stops.
STOP_GRACE = 1.0


@asynccontextmanager
async def serve_gateway(
    config: GatewayConfig, fleet: Fleet, desk: RoomDesk, backend: Backend, telemetry: Telemetry
) -> AsyncIterator[str]:
    """The gateway's URL; it serves until the block is left. Raises OSError if the port cannot be had."""
    # Admission bounds the rooms, and rooms the connections.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        looking = Looking(config, fleet, desk, backend, client, telemetry)
        app = _app(config, Completions(config, desk, client, telemetry), looking, telemetry)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_GRACE)
        await runner.setup()
        try:
            site = web.TCPSite(runner, config.host, config.port)
            await site.start()
            looking.url = local_url(config.host, runner.addresses[0][1])
            telemetry.emit(Event.GATEWAY_LISTENING, url=looking.url)
            yield looking.url
        finally:
            await runner.cleanup()


def _app(config: GatewayConfig, completions: Completions, looking: Looking, telemetry: Telemetry) -> web.Application:
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[_errors(telemetry)])
    for path in PATHS:
        app.router.add_post(path, completions.handle)
    app.router.add_get("/health", looking.health)
    app.router.add_get("/health_generate", looking.health_generate)
    app.router.add_get("/v1/models", looking.models)
    app.router.add_get("/server_info", looking.server_info)
    app.router.add_get("/metrics", looking.metrics)
    for method in ("GET", "POST"):
        app.router.add_route(method, "/flush_cache", looking.flush_cache)
    app.router.add_post("/abort_request", looking.abort_request)
    return app


def _errors(telemetry: Telemetry) -> Middleware:
    """Errors of the server itself (404, 405) and faults of ours in the same body as all others."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            failed = RequestError(error.status, "http_error", f"{request.method} {request.path}: {error.reason}")
        except ConnectionResetError:
            raise  # the client left while its answer was being written: nobody is there to be told
        except Exception as error:  # noqa: BLE001 - our fault must reach the client as an error, and the log
            telemetry.emit(Event.LOOP_DIED, "error", loop=f"gateway {request.path}", error=repr(error))
            failed = RequestError(500, "internal", f"control plane fault: {type(error).__name__}")
        return failed.response()

    return middleware
