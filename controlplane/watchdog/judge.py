"""Is a rank alive? A pure verdict over its progress reports; `/health` is never asked."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from dsv4ctl.controlplane.link.wire import Progress

#: Counters that move when work is done, beside forward steps. Queue lengths do not count: arrivals
#: and clients that give up change them on a wedged engine too.
WORK_COUNTERS = ("tokens_out", "host_tokens_loaded", "digests_compared")


class State(Enum):
    IDLE = "idle"
    BUSY = "busy"
    WEDGED = "wedged"


class Verdict(NamedTuple):
    state: State
    cause: str | None = None


def judge(history: Sequence[tuple[float, Progress]], now: float, wedge: float) -> Verdict:
    """The verdict at `now`; `history` is (when it came, report), oldest first, in monotonic seconds.

    Wedged: a background loop died; or no report for `wedge` seconds; or runnable work all that time
    and nothing done of it. No history yet is idle: readiness has its own deadline.
    """
    if not history:
        return Verdict(State.IDLE)
    last_at, last = history[-1]
    for name, loop in last.loops.items():
        if loop.error is not None:
            return Verdict(State.WEDGED, f"loop {name} died: {loop.error}")
    if now - last_at >= wedge:
        return Verdict(State.WEDGED, f"no progress report for {now - last_at:.1f} s")
    if last.work == 0:
        return Verdict(State.IDLE)
    since = last_at
    for at, report in reversed(history):
        if report.work == 0 or _done(report) != _done(last):
            break
        since = at
    if now - since < wedge:
        return Verdict(State.BUSY)
    queues = ", ".join(f"{name} {length}" for name, length in last.queues.items() if length)
    return Verdict(
        State.WEDGED,
        f"{last.work} runnable and nothing done for {now - since:.1f} s: "
        f"{last.steps} steps since start, queues {queues or 'empty'}",
    )


def _done(report: Progress) -> tuple[int, ...]:
    return (report.steps, *(report.counters.get(name, 0) for name in WORK_COUNTERS))
