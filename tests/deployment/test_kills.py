"""Any one process killed at a random moment under load. `benchmarks/kills.py` does it two hundred times."""

from __future__ import annotations

import random

import pytest

from deployment import deployed
from kills import CONTROL_PLANE, Victim, series, victims

pytestmark = pytest.mark.asyncio

#: Kills of an engine's process in one deployment, whose control plane is killed last.
KILLS = 2


@pytest.mark.parametrize("ranks", [1, 2])
async def test_whichever_process_dies_everybody_is_told_and_nothing_is_lost(ranks: int) -> None:
    seed = random.SystemRandom().randrange(1_000_000)
    numbers = random.Random(seed)
    print(f"\nseed {seed}")
    lines = f"ranks = {ranks}"
    with deployed(prefill=lines, decode=lines) as deployment:
        await series(deployment, [*numbers.sample(victims(ranks), KILLS), Victim(CONTROL_PLANE)], numbers, print)
