"""Engines as real processes: started, watched, killed, reaped, restarted, drained."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from dsv4ctl.controlplane.admin.errors import AdminError
from dsv4ctl.controlplane.admin.plane import Plane
from dsv4ctl.controlplane.config.schema import (
    Config,
    DeadlinesConfig,
    EngineConfig,
    LimitsConfig,
    PoliciesConfig,
    UnsafeConfig,
)
from dsv4ctl.controlplane.link.wire import Query, Role
from dsv4ctl.controlplane.scheduler.fleet import Engine, Rank
from dsv4ctl.controlplane.supervisor.lines import MAX_LINE_BYTES, LineCutter, fields_of
from dsv4ctl.controlplane.supervisor.loops import Loops
from dsv4ctl.controlplane.supervisor.process import RankProcess, start
from dsv4ctl.controlplane.supervisor.run import run
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.policies import restart
from fake_engine import GEOMETRY, FakeRank
from running import PATIENCE, Children, Recorder, Stage, ask, pair_config, post, stage, staged, until

pytestmark = pytest.mark.asyncio

_THREE = [EngineConfig(name="prefill0", role="prefill")]
_THREE += [EngineConfig(name=f"decode{number}", role="decode") for number in range(2)]


def _children(_: Config, link: str) -> Children:
    return Children(link)


def _pid(running: Stage, engine: str) -> int:
    pids = [record["pid"] for record in running.telemetry.of(Event.ENGINE_STARTED) if record["engine"] == engine]
    return int(pids[-1])


def _gone(pid: int) -> bool:
    """The process has ended and was reaped (or is nobody's zombie)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # reaped before it was opened, or read
        return True
    return state == "Z"


async def _state(running: Stage, engine: str) -> str:
    return str((await running.plane.status())["engines"][engine])


async def test_engines_start_in_order_serve_and_are_gone_after_a_drain(tmp_path: Path) -> None:
    async with staged(pair_config(tmp_path), _children) as running:
        started = [record["engine"] for record in running.telemetry.of(Event.ENGINE_STARTED)]
        assert started == ["prefill0", "decode0"]
        status, _, answer = await post(running, "/generate", ask())
        assert (status, answer["text"]) == (200, "0 1 2 ")
        pids = [_pid(running, engine) for engine in started]
        assert [os.getsid(pid) for pid in pids] == pids  # sessions of their own: a terminal's Ctrl-C is not theirs
        drained = await running.plane.drain([], None)
        assert sorted(drained["drained"]) == ["decode0", "prefill0"]
        await until(running.over.is_set)
        assert running.code == 0
        assert all(_gone(pid) for pid in pids)


@pytest.mark.parametrize("engine", ["prefill0", "decode0"])
async def test_a_killed_engine_costs_its_rooms_and_serves_again(tmp_path: Path, engine: str) -> None:
    """SIGKILL with a request in flight: an error with the reason, not a hang; then a new incarnation."""
    async with staged(pair_config(tmp_path), _children) as running:
        answers: list[tuple[int, Any]] = []

        async def request() -> None:
            body = ask(prefill={"silent": True}, decode={"silent": True})
            status, _, answer = await post(running, "/generate", body)
            answers.append((status, answer))

        killed = _pid(running, engine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request)
            await until(lambda: bool(running.telemetry.of(Event.ROOM_STATE) or running.telemetry.of(Event.ROOM_OPENED)))
            os.kill(killed, signal.SIGKILL)
        assert answers[0][0] == 502
        assert engine in answers[0][1]["error"]["message"]
        await until(lambda: len(running.telemetry.of(Event.ENGINE_READY)) == 3)
        await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTED)))
        exited = running.telemetry.of(Event.ENGINE_EXITED)[0]
        assert (exited["pid"], exited["signal"]) == (killed, "killed by SIGKILL")
        incarnations = {record["incarnation"] for record in running.telemetry.of(Event.ENGINE_STARTED)}
        assert len(incarnations) == 3
        status, _, _ = await post(running, "/generate", ask())
        assert status == 200
        (entry,) = [entry for entry in await running.plane.engines() if entry["name"] == engine]
        assert (entry["state"], entry["restarts"]) == ("ready", 1)


