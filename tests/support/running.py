"""A whole control plane in a test's loop: `dsv4ctl start` with fake engines, in this process or as children."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
from anyio.abc import TaskGroup

import fake_engine
from dsv4ctl.controlplane.admin.plane import Plane
from dsv4ctl.controlplane.config.schema import Config, DeadlinesConfig, EngineConfig, GatewayConfig
from dsv4ctl.controlplane.scheduler.fleet import Engine, Rank
from dsv4ctl.controlplane.supervisor.process import RankProcess, start
from dsv4ctl.controlplane.supervisor.run import run
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import Level, Telemetry
from fake_engine import FakeRank

#: Seconds for a thing that takes milliseconds, on a machine that does other things too.
PATIENCE = 60.0
#: Exit code of a killed process.
KILLED = -9


class Recorder(Telemetry):
    """Telemetry that a test can look at."""

    def __init__(self) -> None:
        super().__init__(level="debug")
        self.records: list[dict[str, Any]] = []

    def emit(self, event: Event, level: Level = "info", **fields: Any) -> None:
        super().emit(event, level, **fields)
        self.records.append({"event": event, "level": level, **fields})

    def of(self, event: Event) -> list[dict[str, Any]]:
        return [record for record in self.records if record["event"] is event]


class FakeProcess:
    """A `RankProcess` that is a task of this loop."""

    def __init__(self, rank: FakeRank, tasks: TaskGroup) -> None:
        self.argv = ("fake",)
        self.pid = 1
        self.relayed = anyio.Event()
        self.relayed.set()
        self._rank = rank
        self._scope = anyio.CancelScope()
        self._over = anyio.Event()
        self._code = 0
        self.reapable = anyio.Event()  #: a kill takes this long; set unless a test replaces it
        self.reapable.set()
        tasks.start_soon(self._run)

    async def _run(self) -> None:
        with self._scope:
            try:
                await self._rank.run()
            except RuntimeError:
                self._code = 1
        self._over.set()

    async def serving(self) -> None:
        return

    async def reaped(self) -> int:
        await self._over.wait()
        await self.reapable.wait()
        return self._code

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        if not self._over.is_set():
            self._code = KILLED
            self._scope.cancel()

    async def relay(self, line: Callable[[str, str], None]) -> None:
        return

    async def close(self) -> None:
        return


class Stage:
    """The running control plane and its engines."""

    def __init__(self, tasks: TaskGroup, telemetry: Recorder, url: str, plane: Plane) -> None:
        self.tasks = tasks
        self.telemetry = telemetry
        self.url = url
        self.plane = plane
        self.ranks: dict[str, FakeRank] = {}
        self.processes: dict[str, FakeProcess] = {}
        self.code: int | None = None
        self.over = anyio.Event()

    def plane_rooms(self) -> list[str]:
        """Keys of the rooms in flight."""
        opened = {str(record["room"]) for record in self.telemetry.of(Event.ROOM_OPENED)}
        over = (Event.ROOM_CLOSED, Event.ROOM_ABORTED, Event.ROOM_RETRACTED)
        ended = [record for event in over for record in self.telemetry.of(event)]
        return sorted(opened - {str(record["room"]) for record in ended})

    def log(self, engine: str, what: str) -> list[str]:
        return [of for kind, of in self.ranks[engine].log if kind == what]


class InProcess:
    """Launches engines as tasks. `change` may alter a rank before it runs."""

    def __init__(self, tasks: TaskGroup, change: Callable[[FakeRank], None]) -> None:
        self._tasks = tasks
        self._change = change
        self.ranks: dict[str, FakeRank] = {}
        self.processes: dict[str, FakeProcess] = {}
        self.link = ""

    def processes_of(self, engine: Engine) -> int:
        return engine.config.ranks

    async def survivors(self, refused: Any) -> dict[str, list[str]]:
        return {}

    async def __call__(self, engine: Engine, ranks: Sequence[Rank]) -> FakeProcess:
        (rank,) = ranks
        request = {"engine": msgspec.to_builtins(engine.config), "rank": rank.number,
                   "incarnation": rank.incarnation, "link": self.link}  # fmt: skip
        fake = fake_engine.from_request(request)
        self._change(fake)
        self.ranks[engine.name] = fake
        self.processes[engine.name] = FakeProcess(fake, self._tasks)
        return self.processes[engine.name]


class Children:
    """Launches engines as real processes."""

    def __init__(self, link: str) -> None:
        self._link = link

    def processes_of(self, engine: Engine) -> int:
        return engine.config.ranks

    async def survivors(self, refused: Any) -> dict[str, list[str]]:
        return {}

    async def __call__(self, engine: Engine, ranks: Sequence[Rank]) -> RankProcess:
        (rank,) = ranks
        request = {"engine": msgspec.to_builtins(engine.config), "rank": rank.number,
                   "incarnation": rank.incarnation, "link": self._link}  # fmt: skip
        script = str(Path(fake_engine.__file__))
        return await start((sys.executable, script), {"DSV4CTL_ENGINE": json.dumps(request)})


def pair_config(folder: Path, **changes: Any) -> Config:
    """One prefill and one decode engine, every port free; no engine is ended because this machine is slow."""
    engines = [EngineConfig(name="prefill0", role="prefill"), EngineConfig(name="decode0", role="decode")]
    defaults: dict[str, Any] = {
        "socket": str(folder / "admin.sock"),
        "engines": engines,
        "gateway": GatewayConfig(port=0),
        "deadlines": DeadlinesConfig(ack=PATIENCE, fence=PATIENCE),
    }
    return Config(**{**defaults, **changes})


def _unchanged(rank: FakeRank) -> None:
    return


@asynccontextmanager
async def stage(config: Config, change: Callable[[FakeRank], None] = _unchanged) -> AsyncIterator[Stage]:
    """The control plane with in-process engines, ready; stopped at the end whatever happens."""
    async with anyio.create_task_group() as tasks:
        launcher = InProcess(tasks, change)

        def launch(_: Config, link: str) -> InProcess:
            launcher.link = link
            return launcher

        async with staged(config, launch) as running:
            running.ranks, running.processes = launcher.ranks, launcher.processes
            yield running
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def staged(config: Config, launch: Callable[[Config, str], Any]) -> AsyncIterator[Stage]:
    """The control plane with whatever `launch` starts."""
    telemetry = Recorder()
    planes: list[Plane] = []
    is_ready = anyio.Event()

    def ready(plane: Plane) -> None:
        planes.append(plane)
        is_ready.set()

    async with anyio.create_task_group() as tasks:
        running: Stage | None = None

        async def serve() -> None:
            code = await run(config, telemetry=telemetry, ready=ready, launcher=launch)
            is_ready.set()
            if running is not None:
                running.code = code
                running.over.set()

        tasks.start_soon(serve)
        with anyio.fail_after(PATIENCE):
            await is_ready.wait()
        if not planes:
            raise AssertionError(f"the start was given up: {telemetry.of(Event.START_FAILED)}")
        status = await planes[0].status()
        running = Stage(tasks, telemetry, status["gateway"], planes[0])
        try:
            yield running
        finally:
            tasks.cancel_scope.cancel()


async def until(condition: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Waits for what another task is about to do. Raises TimeoutError."""
    with anyio.fail_after(patience):
        while not condition():  # noqa: ASYNC110 - what is waited for knows nothing of this test
            await anyio.sleep(0.005)


async def post(running: Stage, path: str, body: dict[str, Any], **options: Any) -> tuple[int, Any, Any]:
    """Status, headers and decoded body (text where it is no JSON)."""
    url = running.url + path
    async with aiohttp.ClientSession() as client, client.post(url, json=body, **options) as answer:
        raw = await answer.read()
        try:
            return answer.status, answer.headers, json.loads(raw)
        except ValueError:
            return answer.status, answer.headers, raw.decode()


def ask(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A /generate body. `prefill` and `decode` say what those legs do."""
    fake = {role: fields.pop(role) for role in ("prefill", "decode") if role in fields}
    return {"text": text, "sampling_params": {"max_new_tokens": 8}, "fake": fake, **fields}


@asynccontextmanager
async def streaming(running: Stage, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer to /generate while it comes; leaving the block is a client that leaves."""
    url = running.url + "/generate"
    async with aiohttp.ClientSession() as client, client.post(url, json={**body, "stream": True}) as answer:
        yield answer


async def events_of(answer: aiohttp.ClientResponse) -> list[str]:
    """The data of every event that is left."""
    return [line[6:].decode().strip() async for line in answer.content if line.startswith(b"data: ")]
