"""Waves of aborts in a row on one deployment: every page back after each, the next answers equal to the oracle's.

    python benchmarks/storms.py [--waves 20] [--rooms 80] [--seed N] [--out benchmarks/storms.json]

Kinds take turns: everyone, half, one after the other, clients who leave (at once, in every room state, before their
rooms are known), from all sides at once, an engine killed in the middle, writes whose end nobody knows. Every ack
comes twice, and once more when its room is over. The first violation ends the run with its seed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
from collections import Counter
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from deployment import Deployment, deployed
from storms import FATAL, GENTLE, Wave, wave

#: Seconds in which everything is to be back after a wave that costs no engine.
BACK_WITHIN = 2.0


async def waves(deployment: Deployment, number: int, rooms: int, numbers: random.Random) -> list[Wave]:
    """Raises AssertionError, TimeoutError or ExceptionGroup at the first violation."""
    seen: list[Wave] = []
    kinds = [*GENTLE, *FATAL]
    async with deployment.client() as client:
        for at in range(number):
            seen.append(await wave(client, kinds[at % len(kinds)], numbers, rooms))
            print(at + 1, seen[-1], flush=True)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waves", type=int, default=20)
    parser.add_argument("--rooms", type=int, default=80)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("storms.json"))
    given = parser.parse_args()
    print("seed", given.seed, flush=True)
    # The decode engine holds a whole wave at once: no room waits for another's pages.
    pages = 10 * given.rooms
    with deployed("[deadlines]\nack = 20.0\n", decode=f"reference = {{ device_pages = {pages} }}", faults=True) as here:
        seen = anyio.run(partial(waves, here, given.waves, given.rooms, random.Random(given.seed)))
    found: Counter[str] = Counter()
    for one in seen:
        found.update(one.found_in)
    gentle = [one.back_s for one in seen if one.kind not in {kind.__name__ for kind in FATAL}]
    figures = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, shared",
        "seed": given.seed,
        "waves": len(seen),
        "rooms_aborted": sum(one.aborted for one in seen),
        "aborts_by_state": dict(found.most_common()),
        "back_s": {"median": statistics.median(gentle), "max": max(gentle), "goal": BACK_WITHIN},
        "by_wave": [one._asdict() for one in seen],
    }
    given.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures["back_s"]))
    raise SystemExit(max(gentle) > BACK_WITHIN)


if __name__ == "__main__":
    main()