async def test_clients_of_a_dead_engine_do_not_wait_until_it_is_reaped(tmp_path: Path) -> None:
    """The answer comes at once; the room ends, and its pages may be reused, only after the reaping."""

    def mute(rank: FakeRank) -> None:
        # No leg has begun: nothing but the supervisor can tell this client.
        rank.allocates = rank.role is Role.PREFILL

    config = pair_config(tmp_path, deadlines=DeadlinesConfig(allocated=600.0, ack=600.0))
    async with stage(config, mute) as running:
        answers: list[int] = []

        async def request() -> None:
            answers.append((await post(running, "/generate", ask()))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request)
            await until(lambda: all(rank.rooms for rank in running.ranks.values()))
            dying = running.processes["decode0"]
            dying.reapable = anyio.Event()
            dying.kill()
            try:
                await until(lambda: bool(answers) and bool(running.telemetry.of(Event.ABORT_ACKED)))
                assert answers == [502]
                assert running.telemetry.of(Event.ROOM_ABORTED) == []
                assert running.log("prefill0", "fenced") == []
            finally:
                dying.reapable.set()
        await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTED)))


async def test_a_stopped_engine_is_found_killed_and_reaped(tmp_path: Path) -> None:
    """SIGSTOP: it holds its sockets and says nothing. The watchdog finds it, SIGKILL works on it."""
    config = pair_config(tmp_path, deadlines=DeadlinesConfig(wedge=3.0, ack=PATIENCE, fence=PATIENCE))
    async with staged(config, _children) as running:
        stopped = _pid(running, "decode0")
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: bool(running.telemetry.of(Event.ENGINE_WEDGED)))
        assert "no progress report for" in running.telemetry.of(Event.ENGINE_WEDGED)[0]["cause"]
        await until(lambda: len(running.telemetry.of(Event.ENGINE_READY)) == 3)
        await until(lambda: _gone(stopped))


async def test_draining_one_engine_leaves_the_plane_and_resume_brings_it_back(tmp_path: Path) -> None:
    async with staged(pair_config(tmp_path), _children) as running:
        first = _pid(running, "decode0")
        drained = await running.plane.drain(["decode0"], 10.0)
        assert drained == {"drained": ["decode0"], "left": []}
        assert _gone(first)
        assert (await _state(running, "decode0"), await _state(running, "prefill0")) == ("drained", "ready")
        assert (await running.plane.status())["state"] == "drained"  # nothing is left that drains
        assert (await running.plane.resume([]))["resumed"] == ["decode0"]
        await until(lambda: len(running.telemetry.of(Event.ENGINE_READY)) == 3)
        status, _, _ = await post(running, "/generate", ask())
        assert status == 200
        assert running.code is None


