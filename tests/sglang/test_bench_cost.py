"""The comparison of two servers on the same processors: who may run, that all may at the end, and what is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

import sglang_env
from dsv4ctl.engine_adapters.sglang.releases import VERIFIED
from running import until

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from sglang_bench import cores, cost, group_steady, own, parts
from sglang_bench.ask import Reply
from sglang_bench.cores import Shared, Thread
from sglang_bench.results import Results

BENCHMARKS = str(Path(own.__file__).parents[1])
LIMIT = 30.0
ALL = set(range(8))
OURS = Thread(1, 1)
SPINNING = [[[Thread(12, 2)], [Thread(13, 3)]], [[Thread(14, 4)], [Thread(15, 5)]]]


class System:
    """The processors of some threads, and which processes are stopped, in place of this machine's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spinning: list[list[list[Thread]]]) -> None:
        self.threads = [OURS, *(one for arm in spinning for server in arm for one in server)]
        self.processors = {one.number: ALL for one in self.threads}
        self.stopped: set[int] = set()
        self.signalled: list[int] = []

        async def watched(arms: object) -> list[list[list[Thread]]]:
            return spinning

        monkeypatch.setattr(cores, "_spinning", watched)
        monkeypatch.setattr(cores, "_threads", lambda pids: list(self.threads))
        monkeypatch.setattr(os, "sched_getaffinity", lambda number: ALL)
        monkeypatch.setattr(os, "sched_setaffinity", self._place)
        monkeypatch.setattr(os, "kill", self._signal)

    def begin(self, number: int, by: int) -> None:
        self.threads.append(Thread(by, number))
        self.processors[number] = self.processors[by]

    def _place(self, number: int, processors: Iterable[int]) -> None:
        self.processors[number] = set(processors)

    def _signal(self, process: int, number: int) -> None:
        self.signalled.append(process)
        (self.stopped.add if number == signal.SIGSTOP else self.stopped.discard)(process)


