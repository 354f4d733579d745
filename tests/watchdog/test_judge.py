"""The verdict on a rank, from its progress reports alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from dsv4ctl.controlplane.link.wire import LedgerCounts, LoopStatus, Progress
from dsv4ctl.controlplane.scheduler.fleet import PROGRESS_INTERVAL, Sample, history
from dsv4ctl.controlplane.watchdog.judge import State, judge, judge_engine
from dsv4ctl.controlplane.watchdog.watch import Watched, watch

WEDGE = 8.0


def _report(steps: int = 0, work: int = 0, **fields: Any) -> Progress:
    return Progress(steps, work, fields.pop("queues", {}), LedgerCounts(), fields.pop("loops", {}), **fields)


def _history(*reports: Progress) -> list[tuple[float, Progress]]:
    """One a second, the last one now."""
    return [(float(at), report) for at, report in enumerate(reports)]


def test_no_history_is_idle() -> None:
    assert judge([], 100.0, WEDGE).state is State.IDLE


def test_no_work_is_idle_however_long_nothing_happens() -> None:
    assert judge(_history(*[_report()] * 60), 59.0, WEDGE).state is State.IDLE


def test_work_that_moves_is_busy() -> None:
    history = _history(*[_report(steps, 3) for steps in range(60)])
    assert judge(history, 59.0, WEDGE).state is State.BUSY


def test_work_that_does_not_move_is_wedged_with_its_figures() -> None:
    stuck = _report(41, 3, queues={"running": 2, "waiting": 1, "decode_transfer": 0})
    verdict = judge(_history(*[stuck] * 9), 8.0, WEDGE)
    assert verdict.state is State.WEDGED
    assert verdict.cause == ("3 runnable and nothing done for 8.0 s: 41 steps since start, queues running 2, waiting 1")


def test_a_moment_before_the_deadline_it_is_only_busy() -> None:
    assert judge(_history(*[_report(41, 3)] * 8), 7.9, WEDGE).state is State.BUSY


@pytest.mark.parametrize("wedge", [0.5, WEDGE, 600.0])
def test_as_many_reports_are_kept_as_the_deadline_needs(wedge: float) -> None:
    kept = history(wedge)
    for number in range(int(4 * wedge / PROGRESS_INTERVAL)):
        kept.append(Sample(number * PROGRESS_INTERVAL, _report(41, 3)))
    assert judge(kept, kept[-1].at, wedge).state is State.WEDGED


def test_arrivals_and_clients_that_give_up_are_no_progress() -> None:
    history = _history(*[_report(41, work, queues={"waiting": work}) for work in (1, 5, 9, 2, 7, 3, 8, 4, 6)])
    assert judge(history, 8.0, WEDGE).state is State.WEDGED


def test_rooms_that_wait_for_a_peer_are_not_counted_as_work() -> None:
    """`work` is what the rank could go on with by itself; those rooms have deadlines of their own."""
    waiting = _report(41, 0, queues={"transferring": 3})
    assert judge(_history(*[waiting] * 60), 59.0, WEDGE).state is State.IDLE


def test_loads_that_land_are_progress() -> None:
    history = _history(*[_report(41, 1, counters={"host_tokens_loaded": 256 * n}) for n in range(20)])
    assert judge(history, 19.0, WEDGE).state is State.BUSY


def test_a_long_step_is_progress_by_its_layers() -> None:
    history = _history(*[_report(0, 16, counters={"layers_computed": at // 5}) for at in range(30)])
    assert judge(history, 29.0, WEDGE).state is State.BUSY


def test_an_idle_time_in_between_starts_the_clock_again() -> None:
    history = _history(*[_report(41, 1)] * 5, _report(41, 0), *[_report(41, 1)] * 5)
    assert judge(history, 10.0, WEDGE).state is State.BUSY


def test_silence_is_wedged_even_without_work() -> None:
    verdict = judge(_history(_report()), 8.0, WEDGE)
    assert verdict == (State.WEDGED, "no progress report for 8.0 s")


def test_a_dead_loop_is_wedged_at_once() -> None:
    report = _report(loops={"sender": LoopStatus(7, "KeyError: 3"), "loader": LoopStatus(9)})
    assert judge(_history(report), 0.0, WEDGE) == (State.WEDGED, "loop sender died: KeyError: 3")


def test_a_prefill_of_half_a_minute_with_progress_is_busy_at_every_moment() -> None:
    """A step every 7 s, one long prompt: slower than any real chunk, and still progress."""
    reports = [(at / 4, _report(int(at / 4 / 7), 1, queues={"prefilling": 1})) for at in range(4 * 32)]
    verdicts = {judge(reports[: n + 1], at, WEDGE).state for n, (at, _) in enumerate(reports)}
    assert verdicts == {State.BUSY}


def test_a_paused_engine_is_paused_however_long() -> None:
    paused = _report(41, 0, queues={"waiting": 7, "decoding": 3}, paused=True)
    history = _history(*[_report(41, 3)] * 4, *[paused] * 3600)
    verdicts = {judge_engine({0: history[: at + 1]}, float(at), WEDGE) for at in range(4, len(history))}
    assert verdicts == {(State.PAUSED, None)}


def test_one_that_continues_has_as_long_as_any_other() -> None:
    """Nothing was done for an hour, and its work is what it was before."""
    working, paused = _report(41, 3, queues={"decoding": 3}), _report(41, 0, paused=True)
    history = _history(working, *[paused] * 3600, *[working] * 9)
    assert judge(history[:-1], 3608.0, WEDGE).state is State.BUSY
    assert judge(history, 3609.0, WEDGE).state is State.WEDGED


def test_a_paused_engine_still_dies_and_falls_silent() -> None:
    assert judge(_history(_report(paused=True)), 8.0, WEDGE) == (State.WEDGED, "no progress report for 8.0 s")
    dead = _report(paused=True, loops={"transfer": LoopStatus(5, "OSError: gone")})
    assert judge(_history(dead), 0.0, WEDGE).state is State.WEDGED


# ---- an engine of several ranks ------------------------------------------------------------------------


def _rounds(rounds: int, work: int = 0, **fields: Any) -> Progress:
    return _report(rounds, work, loops={"step": LoopStatus(rounds)}, **fields)


def test_ranks_that_go_on_together_are_busy_or_idle() -> None:
    ranks = {number: _history(*[_rounds(at, 1) for at in range(30)]) for number in (0, 1)}
    assert judge_engine(ranks, 29.0, WEDGE).state is State.BUSY
    idle = {number: _history(*[_rounds(at) for at in range(30)]) for number in (0, 1)}
    assert judge_engine(idle, 29.0, WEDGE).state is State.IDLE


def test_of_two_ranks_the_one_that_fell_silent_is_named() -> None:
    """The other one waits for it in a collective, with work, and would be blamed by its own reports."""
    waits = _history(*[_rounds(5, 2, queues={"decoding": 2})] * 9)
    stopped = _history(_rounds(5, 2))
    verdict = judge_engine({0: waits, 1: stopped}, 8.0, WEDGE)
    assert verdict == (State.WEDGED, "rank 1: no progress report for 8.0 s")


def test_of_two_ranks_the_one_that_did_not_enter_its_round_is_named() -> None:
    """Its last report of an earlier round came a moment later, so that the other is found first."""
    waits = _history(*[_rounds(43, 2)] * 9)
    stands = [(0.2, _rounds(41, 2)), (0.4, _rounds(42, 2)), (7.9, _rounds(42, 2))]
    verdict = judge_engine({0: waits, 1: stands}, 8.0, WEDGE)
    assert verdict == (State.WEDGED, "rank 1: round 43 not entered, in which rank 0 waits, for 7.6 s")


def test_a_deadlock_is_found_before_a_request_has_to_wait_for_it() -> None:
    ranks = {0: _history(*[_rounds(43)] * 9), 1: _history(*[_rounds(42)] * 9)}
    assert judge_engine(ranks, 7.9, WEDGE).state is State.IDLE
    assert judge_engine(ranks, 8.0, WEDGE).state is State.WEDGED


def test_ranks_pause_together_and_say_so_apart() -> None:
    ranks = {0: _history(*[_rounds(at, paused=True) for at in range(30)]), 1: _history(*[_rounds(29, 2)] * 2)}
    assert judge_engine(ranks, 1.0, WEDGE).state is State.PAUSED
    stands = {0: _history(*[_rounds(43, paused=True)] * 9), 1: _history(*[_rounds(42, paused=True)] * 9)}
    assert judge_engine(stands, 8.0, WEDGE).state is State.WEDGED


def test_a_dead_loop_is_the_cause_whatever_waits_for_it() -> None:
    dead = _report(5, 1, loops={"step": LoopStatus(5), "transfer": LoopStatus(5, "OSError: gone")})
    verdict = judge_engine({0: _history(*[_rounds(6, 1)] * 9), 1: [(8.0, dead)]}, 8.0, WEDGE)
    assert verdict == (State.WEDGED, "rank 1: loop transfer died: OSError: gone")


def test_a_rank_that_is_not_there_yet_leaves_the_others_idle() -> None:
    assert judge_engine({0: _history(*[_rounds(3)] * 60), 1: []}, 59.0, WEDGE).state is State.IDLE
    assert judge_engine({}, 59.0, WEDGE).state is State.IDLE


# ---- the watch -----------------------------------------------------------------------------------------


class Watch:
    """The watch over engines a test owns; `wedged` are those it found."""

    def __init__(self, engines: dict[str, Watched]) -> None:
        self.engines = engines
        self.wedged: list[tuple[str, str]] = []
        self._beats = 0
        self._beaten = anyio.Event()

    async def rounds(self, number: int) -> None:
        """Returns once so many more rounds have begun."""
        until = self._beats + number
        while self._beats < until:
            await self._beaten.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.run)
                yield
                tasks.cancel_scope.cancel()

    def _beat(self) -> None:
        self._beats += 1
        self._beaten.set()
        self._beaten = anyio.Event()

    def _found(self, engine: str, cause: str) -> None:
        self.wedged.append((engine, cause))
        del self.engines[engine]

    async def run(self) -> None:
        await watch(self.engines.values, self._found, WEDGE, self._beat)


@pytest.fixture
def skip(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes the clock jump by so many seconds, as it has for a process that did not run."""
    skipped = 0.0
    real = anyio.current_time

    def jump(seconds: float) -> None:
        nonlocal skipped
        skipped += seconds

    monkeypatch.setattr(anyio, "current_time", lambda: real() + skipped)
    return jump