async def test_a_drain_ends_an_engine_between_two_lives_too(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        running.processes["decode0"].kill()
        await until(lambda: bool(running.telemetry.of(Event.ENGINE_RESTARTING)))
        drained = await running.plane.drain([], 20.0)
        assert sorted(drained["drained"]) == ["decode0", "prefill0"]
        await until(running.over.is_set)
        assert running.code == 0
        assert len(running.telemetry.of(Event.ENGINE_STARTED)) == 2


@asynccontextmanager
async def _drained_around_a_room(running: Stage) -> AsyncIterator[None]:
    """A drain of everything has begun, and waits for a room of decode0 that is aborted at the end of the block."""

    async def request() -> None:
        assert (await post(running, "/generate", ask(decode={"silent": True})))[0] == 503

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(request)
        await until(lambda: running.ranks["decode0"].running == 1)
        running.tasks.start_soon(running.plane.drain, [], 600.0)
        await until(lambda: bool(running.telemetry.of(Event.DRAIN_BEGIN)))
        yield
        await running.plane.abort(None, "over")


async def test_an_engine_that_dies_while_it_drains_is_drained(tmp_path: Path) -> None:
    """It is not started again while the drain waits for the rooms of another."""
    async with stage(pair_config(tmp_path, engines=_THREE)) as running:
        async with _drained_around_a_room(running):
            running.processes["decode1"].kill()
            await until(lambda: bool(running.telemetry.of(Event.ENGINE_FENCED)))
            with anyio.fail_after(PATIENCE):
                while await _state(running, "decode1") != "drained":  # noqa: ASYNC110 - asked as an operator would
                    await anyio.sleep(0.005)
        await until(running.over.is_set)
        assert running.telemetry.of(Event.ENGINE_RESTARTING) == []


async def test_an_engine_that_is_resumed_and_dies_while_others_drain_is_not_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next life is still to come when the drain stops the others."""
    monkeypatch.setitem(restart.POLICIES, "late", lambda: restart.Backoff(initial=600.0, cap=600.0))
    config = pair_config(tmp_path, engines=_THREE, policies=PoliciesConfig(restart="late"))
    async with stage(config) as running:
        async with _drained_around_a_room(running):
            assert (await running.plane.resume(["decode1"]))["resumed"] == ["decode1"]
            running.processes["decode1"].kill()
            await until(lambda: bool(running.telemetry.of(Event.ENGINE_RESTARTING)))
        await until(lambda: bool(running.telemetry.of(Event.DRAIN_DONE)))
        assert running.telemetry.of(Event.DRAIN_DONE)[0]["engines"] == ["prefill0", "decode0"]
        assert await _state(running, "decode1") == "restarting"


async def test_a_wedged_engine_that_gives_no_evidence_is_ended_all_the_same(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path, limits=LimitsConfig(quarantine_max=4))) as running:
        first = running.ranks["decode0"]
        first.answers = False
        first.quarantined = 5
        await until(lambda: len(running.telemetry.of(Event.ENGINE_READY)) == 3)
        assert running.ranks["decode0"] is not first
        assert "stacks" not in running.telemetry.of(Event.ENGINE_EVIDENCE)[0]


async def test_a_wedged_engine_is_asked_for_all_of_its_evidence_at_once(tmp_path: Path) -> None:
    """A rank whose loop stands looks at its link a few times a second."""
    async with stage(pair_config(tmp_path, limits=LimitsConfig(quarantine_max=4))) as running:
        first = running.ranks["decode0"]
        plain, asked = first._frame, list[Query]()

        async def frame(found: Any) -> None:
            if isinstance(found, Query):
                asked.append(found)
                for query in asked if len(asked) == 4 else ():
                    await plain(query)
            else:
                await plain(found)

        first._frame = frame  # type: ignore[method-assign]
        first.quarantined = 5
        await until(lambda: bool(running.telemetry.of(Event.ENGINE_EVIDENCE)))
        assert {query.what for query in asked} == {"stacks", "rooms", "tickets", "evidence"}
        assert "answer" in running.telemetry.of(Event.ENGINE_EVIDENCE)[0]["stacks"]


async def test_a_paused_engine_is_named(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        assert (await running.plane.status())["paused"] == []
        running.ranks["decode0"].paused = True  # in its next report
        with anyio.fail_after(PATIENCE):
            while (await running.plane.status())["paused"] != ["decode0"]:  # noqa: ASYNC110 - asked as an operator would
                await anyio.sleep(0.005)
        assert (await running.plane.engines())[1]["verdict"] == "paused"


async def test_an_engine_resumed_while_it_ends_begins_again(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        ending = running.processes["decode0"]
        ending.reapable = anyio.Event()
        running.tasks.start_soon(running.plane.drain, ["decode0"], 20.0)
        await until(lambda: bool(running.telemetry.of(Event.ENGINE_STOPPING)))
        assert (await running.plane.resume(["decode0"]))["resumed"] == ["decode0"]
        ending.reapable.set()
        await until(lambda: len(running.telemetry.of(Event.ENGINE_READY)) == 3)
        assert await _state(running, "decode0") == "ready"
        assert running.telemetry.of(Event.ENGINE_RESTARTING) == []


async def test_a_drain_that_runs_out_names_and_aborts_what_is_left(tmp_path: Path) -> None:
    """Report 39."""
    async with staged(pair_config(tmp_path), _children) as running:
        answers: list[tuple[int, str]] = []

        async def request() -> None:
            status, _, answer = await post(running, "/generate", ask(decode={"silent": True}))
            answers.append((status, answer["error"]["code"]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request)
            await until(lambda: bool(running.telemetry.of(Event.ROOM_OPENED)))
            drained = await running.plane.drain([], 2.0)
        assert answers == [(503, "drain")]
        (opened,) = running.telemetry.of(Event.ROOM_OPENED)
        assert drained["left"] == running.telemetry.of(Event.DRAIN_LEFTOVERS)[0]["rooms"] == [str(opened["room"])]
        await until(running.over.is_set)
        assert running.code == 0


async def test_an_engine_that_cannot_live_is_given_up_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hopeless:
        def processes_of(self, engine: Engine) -> int:
            return 1

        async def survivors(self, refused: Any) -> dict[str, list[str]]:
            return {}

        async def __call__(self, engine: Engine, ranks: Sequence[Rank]) -> RankProcess:
            return await start((sys.executable, "-c", "raise SystemExit('no such device')"), {})

    monkeypatch.setitem(restart.POLICIES, "twice", lambda: restart.Backoff(initial=0.01, tries=1))
    telemetry = Recorder()
    config = pair_config(tmp_path, policies=PoliciesConfig(restart="twice"))
    with anyio.fail_after(PATIENCE):
        code = await run(config, telemetry=telemetry, ready=_never, launcher=lambda *_: Hopeless())
    assert code == 1
    assert len(telemetry.of(Event.ENGINE_RESTARTING)) >= 1
    assert telemetry.of(Event.START_FAILED)
    gave_up = telemetry.of(Event.ENGINE_GAVE_UP)[0]
    assert "exit code 1" in gave_up["cause"]
    assert "no such device" in gave_up["cause"]


async def test_an_engine_that_is_condemned_in_every_life_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With back-off between its lives; what it was condemned for stays the cause until the end."""
    monkeypatch.setitem(restart.POLICIES, "twice", lambda: restart.Backoff(initial=0.01, tries=2))
    config = pair_config(tmp_path, policies=PoliciesConfig(restart="twice"), limits=LimitsConfig(quarantine_max=4))
    async with stage(config) as running:
        for life in range(3):
            await until(lambda life=life: len(running.telemetry.of(Event.ENGINE_READY)) == 2 + life)
            running.ranks["decode0"].quarantined = 5
        await until(lambda: bool(running.telemetry.of(Event.ENGINE_GAVE_UP)))
        assert len(running.telemetry.of(Event.ENGINE_QUARANTINE_FULL)) == 3
        delays = [event["delay_s"] for event in running.telemetry.of(Event.ENGINE_RESTARTING)]
        assert delays == [0.01, 0.02]
        assert "ended 3 times" in running.telemetry.of(Event.ENGINE_GAVE_UP)[0]["cause"]
        status, _, answer = await post(running, "/generate", ask())
        assert status == 503
        assert "decode0 is failed (ended 3 times" in answer["error"]["message"]
        assert "5 quarantined pages, limit 4" in answer["error"]["message"]


def _never(plane: Plane) -> None:
    raise AssertionError("it was never ready")


async def test_a_second_signal_stops_now(tmp_path: Path) -> None:
    """The first drains and would wait for the room; the second does not."""
    async with staged(pair_config(tmp_path), _children) as running:
        pids = [_pid(running, engine) for engine in ("prefill0", "decode0")]

        async def request() -> None:
            status, _, _ = await post(running, "/generate", ask(decode={"silent": True}))
            assert status in (499, 502, 503)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request)
            await until(lambda: bool(running.telemetry.of(Event.ROOM_OPENED)))
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: bool(running.telemetry.of(Event.DRAIN_BEGIN)))
            os.kill(os.getpid(), signal.SIGINT)
            await until(running.over.is_set)
        assert running.code == 1
        actions = [record["action"] for record in running.telemetry.of(Event.STOP_SIGNAL)]
        assert actions == ["drain", "stop now"]
        assert all(_gone(pid) for pid in pids)


