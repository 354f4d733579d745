"""Any one process killed at random moments under load, each time with everything checked that S5 promises.

    python benchmarks/kills.py [--moments 200] [--seed N] [--out benchmarks/kills.json]

Deployments of one-rank and of two-rank engines take turns; in each a few ranks are killed, then the control plane.
Every client must have the oracle's answer or an error, both sides' rooms must have ended, no page may be lost or in
quarantine, and the next answers must be the oracle's; engines must be gone with their control plane. The first
violation ends the run with its seed. Figures are written after every deployment.
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
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from deployment import deployed
from kills import CONTROL_PLANE, Killed, Victim, series, victims

#: Kills of ranks in one deployment, by ranks of an engine: few enough that no engine is given up.
RANKS_KILLED = {1: 4, 2: 2}


def figures(moments: list[Killed], seed: int, violation: str | None) -> dict[str, Any]:
    """What is written: seconds as median and maximum, by victim."""
    by_victim: dict[str, Any] = {}
    for victim in sorted({moment.victim for moment in moments}):
        mine = [moment for moment in moments if moment.victim == victim]
        by_victim[victim] = {"kills": len(mine)} | {
            name: {"median": statistics.median(values), "max": max(values)}
            for name in ("told_s", "ended_s", "back_s")
            for values in [[getattr(moment, name) for moment in mine]]
        }
    states: Counter[str] = Counter()
    for moment in moments:
        states.update(moment.in_flight)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, shared",
        "seed": seed,
        "moments": len(moments),
        "violations": 0 if violation is None else 1,
        "violation": violation,
        "answers": sum(moment.answered for moment in moments),
        "errors_told": sum(moment.refused for moment in moments),
        "rooms_in_flight_by_state": dict(states.most_common()),
        "by_victim": by_victim,
    }


def run(moments: int, seed: int, out: Path) -> str | None:
    """None, or what did not hold."""
    numbers = random.Random(seed)
    seen: list[Killed] = []
    violation = None

    def tell(killed: Killed) -> None:
        seen.append(killed)
        print(len(seen), killed, flush=True)

    while len(seen) < moments and violation is None:
        ranks = 1 if numbers.random() < 0.5 else 2
        chosen = [numbers.choice(victims(ranks)) for _ in range(RANKS_KILLED[ranks])]
        chosen = [*chosen, Victim(CONTROL_PLANE)][: moments - len(seen)]
        own = numbers.randrange(2**32)
        lines = f"ranks = {ranks}"
        try:
            with deployed(prefill=lines, decode=lines) as deployment:
                anyio.run(partial(series, deployment, chosen, random.Random(own), tell))
        except (AssertionError, TimeoutError, ExceptionGroup) as error:
            violation = f"deployment of seed {own}, {chosen}: {error!r}"
            print(violation, *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
        out.write_text(json.dumps(figures(seen, seed, violation), indent=1) + "\n")
    return violation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("kills.json"))
    given = parser.parse_args()
    print("seed", given.seed, flush=True)
    violation = run(given.moments, given.seed, given.out)
    print(given.out.read_text())
    raise SystemExit(violation is not None)


if __name__ == "__main__":
    main()
