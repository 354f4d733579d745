"""A real deployment in a test: `dsv4ctl start` as a process, gateway and admin socket, and the oracle beside it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anyio
import anyio.lowlevel
import torch

from dsv4ctl.controlplane.admin.client import AdminClient, connect
from dsv4ctl.controlplane.admin.errors import AdminError
from dsv4ctl.controlplane.incident.evaluate import Traced
from dsv4ctl.controlplane.incident.traced import traced
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.oracle import Oracle

PREFILL, DECODE = "prefill0", "decode0"
PAGE = 256
#: Seconds for what takes a few on a busy machine with two cores: reaching it fails the test.
PATIENCE = 120.0
#: How many times longer than promised a machine may take that does other things too; what one takes that does not
#: is in benchmarks/.
SLOWER = 5.0
#: Seconds between two looks of `until`.
_LOOK = 0.02
#: In the environment of every process of one deployment, so that none is missed at its end.
_MARK = "DSV4CTL_TEST_DEPLOYMENT"
_MAIN = "from dsv4ctl.controlplane.cli.main import main; main()"
_FAULTS = Path(__file__).with_name("faults")
_ENDED = ("closed", "aborted")


class Fault:
    """What `Client.signal` does to an engine of `deployed(faults=True)` (`faults/sitecustomize.py`)."""

    NO_STEP = signal.SIGUSR1  #: it never computes again, and answers /health
    NO_ROUND = signal.SIGUSR2  #: it never enters another collective
    TRANSFER_DIES = signal.SIGRTMIN  #: its transfer thread ends with an error
    WRITES_FAIL = signal.SIGRTMIN + 1  #: nobody can say how its writes ended
    ACKS_REPEAT = signal.SIGRTMIN + 2  #: its acks come twice, and once more late
    SLOW = signal.SIGRTMIN + 3  #: its states last half a second and more, until it is struck again


class Reply(NamedTuple):
    """What a client got: `tokens` of a complete answer, else None and the error's text."""

    status: int
    tokens: list[int] | None
    error: str | None
    seconds: float
    room: int | None


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that depend on nothing but the arguments."""
    numbers = random.Random(seed)
    return [numbers.randrange(256) for _ in range(tokens)]


@cache
def _oracle(index_k_dtype: str) -> Oracle:
    torch.set_num_threads(1)
    return Oracle(Geometry(index_k_dtype="fp8" if index_k_dtype == "fp8" else "bf16"), 0)


@cache
def _expected(ids: tuple[int, ...], new: int, index_k_dtype: str) -> tuple[int, ...]:
    with torch.inference_mode():
        return tuple(_oracle(index_k_dtype).generate(ids, new).tokens)


def expected(ids: list[int], new: int, index_k_dtype: str = "bf16") -> list[int]:
    """The oracle's tokens; each question is computed once."""
    return list(_expected(tuple(ids), new, index_k_dtype))


class Deployment:
    """The process and its files. What is asked of it goes through `client`."""

    def __init__(self, folder: Path, mark: str, environment: dict[str, str]) -> None:
        self.folder = folder
        self.socket = folder / "s"
        self.file = folder / "cluster.toml"
        self._mark = mark
        self._environment = environment
        self._starts = 0

    def start(self) -> None:
        """Starts a control plane with `file`, again too, and waits until every engine is ready. Raises RuntimeError."""
        self._starts += 1
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, "start", str(self.file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + PATIENCE
        while len(self.events("start.ready")) < self._starts:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"`dsv4ctl start` is not ready: {self.log.read_text()[-2000:]}")
            time.sleep(_LOOK)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def events(self, *names: str) -> list[dict[str, Any]]:
        """The log's events of these names, oldest first. Its last line may be half written."""
        lines = self.log.read_bytes().rpartition(b"\n")[0].splitlines()
        records = [json.loads(line) for line in lines if line.startswith(b"{")]
        return [record for record in records if record["event"] in names]

    def complaints(self) -> str:
        """The log's latest warnings and errors, for whoever reads why a test failed."""
        lines = self.log.read_text().splitlines()
        return "\n".join(
            [line[:600] for line in lines if '"level":"debug"' not in line and '"level":"info"' not in line][-25:]
        )

    def pids(self) -> list[int]:
        """Every living process of this deployment."""
        return [pid for pid in _all_pids() if f"{_MARK}={self._mark}".encode() in _environment(pid)]

    def stop(self) -> None:
        """No process is left, whatever state they are in; what was stopped with SIGSTOP too."""
        deadline = time.monotonic() + PATIENCE
        while pids := self.pids():
            for pid in pids:
                _signal(pid, signal.SIGKILL)
            self.process.poll()
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {pids} survive SIGKILL")
            time.sleep(_LOOK)
        self.process.wait(PATIENCE)
        shutil.rmtree(self.folder)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with connect(self.socket) as admin, aiohttp.ClientSession() as http:
            client = Client(self, admin, http)
            client.gateway = (await client.status())["gateway"]
            yield client


