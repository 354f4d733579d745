"""Makes a failing plan smaller: clients and faults are left out for as long as it still fails in the same invariant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from simulation.plan import Plan
from simulation.world import Found, simulate

Part = TypeVar("Part")


def shrink(found: Found, runs: int = 200, run: Callable[[Plan], Found] = simulate) -> Found:
    """The smallest failing plan found within `runs` runs."""
    invariant = found.violations[0].invariant
    smallest, left = found, runs
    smaller = True
    while smaller:
        smaller = False
        for plan in _less(smallest.plan):
            if not left:
                return smallest
            left -= 1
            tried = run(plan)
            if tried.violations and tried.violations[0].invariant == invariant:
                smallest, smaller = tried, True
                break
    return smallest


def _less(plan: Plan) -> Iterator[Plan]:
    """The plan with less in it: halves first, then one by one."""
    for faults in _without(plan.faults):
        yield msgspec.structs.replace(plan, faults=faults)
    for clients in _without(plan.clients):
        yield msgspec.structs.replace(plan, clients=clients)


def _without(parts: Sequence[Part]) -> Iterator[tuple[Part, ...]]:
    size = len(parts)
    while size := size // 2 if size > 1 else 0:
        for at in range(0, len(parts), size):
            yield (*parts[:at], *parts[at + size :])
    if len(parts) == 1:
        yield ()
