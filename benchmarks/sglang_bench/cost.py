"""What something costs: the same load on a pair with and one without it, in turns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
STEADY = Load(96, 32, 900, 96)
#: More than twice the tokens of the device pool: by their next turn these prompts have left it.
AGAIN = Load(24, 24, 2900, 32, again=True)


class Arm(NamedTuple):
    client: Client
    ports: tuple[int, ...]  #: of its servers


def place(arms: Sequence[Arm], turn: int) -> dict[int, list[int]]:
    """Arms change places every other round: one processor may be slower than another. By port its processors."""
    first = turn // 2 % len(arms)
    return cores.pin([port for arm in (*arms[first:], *arms[:first]) for port in arm.ports])


async def turns(
    arms: Mapping[str, Arm], results: Results, key: str, *, rounds: int, deadline: float, load: Load
) -> None:
    """Each round asks each arm once, the order alternating; the first round warms up and is not counted.

    `ratios`: tokens/s of the last arm over those of the first, round by round. `waited_seconds`: see `cores.waited`.
    """
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    firsts: dict[str, list[float]] = {name: [] for name in arms}
    cached: dict[str, int] = dict.fromkeys(arms, 0)
    waits: dict[str, float] = dict.fromkeys(arms, 0.0)
    errors: list[str] = []
    for turn in range(rounds + 1):
        place([*arms.values()], turn)
        for name in list(arms) if turn % 2 else reversed(list(arms)):
            questions = load.prompts(key, turn)
            before, began = cores.waited(arms[name].ports), time.monotonic()
            replies = await many(arms[name].client, questions, load.new, stream=True, at_once=load.at_once)
            seconds = time.monotonic() - began
            errors += [reply.error for reply in replies if reply.error]
            if turn:
                speeds[name].append(sum(len(reply.ids) for reply in replies) / seconds)
                firsts[name] += [reply.first for reply in replies if reply.first is not None]
                cached[name] += sum(reply.cached or 0 for reply in replies)
                waits[name] += cores.waited(arms[name].ports) - before
        rows = {name: _row(speeds[name], firsts[name], cached[name], waits[name]) for name in arms}
        first, *_, last = speeds.values()
        ratios = [round(other / base, 3) for base, other in zip(first, last, strict=True)]
        results.put(
            key, load=load._asdict(), rounds=turn, errors=errors[:3], ratios=ratios, ratio=spread(ratios), **rows
        )
        if time.monotonic() > deadline:
            return


def _row(speeds: list[float], firsts: list[float], cached: int, waited: float) -> dict[str, Any]:
    return {
        "tokens_per_second": spread(speeds, 1),
        "each": [round(one, 1) for one in speeds],
        "first_token_seconds": spread(firsts),
        "cached_tokens": cached,
        "waited_seconds": round(waited, 3),
    }
