"""Asks for the verdict on every ready rank, a few times a second."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import anyio

from dsv4ctl.controlplane.link.wire import Progress
from dsv4ctl.controlplane.watchdog.judge import State, judge

#: Seconds between two rounds.
PERIOD = 0.25


class Watched(NamedTuple):
    """One rank of a ready engine."""

    engine: str
    incarnation: str
    history: Sequence[tuple[float, Progress]]


async def watch(
    ranks: Callable[[], Iterable[Watched]],
    wedged: Callable[[Watched, str], None],
    wedge: float,
    beat: Callable[[], None],
) -> None:
    """Calls `wedged(rank, cause)` at each round in which a rank of `ranks()` is found wedged. Never returns.

    `wedged` takes the rank out of what `ranks` gives.
    """
    while True:
        beat()
        now = anyio.current_time()
        for rank in list(ranks()):
            verdict = judge(rank.history, now, wedge)
            if verdict.state is State.WEDGED:
                wedged(rank, verdict.cause or "")
        await anyio.sleep(PERIOD)