async def test_resume_undoes_an_operators_drain_of_everything_and_no_signal(tmp_path: Path) -> None:
    """The first signal after the resumed drain drains anew and is final: the one after it stops now."""
    async with staged(pair_config(tmp_path), _children) as running:

        async def request() -> None:
            await post(running, "/generate", ask(decode={"silent": True}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request)  # a room that no drain outlives
            await until(lambda: bool(running.telemetry.of(Event.ROOM_OPENED)))
            running.tasks.start_soon(running.plane.drain, [], 600.0)
            await until(lambda: len(running.telemetry.of(Event.DRAIN_BEGIN)) == 1)
            assert (await running.plane.resume([]))["resumed"] == ["prefill0", "decode0"]
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: len(running.telemetry.of(Event.DRAIN_BEGIN)) == 2)
            for engines in ([], ["decode0"]):
                with pytest.raises(AdminError, match="the control plane is stopping on a signal") as refused:
                    await running.plane.resume(engines)
                assert refused.value.code == "refused"
            assert await _state(running, "decode0") == "draining"
            os.kill(os.getpid(), signal.SIGTERM)
            await until(running.over.is_set)
        actions = [record["action"] for record in running.telemetry.of(Event.STOP_SIGNAL)]
        assert actions == ["drain", "stop now"]