class Client:
    """The deployment as a client and an operator see it, in the test's loop."""

    def __init__(self, deployment: Deployment, admin: AdminClient, http: aiohttp.ClientSession) -> None:
        self.deployment = deployment
        self.http = http
        self.gateway = ""
        self._admin = admin

    # ---- the operator -----------------------------------------------------------------------------

    async def ask(self, method: str, path: str, **arguments: Any) -> Any:
        return json.loads(await self._admin.call(method, path, arguments, PATIENCE))

    async def status(self) -> dict[str, Any]:
        return dict(await self.ask("GET", "/status"))

    async def rooms(self) -> list[dict[str, Any]]:
        """Rooms in flight."""
        return list(await self.ask("GET", "/rooms"))

    async def room(self, number: int) -> dict[str, Any]:
        """One room with its history, ended ones too."""
        return dict((await self.ask("GET", f"/rooms/{number}"))[-1])

    async def engines(self) -> dict[str, dict[str, Any]]:
        return {engine["name"]: engine for engine in await self.ask("GET", "/engines")}

    async def abort(self, room: int | None = None) -> list[str]:
        asked = {"all": True} if room is None else {"room": room}
        return list((await self.ask("POST", "/abort", **asked))["aborted"])

    async def drain(self, engines: list[str], deadline_s: float | None) -> dict[str, Any]:
        return dict(await self.ask("POST", "/drain", engines=engines, deadline_s=deadline_s))

    async def live(self, engine: str) -> dict[str, Any]:
        """What the engine itself says at this moment: `pages` by state and space, `tickets`, `queues`, `counters`."""
        url = (await self.engines())[engine]["url"]
        async with self.http.get(f"{url}/server_info", timeout=aiohttp.ClientTimeout(20)) as answer:
            return dict(await answer.json())

    async def tell(self, engine: str, route: str, **body: Any) -> None:
        """A POST to the engine's own HTTP server."""
        url = (await self.engines())[engine]["url"]
        async with self.http.post(f"{url}/{route}", json=body, timeout=aiohttp.ClientTimeout(PATIENCE)) as answer:
            assert answer.status == 200, await answer.text()

    async def traced(self) -> Traced:
        """What the race detector says of everything that the ranks' rings hold."""
        return await traced(self._admin, 0)

    async def signal(self, engine: str, number: int, rank: int = 0) -> int:
        """Its pid. After SIGSTOP no thread of it runs any more."""
        pid = int((await self.engines())[engine]["pids"][rank])
        os.kill(pid, number)
        while number == signal.SIGSTOP and not _stopped(pid):
            await anyio.lowlevel.checkpoint()
        return pid

    # ---- the client -------------------------------------------------------------------------------

    async def generate(self, ids: list[int], new: int, rid: str | None = None, stream: bool = False) -> Reply:
        """Never raises for what the server does: an error is a reply. TimeoutError: a hang, which fails the test."""
        body = body_of(ids, new, rid, stream)
        began = time.monotonic()
        status, room = 0, None
        try:
            async with self.http.post(
                f"{self.gateway}/generate", json=body, timeout=aiohttp.ClientTimeout(PATIENCE)
            ) as answer:
                status, room = answer.status, _number(answer.headers.get("x-dsv4ctl-room"))
                tokens, error = _read(await answer.read(), stream and status == 200)
        except aiohttp.ClientError as lost:
            tokens, error = None, repr(lost)
        return Reply(status, tokens if status == 200 else None, error, time.monotonic() - began, room)

    @asynccontextmanager
    async def streaming(
        self, ids: list[int], new: int, rid: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A stream whose client leaves when the block ends."""
        async with self.http.post(f"{self.gateway}/generate", json=body_of(ids, new, rid, True)) as answer:
            try:
                yield answer
            finally:
                answer.close()

    async def burst(self, asked: list[tuple[list[int], int]]) -> list[Reply]:
        """All at once."""
        replies: list[Reply | None] = [None] * len(asked)

        async def one(at: int, ids: list[int], new: int) -> None:
            replies[at] = await self.generate(ids, new)

        async with anyio.create_task_group() as tasks:
            for at, (ids, new) in enumerate(asked):
                tasks.start_soon(one, at, ids, new)
        return [reply for reply in replies if reply is not None]

    # ---- conditions -------------------------------------------------------------------------------

    async def until(self, what: str, holds: Callable[[], Any], deadline: float = PATIENCE) -> Any:
        """The first true answer of `holds` (a coroutine function). TimeoutError names `what` and what was there."""
        last: Any = None
        try:
            with anyio.fail_after(deadline):
                while not (last := await holds()):  # noqa: ASYNC110 - asked as an operator would
                    await anyio.sleep(_LOOK)
        except TimeoutError:
            engines = {name: (e["state"], e["queues"], e["ledger"]) for name, e in (await self.engines()).items()}
            raise TimeoutError(f"not within {deadline:g} s: {what}; last {last!r}; {engines}") from None
        return last

    async def until_ready(self) -> None:
        """Every engine is, the restarted ones too."""

        async def ready() -> bool:
            return all(engine["state"] == "ready" for engine in (await self.engines()).values())

        await self.until("every engine is ready", ready)

    async def until_restarted(self, restarts: dict[str, int]) -> None:
        """Every engine has been started as often as this says, and is ready."""

        async def again() -> bool:
            return await self.restarts() == restarts

        await self.until(f"restarts are {restarts}", again)
        await self.until_ready()

    async def restarts(self) -> dict[str, int]:
        return {name: engine["restarts"] for name, engine in (await self.engines()).items()}

    async def until_ended(self, number: int) -> dict[str, Any]:
        """The room, once both sides have closed or aborted it."""

        async def ended() -> dict[str, Any] | None:
            room = await self.room(number)
            return room if room["state"] in _ENDED else None

        return dict(await self.until(f"room {number} has ended", ended))

    async def until_no_rooms(self, deadline: float = PATIENCE) -> None:
        async def none() -> bool:
            return not await self.rooms()

        await self.until("no room is in flight", none, deadline)

    async def until_at_rest(self, deadline: float = PATIENCE) -> None:
        """No room, request, ticket, lease, retiring or quarantined page: only the cache's pages are owned."""

        async def at_rest() -> bool:
            return not await self.rooms() and not any(_held(e) for e in (await self.engines()).values())

        await self.until("nothing is held any more", at_rest, deadline)

    async def _flushed(self) -> bool:
        """False while a request leaves whose room has ended: reports, by which all is at rest, are up to 0.25 s old."""
        try:
            await self.ask("POST", "/flush")
        except AdminError as error:
            if "needs an idle engine" not in str(error):
                raise
            return False
        return True

    async def check_no_page_lost(self) -> None:
        """At rest and flushed, every page of every space is free; nothing was read without a right."""
        await self.until_at_rest()
        await self.until("every engine lets its cache be flushed", self._flushed)
        for name in await self.engines():

            async def empty(name: str = name) -> bool:
                live = await self.live(name)
                pages, total = live["pages"], sum(live["pages"]["free"].values())
                lost = sum(sum(pages[state].values()) for state in ("owned", "leased", "retiring", "quarantined"))
                return not lost and total > 0 and not any(live["tickets"][k] for k in ("tickets", "loads"))

            await self.until(f"every page of {name} is free", empty)
            assert (await self.live(name))["tickets"]["violations"] == 0


@contextmanager
def deployed(config: str = "", *, prefill: str = "", decode: str = "", faults: bool = False) -> Iterator[Deployment]:
    """A ready deployment of a prefill and a decode engine; every process is gone afterwards.

    `config` are tables of the file (`[deadlines]`, ...), `prefill` and `decode` lines of the engines' tables;
    with `faults` signals do to engines what `Fault` says.
    """
    folder = Path(tempfile.mkdtemp(prefix="dsv4ctl-"))
    file = folder / "cluster.toml"
    file.write_text(
        f'socket = "{folder / "s"}"\n[gateway]\nport = 0\n[log]\nlevel = "debug"\nformat = "json"\n{config}\n'
        f'[[engines]]\nname = "{PREFILL}"\nrole = "prefill"\n{prefill}\n'
        f'[[engines]]\nname = "{DECODE}"\nrole = "decode"\nhicache = {{ enabled = false }}\n{decode}\n'
    )
    mark = uuid.uuid4().hex
    path = [str(_FAULTS)] if faults else []
    path += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, _MARK: mark, "PYTHONPATH": os.pathsep.join(path)}
    deployment = Deployment(folder, mark, environment)
    try:
        deployment.start()
        yield deployment
    except BaseException as error:
        error.add_note(deployment.complaints())
        raise
    finally:
        deployment.stop()