@pytest.mark.asyncio
async def test_threads_of_one_place_share_a_processor_and_the_asked_run(monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(monkeypatch, SPINNING)
    async with cores.shared([(1, 2), (3, 4)]) as together:
        assert system.processors == {1: {2, 3, 4, 5, 6, 7}, 2: {0}, 4: {0}, 3: {1}, 5: {1}}
        together.asked(1)
        assert system.stopped == {12, 13}
        together.asked(None)
        assert not system.stopped


@pytest.mark.asyncio
async def test_processes_are_stopped_before_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(monkeypatch, SPINNING)
    async with cores.shared([(1, 2), (3, 4)]) as together:
        for arm, order in ((0, [14, 15, 12, 13]), (1, [12, 13, 14, 15])):
            system.signalled.clear()
            together.asked(arm)
            assert system.signalled == order


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Two processes, each the spinning one of a server."""
    started = [subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0)"]) for _ in range(2)]

    async def watched(arms: object) -> list[list[list[Thread]]]:
        return [[[Thread(one.pid, one.pid)]] for one in started]

    monkeypatch.setattr(cores, "_spinning", watched)
    monkeypatch.setattr(cores, "_FREE", 1)
    try:
        yield [one.pid for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()


@pytest.mark.asyncio
async def test_a_process_that_is_not_asked_stands_still_until_it_is(running: list[int]) -> None:
    def stopped() -> list[bool]:
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in running]
        return [stat.rpartition(")")[2].split()[0] == "T" for stat in stats]

    async with cores.shared([(1,), (2,)]) as together:
        assert together.arms, "two processors are needed"
        await until(lambda: min(together.ran()) > 0)
        for arm, expected in ((0, [False, True]), (1, [True, False]), (None, [False, False]), (0, [False, True])):
            together.asked(arm)
            await until(lambda expected=expected: stopped() == expected)  # type: ignore[misc]
    await until(lambda: stopped() == [False, False])


@pytest.mark.asyncio
async def test_another_turn_takes_other_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(monkeypatch, SPINNING)
    taken = []
    for turn in (0, 1, 3, 4):
        async with cores.shared([(1, 2), (3, 4)], turn):
            taken.append([system.processors[number] for number in (2, 3)])
    assert taken == [[{0}, {1}], [{2}, {3}], [{6}, {7}], [{0}, {1}]]


@pytest.mark.asyncio
async def test_at_the_end_all_run_everywhere_those_that_began_meanwhile_too(monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(monkeypatch, SPINNING)
    with anyio.CancelScope() as scope:
        async with cores.shared([(1, 2), (3, 4)]) as together:
            together.asked(0)
            system.begin(9, by=4)
            assert (system.stopped, system.processors[9]) == ({14, 15}, {0})
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert not system.stopped
    assert all(processors == ALL for processors in system.processors.values())


@pytest.mark.asyncio
async def test_nothing_is_shared_with_a_server_that_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    System(monkeypatch, [SPINNING[0], [SPINNING[1][0], []]])
    async with cores.shared([(1, 2), (3, 4)]) as together:
        assert together == Shared()


class Talking:
    """A server that says a token at every look, or nothing; the first `failing` requests fail."""

    def __init__(self, *, silent: bool = False, failing: int = 0) -> None:
        self.silent, self.failing, self.asked = silent, failing, 0

    async def ask(self, *args: object, reply: Reply, **options: object) -> Reply:
        self.asked += 1
        if self.asked <= self.failing:
            reply.error = "gone"
        while not reply.error:
            await anyio.lowlevel.checkpoint()
            reply.ids += [] if self.silent else [1]
        return reply


def arms(off: Talking, on: Talking) -> dict[str, cost.Arm]:
    return {"off": cost.Arm(off, (1,)), "on": cost.Arm(on, (2,))}  # type: ignore[arg-type]


def sharing(monkeypatch: pytest.MonkeyPatch, shared: Shared) -> None:
    @asynccontextmanager
    async def always(ports: object, turn: int) -> AsyncIterator[Shared]:
        yield shared

    monkeypatch.setattr(cores, "shared", always)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing(monkeypatch, Shared(((), ()), ((),)))
    monkeypatch.setattr(cost, "_SLICE", 0.01)
    monkeypatch.setattr(cost, "_SLICES", 2)


@pytest.mark.asyncio
async def test_slices_wait_for_no_last_answer(short: None) -> None:
    with anyio.fail_after(LIMIT):
        found = await cost.slices(arms(Talking(), Talking()), seconds=0.2, load=cost.Load(2, 8, 4))
    assert (found["slices"], found["shared_processors"], len(found["mean_ratio"])) == (10, 1, 2)


@pytest.mark.asyncio
@pytest.mark.parametrize("turn", [0, 1])
async def test_what_is_told_late_counts_by_the_seconds_of_its_own_slices(
    monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    now, told, order = 0.0, dict[int, list[Reply]](), list[int | None]()

    class Late(Shared):
        def asked(self, arm: int | None) -> None:
            order.append(arm)
            if arm is not None and told:
                told[1 - arm][0].ids += [1] * (6, 9)[1 - arm]
                told[arm].append(Reply(first=now))

        def ran(self) -> list[float]:
            return [now, 2 * now]

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds * 1.25
        await anyio.lowlevel.checkpoint()

    async def keep_asking(client: int, said: list[Reply], load: object, at: int) -> None:
        said.append(Reply())
        told[client] = said
        await anyio.sleep_forever()

    sharing(monkeypatch, Late(((), ()), ((),)))
    monkeypatch.setattr(cost, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(cost, "anyio", SimpleNamespace(create_task_group=anyio.create_task_group, sleep=sleep))
    monkeypatch.setattr(cost, "keep_asking", keep_asking)
    monkeypatch.setattr(cost, "_SLICE", 0.5)
    both = {"off": cost.Arm(0, (1,)), "on": cost.Arm(1, (2,))}  # type: ignore[arg-type]
    found = await cost.slices(both, seconds=16.0, load=cost.Load(1, 8, 4), turn=turn)
    assert order[:4] == [turn, 1 - turn, turn, 1 - turn]
    assert (found["slices"], found["processor_seconds"]) == (16, {"off": 20.0, "on": 40.0})
    assert [found[arm]["tokens_per_second"]["median"] for arm in both] == [9.6, 14.4]
    assert [found[arm]["first_token_seconds"]["n"] for arm in both] == [16, 16], "those of rounds that warm up, no"
    assert found["mean_ratio"] == [1.5, 0.0]


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [0, 1])
async def test_slices_say_who_said_nothing_and_what_failed(short: None, number: int) -> None:
    for bad, said in (
        (Talking(silent=True), "no token"),
        (Talking(failing=99), "2 requests failed: .*: gone"),
        (Talking(failing=1), "1 requests failed: .*: gone"),
    ):
        pair = [Talking(), Talking()]
        pair[number] = bad
        with anyio.fail_after(LIMIT), pytest.raises(RuntimeError, match=said):
            await cost.slices(arms(*pair), seconds=0.2, load=cost.Load(2, 8, 4))
        assert bad.asked == 2, "who failed is not asked again and again"


@pytest.mark.asyncio
async def test_slices_say_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing(monkeypatch, Shared())
    with pytest.raises(RuntimeError, match="can't share"):
        await cost.slices(arms(Talking(), Talking()), seconds=0.0, load=cost.NEW)


@pytest.mark.asyncio
@pytest.mark.parametrize("again", [False, True])
async def test_who_keeps_asking_asks_what_is_new_or_what_comes_again(again: bool) -> None:
    asked: list[tuple[list[int], int]] = []

    async def ask(tokens: list[int], new: int, *, stream: bool, reply: Reply) -> None:
        asked.append((tokens, new))
        reply.error = "gone" if len(asked) == 3 else None

    said: list[Reply] = []
    client: Any = SimpleNamespace(ask=ask)
    await cost.keep_asking(client, said, cost.Load(4, 8, 12, again), 1)
    assert [new for _, new in asked] == [6, 12, 12]
    assert len({tuple(tokens) for tokens, _ in asked}) == (1 if again else 3)
    assert len(said) == 3


@pytest.mark.asyncio
async def test_starts_are_counted_on_by_a_call_that_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    time_for, down = 3, [1, 4]

    async def start(bench: object, number: int) -> dict[str, Any] | None:
        if len(begun) == time_for:
            raise RuntimeError("cut short")
        if number in down:
            down.remove(number)
            return None
        begun.append(number)
        return {"mean_ratio": [1.0 + number / 10, 0.1]}

    async def step(name: str, body: Callable[[], Awaitable[None]]) -> None:
        with suppress(RuntimeError):
            await body()

    monkeypatch.setattr(group_steady, "_start", start)
    monkeypatch.setattr(group_steady, "_STARTS", 5)
    file = tmp_path / "results.json"
    for had, mean_ratio in ((3, [1.1, 0.0577]), (5, [1.2, 0.0707]), (5, [1.2, 0.0707])):
        await group_steady.steady(SimpleNamespace(results=Results(file, resume=True), step=step, fake=True))  # type: ignore[arg-type]
        found = json.loads(file.read_text())["s5.steady"]
        assert (begun, len(found["starts"])) == ([*range(had)], had)
        assert found["mean_ratio"] == mean_ratio
        time_for = 9
    assert not down


@pytest.mark.asyncio
async def test_servers_that_do_not_come_up_twice_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    async def start(bench: object, number: int) -> None:
        begun.append(number)

    async def step(name: str, body: Callable[[], Awaitable[None]]) -> None:
        await body()

    monkeypatch.setattr(group_steady, "_start", start)
    bench = SimpleNamespace(results=Results(tmp_path / "results.json", resume=False), step=step, fake=True)
    with pytest.raises(RuntimeError, match="start 0 did not come up, twice"):
        await group_steady.steady(bench)  # type: ignore[arg-type]
    assert begun == [0, 0]


def test_what_serves_http_is_never_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = {1: "bench", 2: "guardian\0--port\x007\0", 3: "server\0--port\x007\0", 4: "scheduler", 5: "other"}
    monkeypatch.setattr(cores, "_command", commands.__getitem__)
    assert cores._schedulers(7, {1: 0, 2: 1, 3: 2, 4: 3, 5: 1}) == {4}


def test_a_round_in_which_the_first_said_nothing_has_no_ratio_and_counts_in_the_mean() -> None:
    found = cost.ratios([[0.0, 200.0], [100.0, 100.0]])
    assert (found["ratios"], found["mean_ratio"][0]) == ([0.5], 1.0)
    assert cost.ratios([[0.0, 0.0], [1.0, 1.0]]) == {}


def test_starts_that_differ_make_the_error() -> None:
    assert cost.between([0.95, 1.0, 0.99]) == [0.98, 0.0153]
    assert cost.between([0.95]) == [0.95, None]


def test_time_is_told_by_part_for_each_token(tmp_path: Path) -> None:
    now = waited = 0

    def work(nanoseconds: int) -> str:
        nonlocal now
        now += nanoseconds
        return "done"

    spent = parts.Spent(tmp_path, lambda: now, lambda: now + waited)
    scheduler = SimpleNamespace(server_args=SimpleNamespace(disaggregation_mode="decode", port=7))
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True), reqs=[1, 2])
    assert parts.counted(tmp_path, 7) == {}
    spent.turn(scheduler)
    before = parts.counted(tmp_path, 7)
    assert spent.on("queues")(work, 1_000) == "done"
    spent.collection("start", {"generation": 2})
    work(1_000)
    spent.collection("stop", {"generation": 2})
    waited += 1_000
    spent.turn(scheduler)  # the one before found nothing to decode
    assert spent.on("queues")(work, 4_000) == "done"
    spent.forward(scheduler, batch)
    with pytest.raises(ZeroDivisionError):
        spent.on("forward")(lambda: work(10_000) and 1 / 0)
    for phase, generation in (("start", 2), ("stop", 2), ("start", 0)):
        spent.collection(phase, {"generation": generation})
        work(1_000)
    spent.forward(scheduler, SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: False), reqs=[1]))
    spent._log._written = 0.0
    waited += 3_000
    scheduler.server_args.disaggregation_mode = "prefill"
    spent.turn(scheduler)
    assert parts.counted(tmp_path, 7) == before
    spent.forward(scheduler, batch)
    waited += 200_000_000  # it was stopped
    scheduler.server_args.disaggregation_mode = "decode"
    spent.turn(scheduler)
    assert parts.a_token(before, parts.counted(tmp_path, 7)) == {
        "requests": 0.0, "queues": 1.0, "batch": 0.0, "forward": 2.5, "results": 0.0, "collections": 0.25,
        "turns": 4.25, "waits": 1.5, "tokens_a_turn": 2.0,
    }  # fmt: skip
    assert parts.a_token(before, before) == {}


def test_our_own_time_is_told_by_hook_without_what_it_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "WRITTEN_SECONDS", -1.0)
    now = 0

    def work(nanoseconds: int, answer: str = "done") -> str:
        nonlocal now
        now += nanoseconds
        return answer

    def around(stock: Callable[..., str], before: int, within: int) -> str:
        work(before)
        return work(5_000, stock(within))

    ours = own.Own(tmp_path, lambda: now)
    scheduler = SimpleNamespace(server_args=SimpleNamespace(port=7))
    inner = ours.timed("inner", "around", around)
    outer = ours.timed("outer", "around", around)
    plain = ours.timed("plain", "after", work)
    assert ours.timed("replaced", "replace", work) is work
    does: list[Callable[[], Any]] = [
        lambda: ours.forward(scheduler, None),
        lambda: None,
        lambda: [ours.forward(scheduler, None), ours.forward(scheduler, None)],
        lambda: ours.requests(scheduler, [1]),
        lambda: ours.result(scheduler, None),
        lambda: None,
    ]
    for at, do in enumerate(does):
        ours.turn()
        if at == 2:
            before = parts.counted(tmp_path, 7)
        ours.requests(scheduler, [])
        assert outer(lambda within: inner(work, 2_000, within), 1_000, 90_000) == "done"
        assert plain(3_000, "changed") == "changed"
        with pytest.raises(ZeroDivisionError):
            outer(lambda within: work(within) and 1 / 0, 1_000, 7_000)
        do()
        thread = threading.Thread(target=plain, args=(1_000,))  # not the loop's
        thread.start()
        thread.join()
    after = parts.counted(tmp_path, 7)
    whole = 1_000 + 5_000 + 2_000 + 5_000 + 90_000 + 3_000 + 8_000 + 1_000
    assert after["lasted"] == 5 * whole
    assert (before["forwards"], before["own nothing"], before["calls nothing"]) == (1, 0, 2)
    after["others"] = before["others"] + (after["lasted"] - before["lasted"]) // 50
    after["own nothing"] = 500 * (after["calls nothing"] - before["calls nothing"])
    assert own.share(before, after) == {
        "forwards": 1,
        "turn_us": 3 * whole / 1000,
        "own_us": 3 * 17.0,
        "own_us_without_timer": 3 * 15.0,
        "timer_us_a_call": 0.5,
        "own_us_and_calls_by_hook": {"inner": [21.0, 3.0], "outer": [21.0, 6.0], "plain": [9.0, 3.0]},
        "share": {
            "hooks": round(17_000 / whole, 5),
            "hooks_without_timer": round(15_000 / whole, 5),
            "other_threads": 0.02,
        },
    }
    assert own.share(before, before) == {}
    assert own.share(before, {name: n for name, n in after.items() if name.partition(" ")[2] in ("", "nothing")}) == {}


@pytest.mark.parametrize("release", VERIFIED)
def test_hooks_that_are_timed_are_in_place(tmp_path: Path, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((BENCHMARKS, os.environ.get("PYTHONPATH", ""))))
    said = sglang_env.run(release, "sglang_own", release, str(tmp_path))
    assert (said["elsewhere"], said["problems"]) == ({}, [])
    assert said["timed"] == [True] * 3
    turns = said["turns"]
    assert [one.get("forwards", 0) for one in turns] == [0, 0, 1, 1, 1, 1, 2]
    waits = "DeepSeekV4TokenToKVPool.wait_layer_transfer"
    assert [one.get(f"calls {waits}", 0) for one in turns] == [0, 0, 1, 1, 2, 3, 4]
    last = turns[-1]
    assert (last["calls Scheduler.run_batch"], last["calls nothing"]) == (3, 4 + 3)
    assert 0 < last[f"own {waits}"] < last["turns"] < last["lasted"]
    assert last["others"] > 0