@pytest.mark.asyncio
async def test_the_watch_reports_each_wedged_engine_and_beats() -> None:
    dead = _report(loops={"sender": LoopStatus(0, "gone")})
    now = anyio.current_time()
    watching = Watch({name: Watched(name, {0: [(now, report)]}) for name, report in (("a", dead), ("b", _report()))})
    async with watching.running():
        await watching.rounds(3)
    assert watching.wedged == [("a", "rank 0: loop sender died: gone")]


@pytest.mark.asyncio
async def test_a_control_plane_that_stood_still_blames_nobody(skip: Callable[[float], None]) -> None:
    """It was stopped, or its machine slept: what the ranks said meanwhile waits in the sockets."""
    watching = Watch({"a": Watched("a", {0: [(anyio.current_time(), _report())]})})
    async with watching.running():
        await watching.rounds(1)
        skip(10 * WEDGE)
        await watching.rounds(3)
        assert watching.wedged == []


@pytest.mark.asyncio
async def test_a_control_plane_that_is_always_late_finds_what_is_silent_all_the_same(
    skip: Callable[[float], None],
) -> None:
    watching = Watch({"a": Watched("a", {0: [(anyio.current_time(), _report())]})})
    async with watching.running():
        for _ in range(10):
            skip(WEDGE / 4)
            await watching.rounds(1)
    assert [engine for engine, _ in watching.wedged] == ["a"]
