"""Asks for the verdict on every ready engine, a few times a second."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import anyio

from dsv4ctl.controlplane.link.server import LATE
from dsv4ctl.controlplane.watchdog.judge import History, State, judge_engine

#: Seconds between two rounds.
PERIOD = 0.25


class Watched(NamedTuple):
    """One ready engine: the progress reports of its ranks, by number."""

    engine: str
    ranks: Mapping[int, History]


async def watch(
    engines: Callable[[], Iterable[Watched]],
    wedged: Callable[[str, str], None],
    wedge: float,
    beat: Callable[[], None],
) -> None:
    """Calls `wedged(engine, cause)` at each round in which one of `engines()` is found wedged. Never returns.

    `wedged` takes the engine out of what `engines` gives. A standstill of this process is allowed for once in two
    times `wedge` seconds: where every round is late, silence counts all the same.
    """
    awake = last = allowed = anyio.current_time()
    while True:
        beat()
        now = anyio.current_time()
        if now - last > PERIOD + LATE and now >= allowed:
            awake, allowed = now, now + 2 * wedge
        last = now
        for engine in list(engines()):
            verdict = judge_engine(_heard_since(awake, engine.ranks), now, wedge)
            if verdict.state is State.WEDGED:
                wedged(engine.engine, verdict.cause or "")
        await anyio.sleep(PERIOD)


def _heard_since(awake: float, ranks: Mapping[int, History]) -> Mapping[int, History]:
    """What came before this process stood still is as of its end: the reports of that time wait in the sockets."""
    return {
        number: [(max(at, awake), report) for at, report in history] if history and history[0][0] < awake else history
        for number, history in ranks.items()
    }
