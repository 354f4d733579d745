from __future__ import annotations

import pytest

from dsv4ctl.policies.abort import Action, Ladder, due, overdue

LADDER = Ladder(ack=5.0, fence=2.0)


def actions(elapsed: float, taken: int = 0, *, poisoned: bool = False) -> list[Action]:
    return [rung.action for rung in due(LADDER.rungs(poisoned=poisoned), elapsed, taken=taken)]


def test_asks_first_and_nothing_else_before_the_ack_deadline() -> None:
    assert actions(0.0) == [Action.ASK]
    assert actions(4.999, taken=1) == []


def test_no_ack_quarantines_before_it_fences() -> None:
    assert actions(5.0, taken=1) == [Action.QUARANTINE, Action.FENCE]


def test_a_late_look_takes_every_rung_in_order() -> None:
    assert actions(60.0) == [Action.ASK, Action.QUARANTINE, Action.FENCE]
    assert actions(60.0, taken=3) == []


def test_a_poisoned_room_waits_for_nothing() -> None:
    assert actions(0.0, poisoned=True) == [Action.ASK, Action.QUARANTINE, Action.FENCE]


def test_no_rung_frees() -> None:
    assert {action.value for action in Action} == {"ask", "quarantine", "fence"}


def test_the_quarantine_has_an_end() -> None:
    assert LADDER.reaped_by(poisoned=False) == 7.0
    assert LADDER.reaped_by(poisoned=True) == 2.0


def test_deadline_of_a_state() -> None:
    deadlines = {"sending": 3.0}
    assert not overdue("sending", 2.999, deadlines)
    assert overdue("sending", 3.0, deadlines)
    with pytest.raises(KeyError, match="'landed' has no deadline; those that have: sending"):
        overdue("landed", 1.0, deadlines)
