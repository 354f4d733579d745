"""The client's side of one request: what was sent stays sent, whichever room or generation goes on with it."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from dsv4ctl.controlplane.gateway.seam import Told


class ClientGoneError(Exception):
    """The client's connection broke while its answer was being written."""


class Client:
    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.started: web.StreamResponse | None = None  #: once set, bytes went to the client
        self.sent = 0  #: body bytes sent
        self.told = Told(request.path)

    async def pass_on(self, event: bytes, headers: Mapping[str, str]) -> web.StreamResponse:
        """One event of a stream. Raises ClientGoneError.

        Whatever is cancelled while the client is slow to read, the event counts as told: its bytes are on their way.
        """
        try:
            if self.started is None:
                response = web.StreamResponse(headers={**headers, "Cache-Control": "no-cache"})
                await response.prepare(self.request)
                self.started = response
            self.sent += len(event)
            self.told.add(event)
            await self.started.write(event)
        except ConnectionResetError as error:
            raise ClientGoneError from error
        return self.started