def body_of(ids: list[int], new: int, rid: str | None = None, stream: bool = False) -> dict[str, Any]:
    body: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": new, "ignore_eos": True},
        "stream": stream,
    }
    return body if rid is None else {**body, "rid": rid}


def _read(raw: bytes, stream: bool) -> tuple[list[int] | None, str | None]:
    """Tokens and None, or None and the error. A stream that does not end with [DONE] has failed."""
    lines = [line for line in raw.splitlines() if line.startswith(b"data: ")] if stream else [raw]
    events = [line.removeprefix(b"data: ") for line in lines]
    done = not stream or bool(events and events[-1] == b"[DONE]")
    bodies = [json.loads(event) for event in events if event != b"[DONE]"]
    if done and bodies and "output_ids" in bodies[-1]:
        return list(bodies[-1]["output_ids"]), None
    return None, str(bodies[-1] if bodies else raw)


def _held(engine: dict[str, Any]) -> int:
    pages = ("pages_leased", "pages_retiring", "pages_quarantined")
    return sum(engine["queues"].values()) + sum(
        ledger["tickets"] + ledger["loads"] + sum(sum(ledger[kind].values()) for kind in pages)
        for ledger in engine["ledger"].values()
    )


def _number(key: str | None) -> int | None:
    return None if key is None else int(key.partition(".")[0])


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    """Empty for a process that is gone, or a zombie."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _stopped(pid: int) -> bool:
    try:
        tasks = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # a thread that was about to end
        return False
    return all(task.rpartition(")")[2].split()[0] == "T" for task in tasks)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
