"""SGLang servers as the supervisor's trees of processes: started, ready, asked, killed in every way, drained."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

import dsv4ctl.controlplane as controlplane
from dsv4ctl.controlplane.config.schema import DeadlinesConfig, PoliciesConfig
from dsv4ctl.controlplane.supervisor.launch import AdapterLauncher
from dsv4ctl.controlplane.supervisor.process import start_tree
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.policies import restart
from running import PATIENCE, Stage, post, staged, until
from sglang_fake import Trees

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(restart.POLICIES, "quick", lambda: restart.Backoff(initial=0.01, tries=9))


BODY: dict[str, Any] = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True, "stop_token_ids": []},
    "return_logprob": True,
    "top_logprobs_num": 2,
    "rid": "mine",
    "unknown_field": {"kept": [1.5, None, "\u00e9"]},
}


async def _state(running: Stage, engine: str) -> str:
    return str((await running.plane.status())["engines"][engine])


def _lives(running: Stage, engine: str) -> int:
    return sum(record["engine"] == engine for record in running.telemetry.of(Event.ENGINE_READY))


async def test_a_pair_serves_what_it_is_asked_and_is_gone_after_a_drain(tmp_path: Path) -> None:
    trees = Trees()
    async with staged(trees.pair(tmp_path), AdapterLauncher) as running:
        assert len(trees.pids("sglang.scheduler")) == 4
        assert len(trees.pids("guardian.py")) == 2  # one process tree an engine, whatever its ranks

        status, _, answer = await post(running, "/generate", BODY)
        assert status == 200
        assert (answer["role"], answer["output_ids"]) == ("decode", [18, 19, 20])
        logprobs = answer["meta_info"]["output_token_logprobs"]
        assert logprobs == [[-0.0, 18, None], [-0.0625, 19, None], [-0.125, 20, None]]
        seen = answer["seen"]
        assert {key: seen[key] for key in BODY} == BODY  # untouched, and beside it only how the engines meet
        assert sorted(set(seen) - set(BODY)) == ["bootstrap_host", "bootstrap_port", "bootstrap_room"]
        engines = {engine["name"]: engine for engine in await running.plane.engines()}
        assert seen["bootstrap_host"] == "127.0.0.1"
        assert seen["bootstrap_port"] == engines["prefill0"]["bootstrap_port"] != 0
        await until(lambda: bool(running.telemetry.of(Event.ROOM_CLOSED)))

        lines = running.telemetry.of(Event.ENGINE_OUTPUT)
        batches = {(line["engine"], line["rank"], line["line"]) for line in lines if "batch" in line["line"]}
        assert batches == {(engine, rank, f"Prefill batch, #new-seq: {rank}") for engine in engines for rank in (0, 1)}
        drained = await running.plane.drain([], None)
        assert sorted(drained["drained"]) == ["decode0", "prefill0"]
        await until(running.over.is_set)
        assert running.code == 0
        assert trees.pids() == []


async def _hanging(running: Stage, answers: list[int]) -> None:
    answers.append((await post(running, "/generate", {**BODY, "hang": True}))[0])


async def test_whatever_of_a_tree_is_killed_all_of_it_goes_and_the_engine_comes_back(tmp_path: Path) -> None:
    """A scheduler, the server, the guardian; a request under way gets an error, not a hang."""
    trees = Trees()
    config = trees.pair(tmp_path, policies=PoliciesConfig(restart="quick"))
    async with staged(config, AdapterLauncher) as running:
        for life, word in enumerate(("sglang.scheduler 1", "sglang.launch_server", "guardian.py"), 2):
            answers: list[int] = []
            before = trees.pids()
            *_, victim = [pid for pid in trees.pids(word) if _below(pid, "decode", trees)]
            started = [one for one in running.telemetry.of(Event.ENGINE_STARTED) if one["engine"] == "decode0"][-2:]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_hanging, running, answers)
                await until(lambda opened=life - 1: len(running.telemetry.of(Event.ROOM_OPENED)) == opened)
                os.kill(victim, signal.SIGKILL)
            assert answers == [502]
            await until(lambda lives=life: _lives(running, "decode0") == lives)
            left = set(before) & set(trees.pids())
            assert left == {pid for pid in before if _below(pid, "prefill", trees)}
            assert len(running.telemetry.of(Event.ENGINE_EXITED)) == 2 * (life - 1)  # said of each rank, each time
            fenced = {record["incarnation"] for record in running.telemetry.of(Event.ENGINE_FENCED)}
            assert {one["incarnation"] for one in started} <= fenced
            await until(lambda ended=life - 1: len(running.telemetry.of(Event.ROOM_ABORTED)) == ended)
        assert (await post(running, "/generate", BODY))[0] == 200
        assert _lives(running, "prefill0") == 1


def _below(pid: int, role: str, trees: Trees) -> bool:
    """`pid` belongs to the engine with this role: itself, or a process above it, names it."""
    while pid in trees.pids():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if role in command:
            return True
        pid = _parent(pid)
    return False


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_a_stopped_scheduler_is_found_killed_and_reaped(tmp_path: Path) -> None:
    trees = Trees()
    deadlines = DeadlinesConfig(wedge=1.0, ack=1.0, fence=5.0, ready=60.0)
    config = trees.pair(
        tmp_path,
        engines=[trees.engine("one", "single", ranks=2)],
        deadlines=deadlines,
        policies=PoliciesConfig(restart="quick"),
    )
    async with staged(config, AdapterLauncher) as running:
        (victim,) = trees.pids("sglang.scheduler 1")
        os.kill(victim, signal.SIGSTOP)
        await until(lambda: _lives(running, "one") == 2)
        assert victim not in trees.pids()
        assert len(running.telemetry.of(Event.ENGINE_WEDGED)) == 1


async def test_an_engine_is_ready_once_its_server_answers_too(tmp_path: Path) -> None:
    gate = tmp_path / "open"
    trees = Trees(FAKE_GATE=str(gate))
    engine = trees.engine("one", "single")
    config = trees.pair(tmp_path, engines=[engine])
    async with anyio.create_task_group() as tasks:
        opened = anyio.Event()

        async def serve() -> None:
            async with staged(config, AdapterLauncher) as running:
                opened.set()
                assert gate.exists()
                assert (await post(running, "/generate", BODY))[0] == 200

        tasks.start_soon(serve)
        await until(lambda: bool(trees.pids("sglang.scheduler 0")))
        with anyio.move_on_after(0.5):  # Hellos are said long before; a start that does not ask would end here
            await opened.wait()
        assert not opened.is_set()
        gate.touch()


PARENT = """
    import anyio, sys
    from dsv4ctl.controlplane.supervisor.process import start_tree
    async def main():
        process = await start_tree(sys.argv[1:], {})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.relay, lambda stream, line: print(line, flush=True))
            await anyio.sleep_forever()
    anyio.run(main)
