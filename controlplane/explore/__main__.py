"""`scripts/explore`: walks the worlds, prints what was seen; exit code 1 if an invariant broke or a mutant got away."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence

from dsv4ctl.controlplane.explore.mutants import MUTANTS, Mutant, seeded
from dsv4ctl.controlplane.explore.search import Found, search
from dsv4ctl.controlplane.explore.worlds import DEEP, PLANS, QUICK, world

#: States of a mutant's world at most: each is found long before.
MUTANT_LIMIT = 100_000


def explore(names: Sequence[str]) -> bool:
    """Prints a line a world, and the shortest trace to a violation. Returns whether there was none."""
    print(f"{'world':<44} {'states':>9} {'transitions':>11} {'depth':>5} {'ended':>7} {'seconds':>7}")
    clean, states, transitions, seconds = True, 0, 0, 0.0
    for name in names:
        found = search(world(PLANS[name]))
        states, transitions, seconds = states + found.states, transitions + found.transitions, seconds + found.seconds
        print(_line(found), flush=True)
        if found.violation is not None:
            clean = False
            print(_trace(found))
    verdict = "no violation" if clean else "VIOLATED"
    print(f"{len(names)} worlds, {states:,} states, {transitions:,} transitions, {seconds:.1f} s: {verdict}")
    return clean


def find(mutant: Mutant) -> Found:
    """What its world shows while the fault is in."""
    with seeded(mutant):
        return search(world(PLANS[mutant.world]), MUTANT_LIMIT)


def mutate() -> bool:
    """Prints a line a mutant. Returns whether all were found."""
    caught = 0
    print(f"{'fault':<58} {'found by':<8} {'steps':>5} {'states':>7}  world")
    for mutant in MUTANTS:
        found = find(mutant)
        caught += found.violation is not None
        by = "NOT" if found.violation is None else found.violation.invariant
        print(f"{mutant.fault:<58} {by:<8} {len(found.trace):>5} {found.states:>7}  {mutant.world}", flush=True)
    print(f"{caught}/{len(MUTANTS)} found/seeded")
    return caught == len(MUTANTS)


def _line(found: Found) -> str:
    return (
        f"{found.name:<44} {found.states:>9} {found.transitions:>11} {found.depth:>5} {found.ended:>7}"
        f" {found.seconds:>7.1f}"
    )


def _trace(found: Found) -> str:
    steps = [f"  {at:>3}. {line}" for at, line in enumerate(found.trace, start=1)]
    return "\n".join([f"  {found.violation}", *steps])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="explore", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--deep", action="store_true", help="the large worlds")
    what.add_argument("--mutants", action="store_true", help="seeds each fault and looks for it")
    what.add_argument("--world", choices=sorted(PLANS), metavar="NAME", help="one world alone")
    chosen = parser.parse_args(arguments)
    # Nearly everything that is made is kept: looking for garbage often finds little and takes a third of the time.
    gc.set_threshold(100_000, 50, 100)
    if chosen.mutants:
        return 0 if mutate() else 1
    names = [chosen.world] if chosen.world else [plan.name for plan in (DEEP if chosen.deep else QUICK)]
    return 0 if explore(names) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
