"""Routes that look, and those that SGLang's operators know: health, models, server info, flush, abort."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import aiohttp
import msgspec
from aiohttp import web

from dsv4ctl.controlplane.config.schema import GatewayConfig
from dsv4ctl.controlplane.gateway.errors import RequestError
from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.controlplane.scheduler.desk import RoomDesk
from dsv4ctl.controlplane.scheduler.fleet import Fleet
from dsv4ctl.controlplane.telemetry.log import Telemetry

#: Seconds that one generated token may take before /health_generate says no.
HEALTH_GENERATE_DEADLINE = 20.0


class Backend(Protocol):
    """What is asked of the whole control plane."""

    async def status(self) -> dict[str, Any]: ...
    async def engines(self) -> list[dict[str, Any]]: ...
    async def flush_caches(self) -> str | None:
        """None, or why not every cached page was dropped."""


class Looking:
    def __init__(
        self,
        config: GatewayConfig,
        fleet: Fleet,
        desk: RoomDesk,
        backend: Backend,
        client: aiohttp.ClientSession,
        telemetry: Telemetry,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._desk = desk
        self._backend = backend
        self._client = client
        self._telemetry = telemetry
        self.url = ""  #: the gateway's own, once it listens

    async def health(self, request: web.Request) -> web.Response:
        """200 only if a request could be served now."""
        refusing = self._desk.refusing
        if refusing is None and self._fleet.can_serve:
            return web.Response(text="")
        draining = refusing is not None or self._fleet.draining
        reason = refusing or self._fleet.why_not()
        return RequestError(503, "draining" if draining else "no_engine", reason).response()

    async def health_generate(self, request: web.Request) -> web.Response:
        """200 only if one token comes out of the same way that every request takes."""
        body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
        timeout = aiohttp.ClientTimeout(total=HEALTH_GENERATE_DEADLINE)
        try:
            async with self._client.post(self.url + "/generate", json=body, timeout=timeout) as answer:
                raw = await answer.read()
        except TimeoutError:
            reason = f"no token within {HEALTH_GENERATE_DEADLINE:g} s"
            return RequestError(503, "no_token", reason).response()
        if answer.status == 200:
            return web.Response(text="")
        return web.Response(status=503, body=raw, content_type="application/json")

    async def models(self, request: web.Request) -> web.Response:
        geometry = next((engine.geometry for engine in self._fleet if engine.geometry), None)
        model = {
            "id": self._config.model,
            "object": "model",
            "created": 0,
            "owned_by": "dsv4ctl",
            "max_model_len": geometry.context_tokens if geometry else None,
        }
        return _json({"object": "list", "data": [model]})

    async def server_info(self, request: web.Request) -> web.Response:
        return _json({**await self._backend.status(), "engines": await self._backend.engines()})

    async def metrics(self, request: web.Request) -> web.Response:
        text = self._telemetry.metrics.render(await self._backend.status(), await self._backend.engines())
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def flush_cache(self, request: web.Request) -> web.Response:
        failed = await self._backend.flush_caches()
        if failed is not None:
            return RequestError(400, "busy", failed).response()
        return web.Response(text="Cache flushed.\n")

    async def abort_request(self, request: web.Request) -> web.Response:
        """`{"rid": ...}`: rooms whose request id is, or begins with, it (SGLang's rule); or `{"abort_all": true}`."""
        try:
            body = msgspec.json.decode(await request.read())
        except (msgspec.DecodeError, RecursionError) as error:
            return RequestError(400, "invalid_json", f"the body is not JSON: {error}").response()
        rid = body.get("rid") if isinstance(body, Mapping) else None
        everything = isinstance(body, Mapping) and body.get("abort_all") is True
        if not everything and not (isinstance(rid, str) and rid):
            return RequestError(400, "invalid_type", "rid or abort_all is expected", param="rid").response()
        aborted = self._desk.abort_where(
            lambda live: everything or live.room.request_id.startswith(str(rid)),
            AbortSource.CLIENT,
            "asked by /abort_request",
        )
        return _json({"aborted": [str(live.key) for live in aborted]})


def _json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
