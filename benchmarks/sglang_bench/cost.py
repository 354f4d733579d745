"""What the hooks and the gateway cost: the same load on a pair with and one without, in turns."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sglang_bench.ask import Client, many, prompt
from sglang_bench.results import Results, spread

CONCURRENT, LENGTH, NEW = 32, 900, 96


async def turns(arms: Mapping[str, Client], results: Results, key: str, *, rounds: int, deadline: float) -> None:
    """Each round asks each arm once, the order alternating; the first round warms up and is not counted."""
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    firsts: dict[str, list[float]] = {name: [] for name in arms}
    errors: list[str] = []
    for turn in range(rounds + 1):
        for name in list(arms) if turn % 2 else reversed(list(arms)):
            questions = [prompt(f"cost {turn} {at}", LENGTH) for at in range(CONCURRENT)]
            began = time.monotonic()
            replies = await many(arms[name], questions, NEW, stream=True)
            seconds = time.monotonic() - began
            errors += [reply.error for reply in replies if reply.error]
            if turn:
                speeds[name].append(sum(len(reply.ids) for reply in replies) / seconds)
                firsts[name] += [reply.first for reply in replies if reply.first is not None]
        results.put(key, rounds=turn, errors=errors[:3], **{name: _row(speeds[name], firsts[name]) for name in arms})
        if time.monotonic() > deadline:
            return


def _row(speeds: list[float], firsts: list[float]) -> dict[str, Any]:
    return {
        "tokens_per_second": spread(speeds, 1),
        "each": [round(one, 1) for one in speeds],
        "first_token_seconds": spread(firsts),
    }
