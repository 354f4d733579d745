"""A few waves of aborts. `benchmarks/storms.py` makes twenty of eighty rooms each."""

from __future__ import annotations

import random

import pytest

from deployment import deployed
from storms import FATAL, GENTLE, wave

pytestmark = pytest.mark.asyncio

#: Waves of rooms, of which the last costs an engine.
WAVES, ROOMS = 4, 16


async def test_waves_of_any_kind_leave_nothing() -> None:
    seed = random.SystemRandom().randrange(1_000_000)
    print(f"\nseed {seed}")
    numbers = random.Random(seed)
    kinds = [*numbers.sample(GENTLE, WAVES - 1), numbers.choice(FATAL)]
    with deployed("[deadlines]\nack = 20.0\n", faults=True) as deployment:
        async with deployment.client() as client:
            for kind in kinds:
                print(await wave(client, kind, numbers, ROOMS))
