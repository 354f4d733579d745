from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsv4ctl.policies.drain import Action, Rooms, Step


def test_rooms_get_what_abort_and_stop_leave() -> None:
    assert Rooms(budget=30.0, ack=5.0, fence=5.0).steps() == (
        Step(Action.REFUSE, 0.0),
        Step(Action.FINISH, 20.0),
        Step(Action.ABORT, 25.0),
        Step(Action.STOP, 30.0),
    )


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e3), st.floats(0.01, 1e3))
def test_one_budget_whatever_its_size(budget: float, ack: float, fence: float) -> None:
    untils = [step.until for step in Rooms(budget=budget, ack=ack, fence=fence).steps()]
    assert untils == sorted(untils)
    assert untils[-1] == budget
    assert untils[1] >= budget / 2


def test_writers_end_before_readers() -> None:
    engines = [("d0", "decode"), ("p1", "prefill"), ("s0", "single"), ("p0", "prefill")]
    assert Rooms(budget=1.0, ack=1.0, fence=1.0).stop_order(engines) == ("p0", "p1", "s0", "d0")
