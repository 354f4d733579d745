"""What a rank tells of itself, when its process ends, and that every hook is in place."""

from __future__ import annotations

import contextlib
import gc
import pkgutil
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import sglang.srt.managers.scheduler as sglang_scheduler
from sglang.srt.disaggregation import decode, utils
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

from dsv4ctl.controlplane.link.wire import LoopStatus, Role
from dsv4ctl.controlplane.rooms.states import Cancellable
from dsv4ctl.engine_adapters.sglang import rank, verify
from dsv4ctl.engine_adapters.sglang.hooks import life, rooms_decode
from sglang_contract.checks import alone
from sglang_contract.situations import loading, something_to_read, world
from sglang_world import World

#: Our functions by target, once they are registered.
FUNCTIONS: dict[str, Any] = {}


@alone
def a_rank_tells_its_tickets_and_last_events(_: bool) -> None:
    made = world(Role.PREFILL, True)
    loading(made)
    told = made.rank.query("evidence")
    assert {event[2] for event in told["trace"]} >= {"lease", "request"}, told
    assert {ticket["consumer"] for ticket in told["tickets"]} == {"load"}, told
    assert made.rank.query("evidence 7.1") == {"tickets": [], "trace": []}


@alone
def a_paused_scheduler_says_so_and_has_no_runnable_work(_: bool) -> None:
    made = World(Role.PREFILL)
    scheduler, stock = made.scheduler, sglang_scheduler.Scheduler
    scheduler.__dict__.update(
        waiting_queue=[object()] * 3,
        disagg_prefill_bootstrap_queue=SimpleNamespace(queue=[]),
        disagg_prefill_inflight_queue=[],
        disaggregation_mode=utils.DisaggregationMode.PREFILL,
        _engine_paused=False,
        _pause_started_at=None,
        _pause_intervals=[],
    )
    made.rank._link.send = made.frames.append

    def reported() -> tuple[bool, int]:
        made.rank.report()
        return made.frames[-1].paused, made.frames[-1].work

    assert reported() == (False, 3)
    stock.pause_generation(scheduler, PauseGenerationReqInput(mode="in_place"))
    assert reported() == (True, 0)
    stock.continue_generation(scheduler, ContinueGenerationReqInput(torch_empty_cache=False))
    assert reported() == (False, 3)


def _attended(made: Any, sleep: Any, clock: Any) -> dict[str, list[float]]:
    """What the loop of a rank and its thread did and when, of which the thread sleeps so."""
    did: list[tuple[float, str]] = []
    made.rank._hello = lambda url: None
    made.rank._link = mock.Mock(**{"connect.return_value": SimpleNamespace(progress_interval=0.25)})
    made.rank._link.take_in = lambda: did.append((clock(), "took in"))
    made.rank._link.fileno.return_value = something_to_read()
    made.rank.hears(something_to_read(), lambda: bool(did.append((clock(), "heard"))))
    made.rank.report = lambda: did.append((clock(), "reported"))
    made.rank.agent.tick = lambda: did.append((clock(), "agent"))
    made.rank.rooms.tick = lambda: did.append((clock(), "rooms"))
    made.rank._loops["agent"] = LoopStatus(0)
    with (
        mock.patch.object(rank, "time", SimpleNamespace(sleep=sleep, monotonic=clock)),
        contextlib.suppress(SystemExit),
    ):
        made.rank._serve()
    made.rank._link.start.assert_called_once_with(reads=False)
    whats = ("took in", "heard", "agent", "rooms", "reported")
    times = {what: [at for at, done in did if done == what] for what in whats}
    assert times["agent"] == times["rooms"] == times["reported"]
    assert times["took in"] == times["heard"]
    return times


@alone
def loop_reports_once_in_an_interval_and_a_thread_while_it_takes_no_turn(_: bool) -> None:
    for last in (0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9):
        times, flushed, slept = _stands_after(last)
        alone = [at for at in times["reported"] if at > last]
        assert last + 0.5 <= alone[0] <= last + 0.75, (last, times)
        assert [round(after - at, 2) for at, after in pairwise(alone)] == [0.25] * (len(alone) - 1), (last, times)
        assert times["reported"][: -len(alone)] == [at for at in (0.0, 0.3, 0.6, 0.9) if at <= last], (last, times)
        turns = [at / 10 for at in range(round(last * 10) + 1)]
        assert times["heard"] == [*turns, *alone], (last, times)
        assert flushed == len(alone)
    assert slept[:4] == [0.25, 0.5, 0.5, 0.25], "a loop that goes on is looked at twice a second"


def _stands_after(last: float) -> tuple[dict[str, list[float]], int, list[float]]:
    """Of a loop that takes a turn each 0.1 s, and none after that one; how often its thread flushed; how it slept."""
    made = World(Role.PREFILL)
    now, slept = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        """The thread's."""
        nonlocal now
        slept.append(seconds)
        until = now + seconds
        while now < until - 1e-9:
            if now <= last and now * 10 % 1 == 0:
                made.rank.step()
            now = round(now + 0.05, 2)
        if now > 2.2:
            raise SystemExit

    return _attended(made, sleep, lambda: now), made.rank._link.flush.call_count, slept


