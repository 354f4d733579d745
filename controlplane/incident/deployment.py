"""A deployment under experiment: `dsv4ctl start` as a process, seen through its gateway and its admin socket."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec

from dsv4ctl.controlplane.admin.client import AdminClient, NoControlPlaneError, connect
from dsv4ctl.controlplane.admin.errors import AdminError
from dsv4ctl.controlplane.incident.configuration import toml
from dsv4ctl.controlplane.incident.evaluate import Traced
from dsv4ctl.controlplane.incident.process import ended, ours
from dsv4ctl.controlplane.incident.rows import Deployment
from dsv4ctl.controlplane.incident.traced import traced

_START = "from dsv4ctl.controlplane.cli.main import main; main()"
#: Seconds: until every engine serves; for rooms to end once no request runs; between two looks.
READY_DEADLINE, IDLE_DEADLINE, LOOK = 90.0, 45.0, 0.05
#: Log lines shown when a start fails.
_SHOWN_LINES = 12
#: What the counters are called that count violated edges, and layers of loads whose bytes were not the sealed ones.
VIOLATION, LOAD_DIFFERS = "violation: ", "load differs: "
#: The counter of rooms that gave their pages to older ones.
RETRACTIONS = "retractions"
#: The gateway's answers when an engine ended, or none is there.
_ENGINE_GONE = (502, 503)
_JSON = {"content-type": "application/json"}


class DeploymentError(RuntimeError):
    """The deployment did not start, or does not do what it is asked; the message says what it logged."""


class RequestFailedError(RuntimeError):
    """The gateway answered with an error. `engine_gone`: the engine ended under the request, or none is there."""

    def __init__(self, message: str, room: str | None, engine_gone: bool = False) -> None:
        super().__init__(message)
        self.room = room
        self.engine_gone = engine_gone


class Running:
    """`gateway` is its URL. Everything raises NoControlPlaneError or TimeoutError if it is gone."""

    def __init__(self, admin: AdminClient, http: aiohttp.ClientSession, gateway: str) -> None:
        self._admin = admin
        self._http = http
        self._gateway = gateway

    async def generate(self, prompt: Sequence[int], new_tokens: int, request_id: str) -> tuple[list[int], str | None]:
        """The answer's tokens, and its room. Raises RequestFailedError. A cancelled call aborts the room."""
        sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0}
        body = msgspec.json.encode({"input_ids": prompt, "sampling_params": sampling})
        headers = _JSON | {"x-request-id": request_id}
        try:
            async with self._http.post(f"{self._gateway}/generate", data=body, headers=headers) as response:
                raw, room = await response.read(), response.headers.get("x-dsv4ctl-room")
        except aiohttp.ClientError as error:
            raise RequestFailedError(repr(error), None) from error
        if response.status != 200:
            message = f"{response.status}: {raw[:300].decode('utf-8', 'replace')}"
            raise RequestFailedError(message, room, response.status in _ENGINE_GONE)
        return msgspec.json.decode(raw)["output_ids"], room

    async def rooms(self) -> list[dict[str, Any]]:
        """Rooms in flight."""
        found: list[dict[str, Any]] = await self._get("/rooms", {})
        return found

    async def room(self, key: str) -> dict[str, Any] | None:
        """One room, ended ones included; None if it is not remembered."""
        number = int(key.partition(".")[0])
        try:
            found = await self._get("/rooms", {"room": number})
        except AdminError as error:
            if error.code != "not_found":
                raise
            return None
        return next((room for room in found if room["key"] == key), None)

    async def idle(self) -> list[str]:
        """Waits until no room is in flight; the keys of those that are after IDLE_DEADLINE."""
        keys: list[str] = []
        with anyio.move_on_after(IDLE_DEADLINE):
            while True:
                keys = [room["key"] for room in await self.rooms()]
                if not keys:
                    break
                await anyio.sleep(LOOK)
        return keys

    async def ready(self) -> None:
        """Returns once every engine serves, restarted ones too."""
        with anyio.fail_after(READY_DEADLINE):
            await until(self._all_ready)

    async def _all_ready(self) -> bool:
        return all(engine["state"] == "ready" for engine in await self._get("/engines", {}))

    async def pid(self, role: str) -> int:
        """The first rank's process of the first engine of this role."""
        engines = await self._get("/engines", {})
        return int(next(engine["pid"] for engine in engines if engine["role"] == role))

    async def traced(self, since_ns: int) -> Traced:
        return await traced(self._admin, since_ns)

    async def set_guards(self, off: Sequence[str]) -> None:
        arguments = {"off": list(off)} if off else {"all_on": True}
        await self._admin.call("POST", "/guards", arguments)

    async def flush(self) -> None:
        """Drops every cached page, once the engines are idle. Raises DeploymentError."""
        refused = ""
        with anyio.move_on_after(IDLE_DEADLINE):
            while True:
                try:
                    await self._admin.call("POST", "/flush", {}, IDLE_DEADLINE)
                except AdminError as error:
                    refused = error.message
                    await anyio.sleep(LOOK)
                else:
                    return
        raise DeploymentError(f"the caches could not be flushed: {refused}")

    async def engine_infos(self) -> list[dict[str, Any]]:
        """/server_info of every engine that is up, read from the engine itself."""
        urls = [engine["url"] for engine in await self._get("/engines", {}) if engine["url"]]
        infos = []
        for url in urls:
            async with self._http.get(f"{url}/server_info") as response:
                infos.append(msgspec.json.decode(await response.read()))
        return infos

    async def _get(self, path: str, arguments: Mapping[str, Any]) -> Any:
        return msgspec.json.decode(await self._admin.call("GET", path, arguments))


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Looks until it does; the caller sets the deadline."""
    while True:
        if await holds():
            return
        await anyio.sleep(LOOK)


def counters(infos: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """The counters of all engines."""
    total: Counter[str] = Counter()
    for info in infos:
        total.update(info["counters"])
    return total


def since(before: Mapping[str, int], after: Mapping[str, int], prefix: str) -> dict[str, int]:
    """What the counters of this prefix counted between two looks, by the rest of their names."""
    found = {
        name.removeprefix(prefix): count - before.get(name, 0)
        for name, count in after.items()
        if name.startswith(prefix)
    }
    return {rest: count for rest, count in found.items() if count > 0}


@asynccontextmanager
async def deployed(deployment: Deployment, sessions: int, model_seed: int) -> AsyncIterator[Running]:
    """Starts it, waits until it serves, stops it at the end. Raises DeploymentError."""
    with tempfile.TemporaryDirectory(prefix="dsv4ctl-incident-") as folder:
        socket, file, log = (Path(folder) / name for name in ("admin.sock", "deployment.toml", "log"))
        file.write_text(toml(deployment, str(socket), sessions, model_seed))
        command = ours(["-c", _START, "start", str(file)])
        with log.open("wb") as output:
            process = await anyio.open_process(command, stdin=None, stdout=output, stderr=output)
        async with ended(process), connect(socket) as admin, _client() as http:

            async def serve() -> Running:
                while process.returncode is None:
                    try:
                        status = msgspec.json.decode(await admin.call("GET", "/status", {}))
                    except NoControlPlaneError:
                        status = {"state": "none"}
                    if status["state"] == "ready":
                        return Running(admin, http, status["gateway"])
                    await anyio.sleep(LOOK)
                raise DeploymentError(f"{deployment} did not start:\n{_last_lines(log)}")

            try:
                with anyio.fail_after(READY_DEADLINE):
                    running = await serve()
            except TimeoutError as error:
                message = f"{deployment} was not ready within {READY_DEADLINE:g} s:\n{_last_lines(log)}"
                raise DeploymentError(message) from error
            yield running


def _client() -> aiohttp.ClientSession:
    # Every caller sets its own limit.
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
