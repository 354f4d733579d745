"""Frames that say nothing any more may arrive at once: what is left of a world is what was in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from dsv4ctl.controlplane.explore.nodes import Event
from dsv4ctl.controlplane.explore.plan import Flight, Plan
from dsv4ctl.controlplane.explore.rank import Rank, RankView, Setup
from dsv4ctl.controlplane.explore.transfer import Transfer, _Draft
from dsv4ctl.controlplane.explore.worlds import ONE, PATIENT

ONE_PAGE = Setup(pages=1, wants=1, hasty=False)
WORLDS = [
    Plan("one room", rooms=ONE, setup=PATIENT, eager=True),
    Plan("a crash", rooms=ONE, crashes=1, restarts=1, aborts=0, setup=PATIENT, eager=True),
    Plan("early time-outs and no known end", rooms=ONE, poisons=1, setup=Setup(pages=1, wants=1), eager=True),
    Plan("a fault between ranks", rooms=ONE, peer_faults=1, setup=PATIENT, eager=True),
    Plan("a crash and a fault between ranks", rooms=ONE, crashes=1, peer_faults=1, setup=ONE_PAGE, eager=True),
    Plan("a fault on the link", rooms=ONE, link_faults=1, abort_by=("P",), setup=ONE_PAGE, eager=True),
    Plan("frames of the link wait", link="down", rooms=ONE, abort_by=("P",), setup=ONE_PAGE, eager=True),
    Plan("a page reused", one_by_one=True, abort_by=("client",), setup=ONE_PAGE, eager=True),
    Plan("two writers", rooms=ONE, prefill=2, fan=True, aborts=0, crashes=1, setup=ONE_PAGE, eager=True),
]
State = tuple[int, ...]


def hushed(world: Transfer, state: State) -> State:
    draft = _Draft(*world._open(state))
    Transfer.hush(world, draft)
    return world._close(draft)


def walked(world: Transfer, wasted: Callable[[State, State], bool]) -> set[tuple[State, Event, State, bool]]:
    steps = set()
    seen = {world.initial()}
    todo = list(seen)
    for state in todo:
        for step in world.steps(state):
            assert step.violation is None
            if step.action[0] in ("lose", "repeat", "overtake") and wasted(state, step.state):
                continue
            steps.add((state, step.action, step.state, step.fair))
            if step.state not in seen:
                seen.add(step.state)
                todo.append(step.state)
    return steps


@pytest.mark.parametrize("plan", WORLDS, ids=lambda plan: plan.name)
def test_a_world_with_eager_frames_is_the_world_without_what_they_change(plan: Plan) -> None:
    """Every step of the whole world is one of the reduced world between the same states, or none; and the other way.

    A fault that strikes a frame which says nothing leaves the world as it was, with one fault less: what follows would
    follow without it too. So such steps are not walked.
    """
    world = Transfer(plan)
    quiet: Callable[[State], State] = cache(lambda state: hushed(world, state))
    reduced = walked(world, lambda at, to: at[:3] == to[:3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "hush", lambda draft: None)
        whole = walked(world, lambda at, to: quiet(at)[:3] == quiet(to)[:3])
    same = {(quiet(at), action, quiet(to), fair) for at, action, to, fair in whole}
    changes = {step for step in same if step[0] != step[2]}
    assert changes <= reduced
    assert {action[0] for _, action, _, _ in reduced - changes} <= {"overtake"}
    assert len({at for at, *_ in reduced}) < len({at for at, *_ in whole})


def test_which_free_page_comes_first_decides_nothing() -> None:
    """A world in which pages keep their order, and one in which idle ranks make it new: strongly bisimilar."""
    plan = Plan("pages", one_by_one=True, aborts=0, crashes=1, restarts=1, setup=PATIENT, eager=True)
    view = Rank.view
    with pytest.MonkeyPatch.context() as patch:

        def kept(rank: Rank) -> RankView:
            return view(rank)._replace(worn=False)

        patch.setattr(Rank, "view", kept)
        first = graph("kept", Transfer(plan))
    second = graph("new", Transfer(plan))
    assert len(second) < len(first)
    block = coarsest(first | second)
    assert block[next(iter(first))] == block[next(iter(second))]


Graph = dict[Any, list[tuple[Any, bool, Any]]]


def graph(name: str, world: Transfer) -> Graph:
    """Steps by state, from the initial one on; without the numbers of pages."""
    steps: Graph = {(name, world.initial()): []}
    for at, action, to, fair in sorted(walked(world, lambda at, to: False), key=repr):
        what = (action[0], action[1]._replace(source=0, target=0)) if isinstance(action[1], Flight) else action
        steps.setdefault((name, at), []).append((what, fair, (name, to)))
        steps.setdefault((name, to), [])
    return steps


def coarsest(steps: Graph) -> dict[Any, int]:
    """Blocks of states that no steps can tell apart (partition refinement)."""
    block, blocks = dict.fromkeys(steps, 0), 1
    while True:
        seen: dict[Any, int] = {}
        block = {
            state: seen.setdefault((block[state], frozenset((a, fair, block[to]) for a, fair, to in out)), len(seen))
            for state, out in steps.items()
        }
        if len(seen) == blocks:
            return block
        blocks = len(seen)
