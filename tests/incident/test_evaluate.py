"""From answers and digests to a row's counts and its verdict."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4ctl.controlplane.incident.evaluate import (
    Asked,
    Expected,
    Measured,
    RowResult,
    Stormed,
    comparisons,
    evaluate,
    fisher,
    problems,
)
from dsv4ctl.controlplane.incident.rows import THERE, Row

RIGHT = {"index_k": [1, 2], "c4_kv": [3, 4]}
FULL = {"index_k": [5, 6], "c4_kv": [7, 8]}
EXPECTED = {(session, round_): Expected((1, 2, 3), RIGHT, FULL) for session in range(4) for round_ in range(2)}
ON = Row("on", THERE)
INDEXER = Row("indexer-off", THERE, "indexer_ticket", must_damage=True)
QUIESCE = Row("quiesce-off", THERE, "quiesce", waves=True)


def room(state: str = "closed", source: str | None = None, **detail: Any) -> dict[str, Any]:
    return {"state": state, "source": source, "detail": {"sealed": RIGHT, "cached_tokens": 750, **detail}}


def asked(session: int, round_: int = 0, output: tuple[int, ...] | None = (1, 2, 3), error: str | None = None) -> Asked:
    return Asked(session, round_, 1000, output, error, f"{session}{round_}.1")


def measured(requests: list[Asked], rooms: dict[str, Any] | None = None, **more: Any) -> Measured:
    told = {one.room: room() for one in requests if one.room is not None} | (rooms or {})
    return Measured(
        requests, told, **({"left": [], "aborts": 0, "edges": {}, "host_tokens": 512, "seconds": 2.0} | more)
    )


def row(given: Row, requests: list[Asked], rooms: dict[str, Any] | None = None, **more: Any) -> RowResult:
    return evaluate(given, 4, EXPECTED, measured(requests, rooms, **more))


def test_a_clean_row() -> None:
    result = row(ON, [asked(session, round_) for session in range(4) for round_ in range(2)])
    assert (result.corrupted, result.stuck, result.failed, result.digest_mismatches) == (0, 0, 0, 0)
    assert (result.requests, result.cached_share, result.tokens_per_s) == (8, 0.75, 12.0)
    assert (result.index_k, result.hicache, result.topology, result.guards) == ("bf16", True, "pd", "on")
    assert result.verdict == "clean"
    assert problems([(ON, result)]) == []


def test_a_conversation_with_several_wrong_answers_counts_once() -> None:
    wrong = [asked(0, 0, (1, 2, 4)), asked(0, 1, (9, 9, 9)), asked(1)]
    result = row(INDEXER, wrong, {"00.1": room(sealed=RIGHT | {"index_k": [1, 9]})})
    assert (result.corrupted, result.wrong_outputs) == (1, 2)
    assert (result.digest_mismatches, result.pools) == (1, {"index_k": 1})
    assert result.verdict == "damage: 1 of 4 conversations wrong; digests name index_k:1"
    assert problems([(INDEXER, result)]) == []


def test_bytes_that_did_not_land_as_sealed_are_damage_too() -> None:
    result = row(INDEXER, [asked(0)], {"00.1": room(digest_mismatches=["swa_kv"])})
    assert (result.corrupted, result.digest_mismatches, result.pools) == (0, 1, {"swa_kv": 1})


def test_a_single_engine_is_held_to_the_pages_that_the_prompt_fills() -> None:
    single = Row("single", THERE._replace(topology="single"))
    assert row(single, [asked(0)], {"00.1": room(sealed=FULL)}).digest_mismatches == 0
    assert row(single, [asked(0)], {"00.1": room(sealed=RIGHT)}).digest_mismatches == 1


def test_what_did_not_end_is_stuck_and_what_ended_badly_failed() -> None:
    requests = [asked(0, output=None), asked(1, output=None, error="502: engine fault"), asked(2)]
    rooms = {"77.1": room("aborted", "deadline"), "88.1": room("aborted", "client")}
    result = row(ON, requests, rooms, left=["99.1"])
    assert (result.stuck, result.failed, result.transfer_timeouts) == (2, 1, 1)
    assert result.errors == ["502: engine fault"]
    assert problems([(ON, result)]) == ["on: guards on, and yet 2 stuck, 1 failed"]
    assert row(INDEXER, requests, rooms, left=["99.1"]).verdict.startswith(
        "damage: 2 stuck; 1 failed in 3 requests; edge"
    )


def test_not_provoked_says_in_how_many_tries_and_which_edge_was_violated() -> None:
    edges = {"pages reused before the writer was quiet": 7}
    result = row(QUIESCE, [asked(0), asked(1)], aborts=90, edges=edges)
    assert result.verdict == ("not provoked in 90 aborts; edge violated: pages reused before the writer was quiet (7x)")
    assert problems([(QUIESCE, result)]) == []
    assert row(INDEXER, [asked(0)]).verdict == "not provoked in 1 requests; edge violated: none"


@pytest.mark.parametrize("seen", [{}, {"output": (9, 9, 9)}])
def test_a_row_that_must_show_damage_needs_wrong_answers_and_digests(seen: dict[str, Any]) -> None:
    result = row(INDEXER, [asked(0, **seen)])
    assert problems([(INDEXER, result)]) == ["indexer-off: indexer_ticket off showed no damage in 1 requests"]


def test_what_a_load_brought_wrong_is_damage_and_counted_by_its_layers() -> None:
    groups = Row("whole_groups-off", THERE, "whole_groups", must_damage=True, group="groups")
    result = row(groups, [asked(0, output=(9, 9, 9))], loads_differ={"index_k": 3})
    assert result.verdict == "damage: 1 of 4 conversations wrong; digests name none; in loads index_k:3"
    assert problems([(groups, result)]) == []


def test_a_rank_row_must_stick_and_a_storm_must_give_its_pages_back() -> None:
    alone = Row("abort-alone", THERE, "rank_agreement", must_stick=True, fault="abort", group="ranks")
    assert problems([(alone, row(alone, [asked(0, output=None)]))]) == []
    (problem,) = problems([(alone, row(alone, [asked(0)]))])
    assert problem == "abort-alone: rank_agreement off, and nothing was stuck in 1 requests"
    storm = Row("all-on", THERE, storm="all", group="storms")
    result = row(storm, [asked(0)], stormed=Stormed(80, 80, 1, 0.5, 3))
    assert (result.aborts, result.failed) == (80, 1)
    assert problems([(storm, result)]) == ["all-on: guards on, and yet 1 failed, 3 pages left"]


def test_a_crowd_must_make_a_room_give_way_and_give_its_pages_back() -> None:
    crowd = Row("retraction", THERE, must_retract=True, group="storms", work="crowd")
    assert problems([(crowd, row(crowd, [asked(0)], retractions=2, stormed=Stormed(40, 0, 0, 9.0, 0)))]) == []
    found = problems([(crowd, row(crowd, [asked(0)], stormed=Stormed(40, 0, 0, 9.0, 1)))])
    assert found == ["retraction: guards on, and yet 1 pages left", "retraction: no room was retracted in 1 requests"]


def test_rows_that_differ_in_one_thing_are_compared() -> None:
    def ran(name: str, guards: str = "tickets", waves: bool = False, bad: int = 0, **deployment: Any) -> RowResult:
        given = Row(name, THERE._replace(**deployment), guards, waves=waves)
        return row(given, [asked(session, output=(9, 9, 9) if session < bad else (1, 2, 3)) for session in range(4)])

    rows = [
        ran("a", bad=4),
        ran("b", index_k="fp8"),
        ran("c", topology="single", bad=4),
        ran("d", guards="on"),
        ran("e", index_k="fp8", waves=True),
    ]
    found = comparisons(rows)
    assert [one.rows for one in found] == [("a", "b"), ("a", "c")]
    assert str(found[0]) == (
        "bf16 against fp8 (pd, HiCache on, tickets off): 4 of 4 against 0 of 4 conversations wrong (p = 0.029), "
        "4 of 4 against 0 of 4 answers"
    )
    assert "no difference shown" in str(found[1])
    (clean,) = comparisons([ran("a"), ran("b", index_k="fp8")])
    assert str(clean).endswith("0 of 4 against 0 of 4 conversations wrong: not provoked")


def test_fisher_s_exact_test() -> None:
    # R: fisher.test(matrix(c(3, 1, 1, 3), 2))$p.value and matrix(c(10, 2, 3, 15), 2)
    assert fisher((3, 1), (4, 4)) == pytest.approx(0.4857, abs=1e-4)
    assert fisher((10, 2), (13, 17)) == pytest.approx(0.0005367, abs=1e-6)
    assert fisher((0, 0), (4, 4)) == 1.0
