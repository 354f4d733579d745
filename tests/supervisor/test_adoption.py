"""Until it is known which engines survived the control plane before: whatever ends or changes this one loses none."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio.abc import ByteStream, Listener

from dsv4ctl.controlplane.admin.client import connect
from dsv4ctl.controlplane.admin.errors import AdminError
from dsv4ctl.controlplane.config.schema import Config, DeadlinesConfig, EngineConfig, PoliciesConfig
from dsv4ctl.controlplane.link.server import listen
from dsv4ctl.controlplane.scheduler.fleet import Fleet, Rank
from dsv4ctl.controlplane.supervisor import survival
from dsv4ctl.controlplane.supervisor.launch import AdapterLauncher
from dsv4ctl.controlplane.supervisor.run import run
from dsv4ctl.controlplane.supervisor.runner import Launcher, Running
from dsv4ctl.controlplane.supervisor.supervisor import Supervisor
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.engine_adapters.protocol import AdapterError, LaunchRequest, LaunchSpec
from dsv4ctl.engine_adapters.reference import launch
from dsv4ctl.policies import restart
from running import PATIENCE, Recorder, pair_config, until

pytestmark = pytest.mark.asyncio

#: `mortal` does not survive; a process of it that is still ending is waited for before anything is adopted.
ENGINES = [
    EngineConfig(name="prefill0", role="prefill", ranks=2, survive=True),
    EngineConfig(name="decode0", role="decode", survive=True),
    EngineConfig(name="mortal", role="prefill"),
]
SURVIVE = {"prefill0/0", "prefill0/1", "decode0/0"}


def _alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # reaped before it was opened, or read
        return False


def _sleeps(request: LaunchRequest) -> LaunchSpec:
    """An engine that says nothing, until it is told to end."""
    return LaunchSpec(("sleep", "600"), {})


@pytest.fixture(autouse=True)
def _engines_that_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "launch", _sleeps)
    monkeypatch.setitem(restart.POLICIES, "soon", lambda: restart.Backoff(initial=0.01))
    monkeypatch.setitem(restart.POLICIES, "never", lambda: restart.Backoff(initial=0.01, tries=0))


@pytest.fixture
def config() -> Iterator[Config]:
    with tempfile.TemporaryDirectory() as folder:  # a short path, for the sockets in it
        deadlines = DeadlinesConfig(ready=600.0, drain=600.0)
        policies = PoliciesConfig(restart="soon")
        yield pair_config(Path(folder), engines=ENGINES, deadlines=deadlines, policies=policies)


class Earlier:
    """A control plane that started `ENGINES` and is gone: its processes by engine and rank."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path(f"{config.socket}.engines")
        self.processes: dict[str, Running] = {}

    async def start(self, names: tuple[str, ...]) -> None:
        self.folder.mkdir()
        launcher = AdapterLauncher(self.config, str(self.folder / "link.sock"))
        for engine in Fleet(self.config.engines):
            ranks = [Rank(engine.name, number, f"{engine.name}/{number}".replace("/", "-")) for number in (0, 1)]
            engine.ranks = {rank.incarnation: rank for rank in ranks[: engine.config.ranks]}
            for rank in engine.ranks.values() if engine.name in names else ():
                self.processes[f"{engine.name}/{rank.number}"] = await launcher(engine, [rank])

    async def mortal_ends(self) -> None:
        process = self.processes["mortal/0"]
        process.kill()
        await process.reaped()

    def living(self) -> set[str]:
        return {name for name, process in self.processes.items() if _alive(process.pid)}


@asynccontextmanager
async def earlier(config: Config, *names: str) -> AsyncIterator[Earlier]:
    """With the engines `names`; by default all, and `mortal` takes its time to end."""
    left = Earlier(config)
    with anyio.fail_after(PATIENCE):
        try:
            await left.start(names or ("prefill0", "decode0", "mortal"))
            yield left
        finally:
            for process in left.processes.values():
                process.kill()
                await process.reaped()
                await process.close()


