"""What something costs: the same load on a pair with and one without it, in turns."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import anyio

from sglang_bench import cores
from sglang_bench.ask import Client, Reply, many, prompt
from sglang_bench.results import Results, spread


class Load(NamedTuple):
    at_once: int  #: requests: a whole round of them, or, in slices, each followed by the next
    length: int  #: tokens of a prompt
    new: int
    again: bool = False  #: each round asks what the one before it asked

    def prompts(self, key: str, turn: int) -> list[list[int]]:
        """Of another `key`, other prompts: an engine of two comparisons has not seen them."""
        said = "again" if self.again else str(turn)
        return [prompt(f"{key} {said} {at}", self.length) for at in range(self.at_once)]


#: Seconds of a slice, slices of each arm in a round, rounds that are not counted.
_SLICE, _SLICES, _WARM_ROUNDS = 0.2, 8, 3
NEW = Load(32, 900, 96)
#: More than twice the tokens of the device pool: by their next turn these prompts have left it.
AGAIN = Load(24, 2900, 32, again=True)


class Arm(NamedTuple):
    client: Client
    ports: tuple[int, ...]  #: of its servers


async def turns(
    arms: Mapping[str, Arm], results: Results, key: str, *, rounds: int, deadline: float, load: Load
) -> None:
    """Each round asks each arm once, the order alternating; the first round warms up and is not counted.

    Of tokens/s: see `ratios`. Servers share processors, see `cores`: `shared_processors`, 0 if they do not.
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
                replies = await many(arms[name].client, questions, load.new, stream=True)
                seconds = time.monotonic() - began
                errors += [reply.error for reply in replies if reply.error]
                if turn:
                    speeds[name].append(sum(len(reply.ids) for reply in replies) / seconds)
                    firsts[name] += _firsts(replies)
                    cached[name] += sum(reply.cached or 0 for reply in replies)
            results.put(
                key, load=load._asdict(), rounds=turn, errors=errors[:3], shared_processors=len(together.processors),
                **ratios([*speeds.values()]),
                **{name: _row(speeds[name], firsts[name], cached[name]) for name in arms},
            )  # fmt: skip
            if time.monotonic() > deadline:
                return


async def slices(arms: Mapping[str, Arm], *, seconds: float, load: Load, turn: int = 0) -> dict[str, Any]:
    """Every arm is asked all the time, and they run in slices of a fifth of a second: a b a b ...

    What neighbours take of a processor changes within half a second, so arms that take such turns have the same of it.
    Clients and control planes go on in the other's slice: what they do then is hidden, for each request that waits for
    them as a slice ends. All tokens count, whenever they are told, by the seconds of the arm's own slices: of tokens/s
    by round, `seconds` in all after some that warm up, see `ratios`. `processor_seconds`: what the threads had that
    share processors. Each `turn` another arm begins, and see `cores.shared`. Seconds to a first token have the other's
    slices in them.

    Raises RuntimeError where servers can't share processors, if a request failed, and if an arm said nothing.
    """
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    said: dict[str, list[Reply]] = {name: [] for name in arms}
    order = deque(enumerate(arms))
    order.rotate(-turn)
    rounds = max(1, round(seconds / (_SLICE * _SLICES * len(arms))))
    async with cores.shared([arm.ports for arm in arms.values()], turn) as together:
        if not together.arms:
            raise RuntimeError("compared servers can't share processors here: see `cores.shared`")
        async with anyio.create_task_group() as tasks:
            for name, arm in arms.items():
                for at in range(load.at_once):
                    tasks.start_soon(keep_asking, arm.client, said[name], load, at)
            for _ in range(_WARM_ROUNDS):
                await _round(together, order)
            ran, asked = together.ran(), {name: len(replies) for name, replies in said.items()}
            for _ in range(rounds):
                before = {name: _tokens(said[name]) for name in arms}
                for name, lasted in (await _round(together, order)).items():
                    speeds[name].append((_tokens(said[name]) - before[name]) / lasted)
            ran = [after - before for before, after in zip(ran, together.ran(), strict=True)]
            tasks.cancel_scope.cancel()
    errors = [f"{name}: {reply.error}" for name, replies in said.items() for reply in replies if reply.error]
    silent = [f"{name}: no token" for name, found in speeds.items() if not any(found)]
    if errors or silent:
        raise RuntimeError(f"{len(errors)} requests failed: {(errors or silent)[0]}")
    firsts = {name: spread(_firsts(replies[asked[name] :])) for name, replies in said.items()}
    return {
        "slice_seconds": _SLICE, "slices": rounds * _SLICES, "shared_processors": len(together.processors),
        "spinning_threads": dict(zip(arms, map(len, together.arms), strict=True)),
        "processor_seconds": dict(zip(arms, (round(one, 2) for one in ran), strict=True)),
        **ratios([*speeds.values()]),
        **{
            name: {"tokens_per_second": spread(found, 1), "first_token_seconds": firsts[name]}
            for name, found in speeds.items()
        },
    }  # fmt: skip


async def _round(together: cores.Shared, order: Iterable[tuple[int, str]]) -> dict[str, float]:
    """Seconds of each arm's slices."""
    lasted = {name: 0.0 for _, name in order}
    for at, name in [*order] * _SLICES:
        began = time.monotonic()
        together.asked(at)
        await anyio.sleep(_SLICE)
        lasted[name] += time.monotonic() - began
    return lasted


async def keep_asking(client: Client, said: list[Reply], load: Load, at: int) -> None:
    """One answer after another, until one fails; the first is shorter the earlier `at` is: not all end at once.

    Always to the same prompt if the load is of such.
    """
    new = load.new * (at + 1) // load.at_once
    for number in itertools.count():
        said.append(reply := Reply())
        asked = prompt(f"{at} again" if load.again else f"{at} {number}", load.length)
        await client.ask(asked, new, stream=True, reply=reply)
        if reply.error:
            return
        new = load.new


def _firsts(said: list[Reply]) -> list[float]:
    return [reply.first for reply in said if reply.first is not None]


def _tokens(said: list[Reply]) -> int:
    return sum(len(reply.ids) for reply in said)


def ratios(speeds: list[list[float]]) -> dict[str, Any]:
    """Of the last arm to the first: round by round, and of their means, with the standard error of a ratio estimate.

    A round in which the first said nothing has no ratio, and counts in the means.
    """
    first, last = speeds[0], speeds[-1]
    if len(first) < 2 or not any(first):
        return {}
    base, whole = statistics.fmean(first), statistics.fmean(last) / statistics.fmean(first)
    error = statistics.stdev(b - whole * a for a, b in zip(first, last, strict=True)) / math.sqrt(len(first)) / base
    each = [round(b / a, 3) for a, b in zip(first, last, strict=True) if a]
    return {"ratios": each, "ratio": spread(each), "mean_ratio": [round(whole, 4), round(error, 4)]}


def between(starts: Sequence[float]) -> list[float | None]:
    """The mean of what each start found, and its standard error, None of one: what a process has by chance is in it."""
    error = round(statistics.stdev(starts) / math.sqrt(len(starts)), 4) if len(starts) > 1 else None
    return [round(statistics.fmean(starts), 4), error]


def _row(speeds: list[float], firsts: list[float], cached: int) -> dict[str, Any]:
    return {
        "tokens_per_second": spread(speeds, 1),
        "each": [round(one, 1) for one in speeds],
        "first_token_seconds": spread(firsts),
        "cached_tokens": cached,
    }