"""
#: Ignores SIGTERM; one process in a session of its own, and an orphan.
TREE = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
    subprocess.Popen(sleep, start_new_session=True)
    if os.fork() == 0:
        subprocess.Popen([*sleep, "orphan"])
        os._exit(0)
    os.wait()
    print("up", flush=True)
    time.sleep(3600)
"""


async def test_a_kill_ends_what_ignores_a_signal_or_is_stopped_and_reaps_orphans() -> None:
    trees = Trees()
    up = anyio.Event()
    process = await start_tree([sys.executable, "-c", textwrap.dedent(TREE)], trees.env)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(process.relay, lambda _, line: up.set() if line == "up" else None)
        with anyio.fail_after(PATIENCE):
            await up.wait()
            await until(lambda: len(trees.pids("3600) orphan")) == 1)
            (orphan,), (guardian, program) = trees.pids("3600) orphan"), trees.pids("SIG_IGN")
            assert (_parent(orphan), _parent(program), guardian) == (guardian, guardian, process.pid)
            process.terminate()
            os.kill(program, signal.SIGSTOP)
            os.kill(guardian, signal.SIGSTOP)
            assert process.exit_code is None
            process.kill()
            assert await process.reaped() == -signal.SIGKILL
            assert trees.pids() == []
    await process.close()


async def test_nothing_of_a_tree_outlives_a_killed_control_plane() -> None:
    trees = Trees()
    package = str(Path(next(iter(controlplane.__path__))).parent.parent)
    env = {**os.environ, **trees.env, "PYTHONPATH": os.pathsep.join([package, *sys.path])}
    argv = [sys.executable, "-c", textwrap.dedent(PARENT), sys.executable, "-c", textwrap.dedent(TREE)]
    async with await anyio.open_process(argv, env=env, stderr=None) as parent:
        assert parent.stdout is not None
        assert await BufferedByteReceiveStream(parent.stdout).receive_until(b"\n", 100) == b"up"
        await until(lambda: len(trees.pids()) == 5)  # parent, guardian, the program, two in sessions of their own
        parent.kill()
        await until(lambda: trees.pids() == [])


async def test_a_program_that_cannot_be_run_ends_its_tree_with_a_line() -> None:

    lines: list[str] = []
    with anyio.fail_after(PATIENCE):
        process = await start_tree(["/no/such/python"], {})
        await process.relay(lambda _, line: lines.append(line))
        assert await process.reaped() == 127
        await process.close()
    assert lines == ["/no/such/python: No such file or directory"]
