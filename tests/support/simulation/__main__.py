"""`scripts/simulate`: runs plans in virtual time and prints what was seen; exit code 1 if anything was violated."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from simulation.mutants import MUTANTS, Mutant, seeded
from simulation.plan import Plan, idle, large, small
from simulation.shrink import shrink
from simulation.world import Found, simulate

#: Seeds of a run without arguments, and for which a mutant may go unseen.
SEEDS, MUTANT_SEEDS = 50, 60
#: Lines of the story that stand before a violation.
_SHOWN = 40


def run_all(plans: Iterable[Plan], shrinking: bool = True) -> bool:
    """Prints each violation with the smallest plan that shows it, then the sum. Whether there was none."""
    clean = True
    seeds = faults = rooms = leaked = 0
    slowest = simulated = cpu = 0.0
    answers: Counter[str] = Counter()
    for plan in plans:
        found = simulate(plan)
        seeds, faults, rooms = seeds + 1, faults + len(plan.faults), rooms + found.rooms
        leaked, slowest = leaked + found.leaked, max(slowest, found.slowest)
        simulated, cpu = simulated + found.simulated, cpu + found.cpu
        answers += found.answers
        if found.violations:
            clean = False
            show(shrink(found) if shrinking else found)
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(answers.items()))
    print(f"{seeds} runs, {rooms} rooms, {faults} faults, {leaked} leaked pages; clients: {said}")
    print(
        f"slowest end of an abort: {slowest:.0%} of its deadline; {simulated / 3600:.2f} h in {cpu:.1f} s of one core: "
        + ("no violation" if clean else "VIOLATED")
    )
    return clean


def show(found: Found) -> None:
    """The violation in the project's words, and how to see it again."""
    print("\n".join(line[:300] for line in found.story[-_SHOWN:]))
    print(f"\n{found.plan}\n{found.violations[0]}")
    kept = Path(f"simulate-{found.plan.seed}.json")
    kept.write_bytes(msgspec.json.format(msgspec.json.encode(found.plan), indent=1))
    print(f"again: scripts/simulate --replay {kept}\n", flush=True)


def find(mutant: Mutant, seeds: Iterable[int]) -> Found | None:
    """The first of these seeds that shows the fault."""
    with seeded(mutant):
        return next((found for seed in seeds if (found := simulate(small(seed))).violations), None)


def mutate() -> bool:
    caught = 0
    print(f"{'fault':<52} {'seed':>4}  found as")
    for mutant in MUTANTS:
        found = find(mutant, range(MUTANT_SEEDS))
        caught += found is not None
        what = "NOT" if found is None else f"{found.plan.seed:>4}  {str(found.violations[0])[:110]}"
        print(f"{mutant.fault:<52} {what}", flush=True)
    print(f"{caught}/{len(MUTANTS)} found/seeded")
    return caught == len(MUTANTS)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, help="one seed, and its digest")
    what.add_argument("--seeds", type=int, metavar="N", help=f"fresh seeds (default: {SEEDS})")
    what.add_argument("--large", action="store_true", help="64 engines, 10,000 rooms")
    what.add_argument("--days", type=float, help="so many days in which little happens")
    what.add_argument("--replay", type=Path, metavar="FILE", help="a plan that was printed")
    what.add_argument("--mutants", action="store_true", help="seeds each fault and looks for it")
    parser.add_argument("--base", type=int, help="the first of the fresh seeds (default: random, printed)")
    chosen = parser.parse_args(arguments)
    if chosen.mutants:
        return 0 if mutate() else 1
    if chosen.seed is not None:
        found = simulate(small(chosen.seed))
        print(f"seed {chosen.seed}: digest {found.digest}")
        return 0 if run_all([found.plan]) else 1
    if chosen.replay is not None:
        return 0 if run_all([msgspec.json.decode(chosen.replay.read_bytes(), type=Plan)], shrinking=False) else 1
    base = secrets.randbelow(1_000_000_000) if chosen.base is None else chosen.base
    if chosen.large or chosen.days:
        plan = large(base) if chosen.large else idle(base, chosen.days)
        print(f"seed {base}", flush=True)
        return 0 if run_all([plan], shrinking=False) else 1
    count = chosen.seeds or SEEDS
    print(f"seeds {base} to {base + count - 1}", flush=True)
    return 0 if run_all(small(seed) for seed in range(base, base + count)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