async def test_engines_end_with_a_killed_control_plane(tmp_path: Path) -> None:
    """Nobody is left to say stop: the kernel does, even to an engine that ignores its link."""
    parent = (
        "import anyio, sys\n"
        "from dsv4ctl.controlplane.supervisor.process import start\n"
        "async def main():\n"
        "    child = await start((sys.executable, '-c', 'import time; time.sleep(3600)'), {})\n"
        "    print(child.pid, flush=True)\n"
        "    await anyio.sleep_forever()\n"
        "anyio.run(main)\n"
    )
    async with await anyio.open_process([sys.executable, "-c", parent]) as process:
        assert process.stdout is not None
        child = int(await process.stdout.receive())
        await until(lambda: b"child.py" not in Path(f"/proc/{child}/cmdline").read_bytes())
        process.kill()
    await until(lambda: _gone(child))


async def test_output_is_relayed_with_its_fields(tmp_path: Path) -> None:
    async with staged(pair_config(tmp_path), _children) as running:
        await until(lambda: len(running.telemetry.of(Event.ENGINE_OUTPUT)) >= 2)  # the link may be the quicker way
        lines = running.telemetry.of(Event.ENGINE_OUTPUT)
        assert {line["engine"] for line in lines} == {"prefill0", "decode0"}
        assert {line["engine_event"] for line in lines} == {"fake.starting"}


async def test_a_line_is_cut_and_the_next_one_is_whole() -> None:
    cutter = LineCutter()
    lines = [*cutter.feed(b"a\nb"), *cutter.feed(b"c\r\n" + b"x" * (MAX_LINE_BYTES + 5)), *cutter.feed(b"y\nz")]
    assert lines == ["a", "bc", "x" * MAX_LINE_BYTES + " [cut]"]
    assert [*cutter.end(), *cutter.end()] == ["z"]


