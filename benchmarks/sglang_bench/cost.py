"""What something costs: the same load on a pair with and one without it, in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_bench import cores
from sglang_bench.ask import Client, many, prompt
from sglang_bench.results import Results, spread


class Load(NamedTuple):
    requests: int  #: in a round
    at_once: int  #: an answer makes room for the next; all of a round at once are a burst
    length: int  #: tokens of a prompt
    new: int
    again: bool = False  #: each round asks what the one before it asked

    def prompts(self, key: str, turn: int) -> list[list[int]]:
        """Of another `key`, other prompts: an engine of two comparisons has not seen them."""
        said = "again" if self.again else str(turn)
        return [prompt(f"{key} {said} {at}", self.length) for at in range(self.requests)]


BURST = Load(32, 32, 900, 96)
STEADY = Load(64, 32, 900, 96)
#: More than twice the tokens of the device pool: by their next turn these prompts have left it.
AGAIN = Load(24, 24, 2900, 32, again=True)


class Arm(NamedTuple):
    client: Client
    ports: tuple[int, ...]  #: of its servers


async def turns(
    arms: Mapping[str, Arm], results: Results, key: str, *, rounds: int, deadline: float, load: Load
) -> None:
    """Each round asks each arm once, the order alternating; the first round warms up and is not counted.

    `ratios`: tokens/s of the last arm over those of the first, round by round, and `mean_ratio` with its standard
    error. Servers share processors, see `cores`: `shared_processors`, 0 if they do not.
    """
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    firsts: dict[str, list[float]] = {name: [] for name in arms}
    cached: dict[str, int] = dict.fromkeys(arms, 0)
    errors: list[str] = []
    order = list(arms)
    async with cores.shared([arm.ports for arm in arms.values()]) as together:
        for turn in range(rounds + 1):
            for name in order if turn % 2 else reversed(order):
                together.asked(order.index(name))
                questions, began = load.prompts(key, turn), time.monotonic()
                replies = await many(arms[name].client, questions, load.new, stream=True, at_once=load.at_once)
                seconds = time.monotonic() - began
                errors += [reply.error for reply in replies if reply.error]
                if turn:
                    speeds[name].append(sum(len(reply.ids) for reply in replies) / seconds)
                    firsts[name] += [reply.first for reply in replies if reply.first is not None]
                    cached[name] += sum(reply.cached or 0 for reply in replies)
            results.put(
                key, load=load._asdict(), rounds=turn, errors=errors[:3], shared_processors=len(together.processors),
                **ratios([*speeds.values()]),
                **{name: _row(speeds[name], firsts[name], cached[name]) for name in arms},
            )  # fmt: skip
            if time.monotonic() > deadline:
                return


def ratios(speeds: list[list[float]]) -> dict[str, Any]:
    """Of the last arm to the first, round by round."""
    each = [last / first for first, last in zip(speeds[0], speeds[-1], strict=True)]
    if len(each) < 2:
        return {}
    mean, error = statistics.fmean(each), statistics.stdev(each) / math.sqrt(len(each))
    shown = [round(ratio, 3) for ratio in each]
    return {"ratios": shown, "ratio": spread(shown), "mean_ratio": [round(mean, 4), round(error, 4)]}


def _row(speeds: list[float], firsts: list[float], cached: int) -> dict[str, Any]:
    return {
        "tokens_per_second": spread(speeds, 1),
        "each": [round(one, 1) for one in speeds],
        "first_token_seconds": spread(firsts),
        "cached_tokens": cached,
    }
