"""Every quick world holds, and every seeded fault is seen: `scripts/explore` and `scripts/explore --mutants`."""

from __future__ import annotations

import pytest

from dsv4ctl.controlplane.explore.__main__ import explore, find
from dsv4ctl.controlplane.explore.mutants import MUTANTS, Mutant, seeded
from dsv4ctl.controlplane.explore.plan import Plan, eager_may_be
from dsv4ctl.controlplane.explore.search import search
from dsv4ctl.controlplane.explore.worlds import PLANS, QUICK, world


@pytest.mark.parametrize("plan", QUICK, ids=lambda plan: plan.name)
def test_no_invariant_breaks(plan: object) -> None:
    found = search(world(plan))  # type: ignore[arg-type]
    assert found.violation is None, "\n".join([str(found.violation), *found.trace])
    assert found.complete
    assert found.ended > 0


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_a_seeded_fault_is_found(mutant: Mutant) -> None:
    found = find(mutant)
    assert found.violation is not None
    assert len(found.trace) > 0


#: Faults of what the reduction goes by: that a frame names its generation, and that a fenced writer says nothing.
PREMISES = {"a late ack of an older generation is accepted", "an ack of a fenced writer counts"}


def test_what_is_left_of_a_reduced_world_shows_the_seeded_faults() -> None:
    """All but those of its premises, which the whole world shows."""
    missed, looked = set(), 0
    for mutant in MUTANTS:
        plan = PLANS[mutant.world]
        if isinstance(plan, Plan) and eager_may_be(plan) and not plan.eager:
            looked += 1
            with seeded(mutant):
                found = search(world(plan._replace(eager=True)))
            missed |= set() if found.violation else {mutant.fault}
    assert missed == PREMISES
    assert looked >= 20


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("an aborted room leaves its ticket behind", "no end can be reached"),
        ("a turn that is not taken at once lapses", "can follow each other for ever"),
    ],
)
def test_s5_is_an_end_within_reach_and_no_fair_run_past_it(fault: str, why: str) -> None:
    found = find(next(mutant for mutant in MUTANTS if mutant.fault == fault))
    assert found.violation is not None
    assert why in str(found.violation)


def test_there_are_enough_mutants_and_each_fault_is_taken_back() -> None:
    assert len({mutant.fault for mutant in MUTANTS}) >= 15
    for mutant in MUTANTS:
        for owner, name, value in mutant.changes:
            assert getattr(owner, name) is not value


def test_a_violation_is_told_in_the_words_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.fault == "a time-out frees")
    trace = find(mutant).trace
    assert trace[0] == "control plane: opens room 1.1"
    assert "D0: has no ack for room 1.1 by the deadline" in trace
    assert explore(["cache: slips"])
    assert "no violation" in capsys.readouterr().out


def test_every_action_has_words() -> None:
    """A trace may name any of them."""
    for name in (
        "crash and restart",
        "link faults",
        "two rooms, abort, link struck",
        "write without an end",
        "cache: slips",
        "cache: stranger",
    ):
        seen, explored = set(), world(PLANS[name])
        todo = [explored.initial()]
        for state in todo:
            for step in explored.steps(state):
                assert explored.describe(step.action)
                if step.state is not None and step.state not in seen and len(seen) < 3000:
                    seen.add(step.state)
                    todo.append(step.state)
