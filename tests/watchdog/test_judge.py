"""The verdict on a rank, from its progress reports alone."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from dsv4ctl.controlplane.link.wire import LedgerCounts, LoopStatus, Progress
from dsv4ctl.controlplane.watchdog.judge import State, judge
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


def test_an_idle_time_in_between_starts_the_clock_again() -> None:
    history = _history(*[_report(41, 1)] * 5, _report(41, 0), *[_report(41, 1)] * 5)
    assert judge(history, 10.0, WEDGE).state is State.BUSY


def test_silence_is_wedged_even_without_work() -> None:
    verdict = judge(_history(_report()), 8.0, WEDGE)
    assert verdict == (State.WEDGED, "no progress report for 8.0 s")


def test_a_dead_loop_is_wedged_at_once() -> None:
    report = _report(loops={"sender": LoopStatus(7, "KeyError: 3"), "loader": LoopStatus(9)})
    assert judge(_history(report), 0.0, WEDGE) == (State.WEDGED, "loop sender died: KeyError: 3")


@pytest.mark.asyncio
async def test_the_watch_reports_each_wedged_rank_and_beats() -> None:
    beats: list[int] = []
    dead = _report(loops={"sender": LoopStatus(0, "gone")})
    ranks = {name: Watched(name, name, [(anyio.current_time(), r)]) for name, r in (("a", dead), ("b", _report()))}
    found: list[tuple[str, str]] = []

    def wedged(rank: Watched, cause: str) -> None:
        found.append((rank.engine, cause))
        del ranks[rank.engine]

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: watch(ranks.values, wedged, WEDGE, lambda: beats.append(1)))
            while len(beats) < 3:  # noqa: ASYNC110 - rounds are what is counted
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    assert found == [("a", "loop sender died: gone")]
