"""Is an engine alive? A pure verdict over its ranks' progress reports; `/health` is never asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from dsv4ctl.controlplane.link.wire import Progress

#: Counters that move when work is done, beside forward steps. Queue lengths do not count: arrivals
#: and clients that give up change them on a wedged engine too.
WORK_COUNTERS = ("tokens_out", "layers_computed", "host_tokens_loaded", "digests_compared")
#: The loop of a rank whose runs count the rounds that all ranks of an engine enter together.
STEP_LOOP = "step"

History = Sequence[tuple[float, Progress]]


class State(Enum):
    IDLE = "idle"
    BUSY = "busy"
    PAUSED = "paused"
    WEDGED = "wedged"


class Verdict(NamedTuple):
    state: State
    cause: str | None = None


def judge(history: History, now: float, wedge: float) -> Verdict:
    """The verdict on one rank at `now`; `history` is (when it came, report), oldest first, in monotonic seconds.

    Wedged: a background loop died; or no report for `wedge` seconds; or runnable work all that time
    and nothing done of it. One that says that it is paused may stand for ever, but neither die nor fall silent.
    No history yet is idle: readiness has its own deadline.
    """
    if not history:
        return Verdict(State.IDLE)
    last_at, last = history[-1]
    dead = dead_loop(last)
    if dead is not None:
        return Verdict(State.WEDGED, dead)
    if now - last_at >= wedge:
        return Verdict(State.WEDGED, _silent(now - last_at))
    if last.paused:
        return Verdict(State.PAUSED)
    if last.work == 0:
        return Verdict(State.IDLE)
    stands = now - _since(history, _done)
    if stands < wedge:
        return Verdict(State.BUSY)
    queues = ", ".join(f"{name} {length}" for name, length in last.queues.items() if length)
    return Verdict(
        State.WEDGED,
        f"{last.work} runnable and nothing done for {stands:.1f} s: "
        f"{last.steps} steps since start, queues {queues or 'empty'}",
    )


def judge_engine(ranks: Mapping[int, History], now: float, wedge: float) -> Verdict:
    """The verdict on an engine; `ranks` are histories by number. The cause names the rank that holds up the others.

    Ranks stand together, so the first that is found wedged need not be at fault: a dead loop is, else a rank
    that has fallen silent, else the one that did not enter the round in which the others wait.
    """
    verdicts = {number: judge(history, now, wedge) for number, history in ranks.items()}
    wedged = {number: verdict for number, verdict in verdicts.items() if verdict.state is State.WEDGED}
    if not wedged and _behind(ranks, now, wedge) is None:
        states = {verdict.state for verdict in verdicts.values()}
        return Verdict(next((state for state in (State.PAUSED, State.BUSY) if state in states), State.IDLE))
    known = {number: history[-1] for number, history in ranks.items() if history}
    for number, (_, report) in known.items():
        if dead_loop(report) is not None:
            return Verdict(State.WEDGED, f"rank {number}: {dead_loop(report)}")
    # Of ranks that stand, one may be heard of a second after the other: whoever is at fault stands nearly as long as
    # who was found.
    behind = _behind(ranks, now, wedge / 2)
    quiet, (heard, _) = min(known.items(), key=lambda item: item[1][0])
    if now - heard >= wedge / 2:
        return Verdict(State.WEDGED, f"rank {quiet}: {_silent(now - heard)}")
    if behind is not None:
        return Verdict(State.WEDGED, f"rank {behind[0]}: {behind[1]}")
    number, verdict = next(iter(wedged.items()))
    return Verdict(State.WEDGED, f"rank {number}: {verdict.cause}")


def _behind(ranks: Mapping[int, History], now: float, limit: float) -> tuple[int, str] | None:
    """The rank that did not enter a round for `limit` seconds while another waits in it, and that as a cause.

    Idle ranks enter rounds too, so that one that never comes is found before a request has to wait for it.
    """
    if len(ranks) < 2 or not all(ranks.values()):
        return None
    rounds = {number: _rounds(history[-1][1]) for number, history in ranks.items()}
    last, first = min(rounds, key=rounds.__getitem__), max(rounds, key=rounds.__getitem__)
    stands = now - max(_since(history, _rounds) for history in ranks.values())
    if rounds[last] == rounds[first] or stands < limit:
        return None
    return last, f"round {rounds[first]} not entered, in which rank {first} waits, for {stands:.1f} s"


def _since(history: History, fact: Callable[[Progress], object]) -> float:
    """Since when every report says the same of `fact` as the last one."""
    since, last = history[-1]
    for at, report in reversed(history):
        if fact(report) != fact(last):
            break
        since = at
    return since


def _done(report: Progress) -> tuple[int, ...]:
    """What work was done; being without work is a change too."""
    return (int(report.work > 0), report.steps, *(report.counters.get(name, 0) for name in WORK_COUNTERS))


def _rounds(report: Progress) -> int:
    loop = report.loops.get(STEP_LOOP)
    return 0 if loop is None else loop.runs


def dead_loop(report: Progress) -> str | None:
    """Which background loop of the rank died and of what, or None."""
    return next((f"loop {name} died: {loop.error}" for name, loop in report.loops.items() if loop.error), None)


def _silent(seconds: float) -> str:
    return f"no progress report for {seconds:.1f} s"
