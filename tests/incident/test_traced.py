"""What the race detector says of a row: who is behind each corrupted room."""

from __future__ import annotations

from typing import Any

from dsv4ctl.controlplane.incident.evaluate import Asked, Expected, Measured, Named, Traced, evaluate, problems
from dsv4ctl.controlplane.incident.rows import THERE, Row

RIGHT = {"index_k": [1]}


def row(given: Row, traced: Traced | None, outputs: list[int]) -> Any:
    asked = [Asked(session, 0, 1000, (token,), None, f"{session}.1") for session, token in enumerate(outputs)]
    rooms = {one.room: {"state": "closed", "source": None, "detail": {"sealed": RIGHT}} for one in asked}
    expected = {(session, 0): Expected((1,), RIGHT, RIGHT) for session in range(len(outputs))}
    measured = Measured(asked, rooms, [], 0, {}, 512, 1.0, traced=traced)
    return evaluate(given, len(outputs), expected, measured)


def test_corrupted_rooms_are_traced_back_to_the_ungated_consumer() -> None:
    off = Row("indexer-off", THERE, "indexer_ticket", must_damage=True)
    behind = {"0.1": ["attention", "indexer"], "1.1": ["attention"], "3.1": ["indexer"]}
    result = row(off, Traced(10, 0, 4, 2, behind), [9, 9, 9, 1])
    assert result.traced == Named(races=4, corrupted=3, named=1, gaps=0)


def test_a_race_on_a_guarded_row_is_a_problem() -> None:
    on = Row("on", THERE)
    result = row(on, Traced(10, 0, 1, 1, {"0.1": ["indexer"]}), [1])
    assert result.traced == Named(races=1, corrupted=0, named=0, gaps=0)
    assert problems([(on, result)]) == ["on: guards on, and yet 1 races"]
    assert row(on, None, [1]).traced is None