@alone
def loop_of_a_process_that_was_stopped_reports_and_no_thread(_: bool) -> None:
    made = World(Role.PREFILL)
    now, of_loop = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        """The thread's, which is late: behind a turn of the loop the process was stopped for 0.4 s."""
        nonlocal now
        now = round(now + seconds / 2, 3)
        made.rank.step()
        of_loop.append(now)
        now = round(now + 0.4, 3)
        if now > 5.0:
            raise SystemExit

    times = _attended(made, sleep, lambda: now)
    assert times["reported"] == of_loop, times
    assert len(of_loop) == 10
    made.rank._link.flush.assert_not_called()


def _connected(role: Role) -> tuple[Any, mock.Mock]:
    """A rank whose threads do not run, and its link."""
    made = world(role, True)
    made.rank._link, made.rank.thread = mock.Mock(), mock.Mock()
    made.rank.connect()
    return made, made.rank._link


@alone
def decode_rank_tells_once_in_a_turn_what_happened_in_it(_: bool) -> None:
    made, link = _connected(Role.DECODE)
    link.gather.assert_called_once_with()
    rooms_decode.queues(lambda scheduler: link.flush.assert_not_called(), made.scheduler)
    link.flush.assert_called_once_with()


@alone
def prefill_rank_tells_at_once(_: bool) -> None:
    """A turn of its loop lasts as long as a prompt."""
    _, link = _connected(Role.PREFILL)
    link.gather.assert_not_called()


@alone
def a_scheduler_without_chunks_declares_whole_prompts(_: bool) -> None:
    """`chunked_prefill_size` is the scheduler's own, None if switched off."""
    assert "chunked_prefill_size" in sglang_scheduler.Scheduler.init_chunked_prefill.__code__.co_names
    for role, size, declared in (
        (Role.PREFILL, 8192, Cancellable.CHUNK),
        (Role.PREFILL, None, Cancellable.PROMPT),
        (Role.DECODE, None, Cancellable.CHUNK),
    ):
        made = World(role)
        made.scheduler.chunked_prefill_size = size
        assert made.rank._hello("http://x").cancellable is declared
        assert made.rank._hello("http://x").in_order


@alone
def no_collection_looks_through_what_was_built_at_start(_: bool) -> None:
    made = world(Role.DECODE, True)
    made.rank.connect = lambda: None
    built = len(gc.get_objects())
    try:
        assert life.connect(lambda scheduler: gc.get_freeze_count(), made.scheduler) > built / 2 > 1000
    finally:
        gc.unfreeze()


@alone
def what_the_benchmark_times_is_there(_: bool) -> None:
    sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
    from sglang_bench import parts

    assert all(callable(pkgutil.resolve_name(target)) for target in parts.PARTS.values())


@alone
def speculation_ends_the_process(_: bool) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    scheduler = SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE"))
    with contextlib.suppress(SystemExit):
        life.attach(lambda _: None, scheduler)
        raise AssertionError("a rank with a draft model is attached")


@alone
def a_cache_on_the_host_of_a_decode_engine_ends_the_process(_: bool) -> None:
    for role, controller, ends in ((Role.DECODE, object(), True), (Role.DECODE, None, False), (Role.PREFILL, 1, False)):
        tree = SimpleNamespace(cache_controller=controller)
        scheduler = SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda: True), tree_cache=tree)
        ended = True
        with (
            mock.patch.object(life, "get_parallel", return_value=SimpleNamespace(tp_rank=0, tp_size=1)),
            mock.patch.object(rank, "attach", return_value=SimpleNamespace(role=role)),
            contextlib.suppress(SystemExit),
        ):
            life.attach(lambda _: None, scheduler)
            ended = False
        assert ended is ends


@alone
def a_missing_hook_is_named(_: bool) -> None:
    target = "sglang.srt.managers.scheduler.Scheduler.run_batch"
    present = sglang_scheduler.Scheduler.run_batch
    try:
        sglang_scheduler.Scheduler.run_batch = present.__wrapped__
        assert verify.problems(FUNCTIONS, sys.modules) == [f"{target} is not hooked"]
        sglang_scheduler.Scheduler.run_batch = present
        sglang_scheduler.Scheduler.another = present.__wrapped__
        assert "also called another" in verify.problems(FUNCTIONS, sys.modules)[0]
        del sglang_scheduler.Scheduler.another
        kept = type("Kept", (sglang_scheduler.Scheduler,), {"run_batch": lambda self: None})
        assert "overridden by" in verify.problems(FUNCTIONS, sys.modules)[0]
        del kept
        decode.stale = utils._apply_metadata_gate.__wrapped__
        assert any("imported by sglang.srt.disaggregation.decode" in p for p in verify.problems(FUNCTIONS, sys.modules))
    finally:
        sglang_scheduler.Scheduler.run_batch = present
        if hasattr(decode, "stale"):
            del decode.stale