class Plane:
    """The next control plane."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.telemetry = Recorder()
        self.over = anyio.Event()
        self.code: int | None = None

    async def run(self, launcher: Callable[[Config, str], Launcher]) -> None:
        self.code = await run(self.config, telemetry=self.telemetry, ready=_never, launcher=launcher)
        self.over.set()

    async def ask(self, method: str, path: str, **arguments: Any) -> Any:
        assert self.config.socket is not None
        async with connect(Path(self.config.socket)) as client:
            return msgspec.json.decode(await client.call(method, path, arguments, None))

    async def states(self) -> dict[str, str]:
        return dict((await self.ask("GET", "/status"))["engines"])

    async def seen(self, event: Event, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """The records of an event with these fields, once there are so many."""

        def found() -> list[dict[str, Any]]:
            return [one for one in self.telemetry.of(event) if fields.items() <= one.items()]

        await until(lambda: len(found()) >= count)
        return found()

    async def adopted(self) -> dict[str, int]:
        records = await self.seen(Event.ENGINE_ADOPTED, len(SURVIVE))
        return {f"{record['engine']}/{record['rank']}": record["pid"] for record in records}

    async def drained(self) -> None:
        """Nobody that it ever had is left, and no word of them."""
        os.kill(os.getpid(), signal.SIGTERM)
        await self.over.wait()
        assert self.code == 0
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        had = self.telemetry.of(Event.ENGINE_STARTED) + self.telemetry.of(Event.ENGINE_ADOPTED)
        assert not any(_alive(record["pid"]) for record in had)
        assert not Path(f"{self.config.socket}.engines").exists()


def _never(plane: Any) -> None:
    raise AssertionError("these engines are never ready")


@asynccontextmanager
async def following(
    config: Config, launcher: Callable[[Config, str], Launcher] = AdapterLauncher
) -> AsyncIterator[Plane]:
    """The next control plane, once signals are its own, or it has ended."""
    plane, before = Plane(config), signal.getsignal(signal.SIGTERM)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(plane.run, launcher)
        await until(lambda: signal.getsignal(signal.SIGTERM) is not before or plane.over.is_set())
        yield plane
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def settling(config: Config) -> AsyncIterator[Plane]:
    """The next control plane while it waits for `mortal` to end."""
    async with following(config) as plane:
        await plane.seen(Event.ENGINE_NOT_ADOPTED)
        yield plane


@pytest.mark.parametrize("by", ["SIGTERM", "SIGINT", "drain"])
async def test_what_is_told_to_end_first_learns_what_it_has_to_end(config: Config, by: str) -> None:
    async with earlier(config) as left, settling(config) as plane, anyio.create_task_group() as asking:
        if by == "drain":
            asking.start_soon(plane.ask, "POST", "/drain")
        else:
            os.kill(os.getpid(), signal.Signals[by])
        await plane.seen(Event.DRAIN_BEGIN)
        assert set((await plane.states()).values()) == {"draining"}
        assert left.living() == {*SURVIVE, "mortal/0"}
        await left.mortal_ends()
        await plane.over.wait()
        assert plane.code == 0
        assert await plane.adopted() == {name: left.processes[name].pid for name in SURVIVE}
        assert left.living() == set()
        assert [record["engine"] for record in plane.telemetry.of(Event.ENGINE_STARTED)] == []
        plane.assert_nothing_left()


async def test_one_engine_is_drained_and_the_others_are_adopted(config: Config) -> None:
    async with earlier(config) as left, settling(config) as plane:
        answers: list[Any] = []

        async def drain() -> None:
            answers.append(await plane.ask("POST", "/drain", engines=["prefill0"]))

        async with anyio.create_task_group() as asking:
            asking.start_soon(drain)
            await plane.seen(Event.DRAIN_BEGIN)
            await left.mortal_ends()
        assert answers == [{"drained": ["prefill0"], "left": []}]
        await plane.adopted()
        assert left.living() == {"decode0/0"}
        assert (await plane.states())["prefill0"] == "drained"
        assert await plane.ask("POST", "/resume", engines=["prefill0"]) == {"resumed": ["prefill0"]}
        await plane.seen(Event.ENGINE_STARTED, 2, engine="prefill0")
        await plane.drained()
        assert left.living() == set()


async def test_what_is_resumed_before_it_is_adopted_lives(config: Config) -> None:
    """The drain had stopped it already: the next life follows that of the survivors."""
    async with earlier(config) as left, settling(config) as plane, anyio.create_task_group() as asking:
        asking.start_soon(lambda: plane.ask("POST", "/drain", engines=["prefill0"]))
        await plane.seen(Event.DRAIN_BEGIN)
        assert await plane.ask("POST", "/resume") == {"resumed": ["prefill0"]}
        await left.mortal_ends()
        await plane.seen(Event.ENGINE_STARTED, 2, engine="prefill0")
        assert left.living() == {"decode0/0"}
        assert (await plane.states())["prefill0"] == "starting"
        await plane.drained()


async def test_a_second_signal_leaves_them_to_the_next_start(config: Config) -> None:
    async with earlier(config) as left:
        async with settling(config) as plane:
            os.kill(os.getpid(), signal.SIGTERM)
            await plane.seen(Event.DRAIN_BEGIN)
            os.kill(os.getpid(), signal.SIGINT)
            await plane.over.wait()
            assert plane.code == 1
            assert left.living() == {*SURVIVE, "mortal/0"}
        await left.mortal_ends()
        async with following(config) as plane:
            assert await plane.adopted() == {name: left.processes[name].pid for name in SURVIVE}
            await plane.drained()
        assert left.living() == set()


async def test_caches_are_not_called_flushed_while_nobody_knows_who_has_one(config: Config) -> None:
    async with earlier(config) as left, settling(config) as plane:
        with pytest.raises(AdminError, match="prefill0: it is not known yet whether it survived") as refused:
            await plane.ask("POST", "/flush")
        assert refused.value.code == "refused"
        await left.mortal_ends()
        await plane.drained()


async def test_what_dies_before_it_is_adopted_is_fenced_and_no_incarnation_comes_back(config: Config) -> None:
    async with earlier(config, "prefill0", "decode0") as left:

        class Late(AdapterLauncher):
            async def survivors(self, refused: Any) -> dict[str, list[str]]:
                found = await super().survivors(refused)
                left.processes["prefill0/0"].kill()
                await until(lambda: "prefill0/0" not in left.living())
                return found

        async with following(config, Late) as plane:
            await plane.adopted()
            started = await plane.seen(Event.ENGINE_STARTED, 2, engine="prefill0")
            assert left.living() == {"decode0/0"}
            assert not {record["incarnation"] for record in started} & {"prefill0-0", "prefill0-1"}
            fenced = plane.telemetry.of(Event.ENGINE_FENCED)
            assert {record["incarnation"] for record in fenced} == {"prefill0-0", "prefill0-1"}
            await plane.drained()


async def test_a_start_that_is_given_up_ends_what_it_adopted(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lives is adopted even if nothing new can be started."""

    def refuses(ranks: int) -> int:
        raise AdapterError("no such device")

    monkeypatch.setattr(launch, "processes", refuses)
    config = msgspec.structs.replace(config, policies=PoliciesConfig(restart="never"))
    async with earlier(config, "prefill0", "decode0") as left, following(config) as plane:
        await plane.over.wait()
        assert plane.code == 1
        assert "no such device" in plane.telemetry.of(Event.START_FAILED)[0]["reason"]
        assert set(await plane.adopted()) == SURVIVE
        assert left.living() == set()
        plane.assert_nothing_left()