async def test_only_json_objects_are_taken_apart() -> None:
    assert fields_of('{"event": "x", "level": "error", "ts": "t", "pages": 3}') == {
        "engine_event": "x", "level": "error", "pages": 3,
    }  # fmt: skip
    assert fields_of("plain") == {"line": "plain"}
    assert fields_of('{"half": ') == {"line": '{"half": '}


async def test_a_refused_rank_is_a_failed_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Geometry that does not match: both figures reach the log and the engine's cause."""

    def wider(rank: FakeRank) -> None:
        if rank.role is Role.DECODE:
            rank.geometry = msgspec.structs.replace(GEOMETRY, page_tokens=512)

    monkeypatch.setitem(restart.POLICIES, "never", lambda: restart.Backoff(initial=0.01, tries=0))
    config = pair_config(tmp_path, policies=PoliciesConfig(restart="never"))
    # Whichever comes second is the one that is refused.
    with pytest.raises(ExceptionGroup) as given_up:
        async with stage(config, wider):
            pass
    assert "page_tokens differs" in str(_leaf(given_up.value))
    assert "512" in str(_leaf(given_up.value))
    assert "256" in str(_leaf(given_up.value))


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    return error


async def test_an_engine_with_too_many_quarantined_pages_is_restarted(tmp_path: Path) -> None:
    """Until it is reaped nobody is admitted, and every client is told why."""
    async with stage(pair_config(tmp_path, limits=LimitsConfig(quarantine_max=4))) as running:
        first, process = running.ranks["decode0"], running.processes["decode0"]
        process.reapable = anyio.Event()
        first.quarantined = 5
        await until(lambda: bool(running.telemetry.of(Event.ENGINE_QUARANTINE_FULL)))
        (full,) = running.telemetry.of(Event.ENGINE_QUARANTINE_FULL)
        assert "5 quarantined pages, limit 4" in full["cause"]
        status, _, answer = await post(running, "/generate", ask())
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        assert "5 quarantined pages, limit 4" in answer["error"]["message"]
        assert not running.telemetry.of(Event.ENGINE_FENCED)
        process.reapable.set()
        await until(lambda: len(running.telemetry.of(Event.ENGINE_READY)) == 3)
        assert running.ranks["decode0"] is not first
        assert [event["engine"] for event in running.telemetry.of(Event.ENGINE_FENCED)] == ["decode0"]
        assert "limit 4" in running.telemetry.of(Event.ENGINE_RESTARTING)[0]["cause"]
        assert (await running.plane.status())["quarantined"] == 0
        assert (await post(running, "/generate", ask()))[0] == 200


async def test_guards_change_at_run_time_only_where_the_configuration_allows_it(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        with pytest.raises(AdminError, match=r"unsafe\.runtime"):
            await running.plane.set_guards(["quiesce"])
    async with stage(pair_config(tmp_path, unsafe=UnsafeConfig(runtime=True))) as running:
        with pytest.raises(AdminError, match="no guard 'quiece'"):
            await running.plane.set_guards(["quiece"])
        await running.plane.set_guards(["quiesce"])
        await until(lambda: all(rank.guards_off == ("quiesce",) for rank in running.ranks.values()))
        running.processes["decode0"].kill()
        await until(lambda: len(running.telemetry.of(Event.ENGINE_READY)) == 3)
        assert running.ranks["decode0"].guards_off == ("quiesce",)


async def test_a_loop_that_dies_is_an_event_and_a_status_and_runs_again() -> None:
    telemetry = Recorder()
    runs: list[int] = []

    async def body(beat: Callable[[], None]) -> None:
        runs.append(1)
        if len(runs) == 1:
            raise KeyError("the first time")

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            loops = Loops(telemetry, tasks)
            loops.start("deadlines", body)
    assert len(runs) == 2
    (died,) = telemetry.of(Event.LOOP_DIED)
    assert (died["loop"], died["error"]) == ("deadlines", "KeyError('the first time')")
    assert loops.status()["deadlines"]["last_error"] == "KeyError('the first time')"
