"""Clients of the gateway: each sends its request, and must be answered or told why not."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import anyio
import msgspec
from aiohttp import web

from dsv4ctl.controlplane.gateway.completions import Completions
from simulation.http import Request
from simulation.plan import Client

if TYPE_CHECKING:
    from simulation.world import World


class Clients:
    """`gateway` None: nobody listens."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.gateway: Completions | None = None
        self.told: Counter[str] = Counter()
        self._handlers: dict[asyncio.Task[web.StreamResponse], Request] = {}

    def __len__(self) -> int:
        """Requests that are not answered yet."""
        return len(self._handlers)

    async def at(self, client: Client, began: float) -> None:
        await anyio.sleep_until(began + client.at)
        await self.ask(client)

    def cut_off(self) -> None:
        """The control plane's process is gone, and every connection with it."""
        for handler, request in list(self._handlers.items()):
            request.gone = True
            handler.cancel()

    async def ask(self, client: Client) -> str:
        """Sends the request; returns what the client was told, which is counted."""
        gateway = self.gateway
        outcome = "refused: connection" if gateway is None else await self._ask(client, gateway)
        self._world.tell(f"client {client.number}: {outcome}")
        self.told[outcome] += 1
        return outcome

    async def _ask(self, client: Client, gateway: Completions) -> str:
        body = {"text": "a" * 256 * client.pages, "pages": client.pages, "tokens": client.tokens}
        request = Request(f"client-{client.number}", {**body, "stream": client.stream}, client.reads_slowly)
        response: web.StreamResponse | None = None
        failed: BaseException | None = None

        async def handle() -> web.StreamResponse:
            return await gateway.handle(request)  # type: ignore[arg-type]

        # As the server does it: the handler is a task of its own, which a client that leaves cancels.
        handler = self._world.loop.create_task(handle())
        self._handlers[handler] = request
        if client.leaves is not None:
            self._world.loop.call_later(client.leaves, self._leave, handler, request)
        try:
            response = await asyncio.shield(handler)
        except asyncio.CancelledError:
            if not request.gone:
                raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is what the client sees
            failed = error
        finally:
            del self._handlers[handler]
        return self._outcome(client, request, response, failed)

    def _leave(self, handler: asyncio.Task[web.StreamResponse], request: Request) -> None:
        """The connection breaks: the server cancels the handler."""
        if not handler.done():
            request.gone = True
            handler.cancel()

    def leave_all(self, share: float, random: Random) -> int:
        """A wave of clients vanishes."""
        chosen = [pair for pair in self._handlers.items() if random.random() < share]
        for handler, request in chosen:
            self._leave(handler, request)
        return len(chosen)

    def _outcome(
        self, client: Client, request: Request, response: web.StreamResponse | None, failed: BaseException | None
    ) -> str:
        if request.gone:
            return "left"
        if failed is not None or response is None:
            self._world.violated("S8", f"client {client.number} was told nothing: {failed!r}")
            return "nothing"
        if not client.stream or not response.prepared:
            return str(response.status)
        data = bytes(request.received)
        if data.endswith(b"data: [DONE]\n\n"):
            if msgspec.json.decode(data.split(b"\n\n")[-3][6:])["text"] != "a" * client.tokens:
                self._world.violated("S6", f"client {client.number} got another number of tokens than {client.tokens}")
            return "200"
        if b'"error"' not in data.rsplit(b"data:", 1)[-1]:
            self._world.violated("S8", f"client {client.number}: its stream ended without a word")
        return "error event"
