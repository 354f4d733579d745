"""The search itself: shortest traces, dead ends, and cycles that fairness leaves or does not."""

from __future__ import annotations

from collections.abc import Iterable

from dsv4ctl.controlplane.explore.nodes import Event, Violation
from dsv4ctl.controlplane.explore.search import Step, search


class Toy:
    """Numbers; `edges`: (from, action, fair, to). 9 is the end, 13 breaks S1."""

    name = "toy"

    def __init__(self, *edges: tuple[int, str, bool, int]) -> None:
        self._edges = edges

    def initial(self) -> int:
        return 0

    def steps(self, state: int) -> Iterable[Step]:
        return [Step((action,), fair, to) for at, action, fair, to in self._edges if at == state]

    def check(self, state: int) -> None:
        if state == 13:
            raise Violation("S1", "unlucky")

    def done(self, state: int) -> bool:
        return state == 9

    def describe(self, action: Event) -> str:
        return str(action[0])


def test_the_shortest_trace_is_told() -> None:
    found = search(Toy((0, "a", True, 1), (1, "b", True, 13), (0, "c", True, 13), (0, "end", True, 9)))
    assert found.violation is not None
    assert found.violation.invariant == "S1"
    assert found.trace == ["c"]


def test_a_world_that_ends_holds() -> None:
    found = search(Toy((0, "a", True, 1), (1, "b", True, 9)))
    assert (found.violation, found.states, found.transitions, found.ended) == (None, 3, 2, 1)


def test_a_dead_end_breaks_s5() -> None:
    found = search(Toy((0, "a", True, 9), (0, "lose", False, 1)))
    assert found.violation is not None
    assert found.violation.invariant == "S5"
    assert found.trace == ["lose"]


def test_an_end_that_only_an_abort_reaches_does_not_count() -> None:
    found = search(Toy((0, "a", True, 1), (1, "abort", False, 9)))
    assert found.violation is not None
    assert found.violation.invariant == "S5"


def test_a_cycle_that_fairness_leaves_is_no_violation() -> None:
    """`arrive` is possible in both states of the cycle and always leads out of it."""
    cycle = ((0, "resend", True, 1), (1, "repeat", True, 0))
    assert search(Toy(*cycle, (0, "arrive", True, 9), (1, "arrive", True, 9))).violation is None


def test_a_cycle_that_no_fairness_leaves_breaks_s5() -> None:
    """`arrive` is possible only every other time: a run may avoid it for ever."""
    found = search(Toy((0, "resend", True, 1), (1, "repeat", True, 0), (0, "arrive", True, 9)))
    assert found.violation is not None
    assert "for ever" in str(found.violation)


def test_a_limit_leaves_the_search_incomplete() -> None:
    found = search(Toy(*((at, "on", True, at + 1) for at in range(8)), (8, "on", True, 9)), limit=3)
    assert not found.complete
    assert found.violation is None