async def test_whoever_survived_is_expected_before_anybody_can_connect(config: Config) -> None:
    async with earlier(config, "prefill0", "decode0") as left, anyio.create_task_group() as tasks:
        link = str(left.folder / "link.sock")
        expected: list[set[str]] = []

        async def listening(path: str) -> Listener[ByteStream]:
            expected.append(set(supervisor.expected()))
            return await listen(path)

        supervisor = Supervisor(config, Recorder(), link, AdapterLauncher(config, link), listening)
        await supervisor.start(tasks)
        assert expected == [{"prefill0-0", "prefill0-1", "decode0-0"}]
        tasks.cancel_scope.cancel()


async def test_an_engine_begins_once_it_is_written_down(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, nobody would find it again."""
    folder = f"{config.socket}.engines"
    os.mkdir(folder)
    engine, order = Fleet(config.engines).engines["prefill0"], list[str]()
    engine.ranks = {"i": Rank("prefill0", 0, "i")}
    for owner, name in ((survival.Survivors, "note"), (survival.SurvivingProcess, "go")):
        monkeypatch.setattr(owner, name, lambda *_, name=name: order.append(name))
    process = await AdapterLauncher(config, f"{folder}/link.sock")(engine, list(engine.ranks.values()))
    assert order == ["note", "go"]
    process.kill()
    with anyio.fail_after(PATIENCE):
        await process.reaped()
    await process.close()


@pytest.mark.parametrize("name", ["prefill0", "mortal"])
async def test_a_process_that_cannot_be_written_down_is_ended(
    config: Config, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would find it again."""
    folder = Path(f"{config.socket}.engines")
    (folder / "engines.json.new").mkdir(parents=True)
    launcher = AdapterLauncher(config, str(folder / "link.sock"))
    engine = Fleet(config.engines).engines[name]
    engine.ranks = {"i": Rank(name, 0, "i")}
    noted: list[int] = []
    note = survival.Survivors.note

    def noting(survivors: survival.Survivors, engine: str, rank: int, incarnation: str, pid: int, told: Any) -> None:
        noted.append(pid)
        note(survivors, engine, rank, incarnation, pid, told)

    monkeypatch.setattr(survival.Survivors, "note", noting)
    with anyio.fail_after(PATIENCE):
        with pytest.raises(IsADirectoryError):
            await launcher(engine, list(engine.ranks.values()))
        before = os.listdir("/proc/self/fd")
        with pytest.raises(IsADirectoryError):
            await launcher(engine, list(engine.ranks.values()))
        await until(lambda: len(os.listdir("/proc/self/fd")) <= len(before))  # a loop closes its pipes when it may
    assert len(noted) == 2
    assert not any(map(_alive, noted))
    assert os.listdir(folder) == ["engines.json.new"]


async def test_a_process_that_no_descriptor_is_left_for_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def none_left(pid: int) -> int:
        opened.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(survival.os, "pidfd_open", none_left)
    with anyio.fail_after(PATIENCE), pytest.raises(OSError, match="Too many open files"):
        await survival.Survivors(tmp_path).start("i", ("sleep", "600"), {})
    (pid,) = opened
    assert not _alive(pid)
    assert os.listdir(tmp_path) == []
