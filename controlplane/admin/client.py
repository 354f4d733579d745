"""Calls the admin API: what the commands, and programs beside them, use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from dsv4ctl.controlplane.admin.errors import AdminError

#: A host name that HTTP wants and a Unix socket has no use for.
_BASE = "http://dsv4ctl"


class NoControlPlaneError(Exception):
    """Nobody serves at the socket; the message says what is there instead."""


class AdminClient:
    """One connection pool to one admin socket. Open it with `connect`."""

    def __init__(self, http: aiohttp.ClientSession, path: Path) -> None:
        self._http = http
        self._path = path

    async def call(
        self, method: str, path: str, arguments: Mapping[str, Any], deadline_s: float | None = 10.0
    ) -> bytes:
        """The answer's body. Raises AdminError, NoControlPlaneError, TimeoutError."""
        async with self._open(method, path, arguments, deadline_s) as response:
            return await response.read()

    async def lines(self, path: str, arguments: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """JSON objects as they come; ends with the server. Raises AdminError, NoControlPlaneError."""
        async with self._open("GET", path, arguments, None) as response:
            async for line in response.content:
                yield line

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, arguments: Mapping[str, Any], deadline_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        query = {name: _query(value) for name, value in arguments.items()} if method == "GET" else None
        body = msgspec.json.encode(arguments) if method != "GET" else None
        try:
            async with self._http.request(
                method, _BASE + path, params=query, data=body, timeout=aiohttp.ClientTimeout(deadline_s)
            ) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.read())
                yield response
        except aiohttp.ClientConnectorError as error:
            raise NoControlPlaneError(_nobody(self._path, error.os_error)) from error
        except aiohttp.ClientError as error:
            raise NoControlPlaneError(f"the control plane at {self._path} went away: {error}") from error


@asynccontextmanager
async def connect(path: Path) -> AsyncIterator[AdminClient]:
    connector = aiohttp.UnixConnector(str(path))
    # Log lines may be long; the default limit is made for web pages.
    async with aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as http:
        yield AdminClient(http, path)


def _query(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _refusal(status: int, body: bytes) -> Exception:
    try:
        error = msgspec.json.decode(body)["error"]
        return AdminError(error["code"], error["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return AdminError("failed", f"status {status}: {body[:200].decode('utf-8', 'replace')}")


def _nobody(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"no control plane at {path}: no such socket; begin with `dsv4ctl start`, or give --socket"
    if isinstance(error, ConnectionRefusedError) and not path.is_socket():
        return f"no control plane at {path}: it is no socket; give another --socket"
    if isinstance(error, ConnectionRefusedError):
        return f"no control plane at {path}: its owner is gone; `dsv4ctl start` replaces the dead socket"
    if isinstance(error, PermissionError):
        return f"the socket {path} belongs to another user"
    return f"no control plane at {path}: {error.strerror or error}"
