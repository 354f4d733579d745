"""Which rows there are, and what each switches off."""

from __future__ import annotations

import pytest

from dsv4ctl.controlplane.incident.rows import (
    RANK_FAULTS,
    THERE,
    UnknownRowError,
    by_deployment,
    full_rows,
    more_rows,
    quick_rows,
    select,
)
from dsv4ctl.controlplane.tickets.types import TICKET_GUARDS, Guard


def test_the_matrix_is_whole_and_every_cell_has_both_rows() -> None:
    cells = {(row.deployment, row.guards) for row in full_rows() if not row.waves and not row.group}
    for index_k in ("bf16", "fp8"):
        for hicache in (True, False):
            for topology in ("pd", "single"):
                for guards in ("on", "tickets"):
                    assert ((index_k, hicache, topology, ""), guards) in cells


@pytest.mark.parametrize("rows", [quick_rows(), full_rows()])
def test_names_are_unique_and_one_guard_is_off_at_a_time(rows: tuple) -> None:  # type: ignore[type-arg]
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    for row in rows:
        if row.guards == "on":
            assert row.off == ()
        elif row.guards == "rank_agreement":
            assert row.off == ("rank_agreement",), "a verdict is what one rank alone sees"
        elif row.guards == "tickets":
            assert set(row.off) == {guard.value for guard in TICKET_GUARDS} | {"verdict"}
        else:
            assert row.off == (Guard(row.guards).value, "verdict")


def test_every_guard_of_the_incident_has_its_row_and_waves_have_a_control() -> None:
    one_off = {
        (row.guards, row.deployment.hicache)
        for row in full_rows()
        if not row.group and row.guards not in ("on", "tickets")
    }
    assert one_off == {
        ("indexer_ticket", True),
        ("attention_ticket", True),
        ("sender_ticket", True),
        ("quiesce", True),
        ("quiesce", False),
    }
    for rows in (quick_rows(), full_rows()):
        waves = {(row.deployment, row.guarded) for row in rows if row.waves and not row.group}
        assert waves == {(deployment, on) for deployment, _ in waves for on in (True, False)}


def test_quick_keeps_one_pair_up() -> None:
    assert [deployment for deployment, _ in by_deployment(quick_rows())] == [THERE]
    assert len(quick_rows()) == 6


def test_rows_of_a_deployment_run_together() -> None:
    groups = by_deployment(full_rows())
    assert len(groups) == 8 + 2 + 3 + 3
    assert sorted(row for _, rows in groups for row in rows) == sorted(full_rows())


def test_rows_are_chosen_by_name_in_their_own_order() -> None:
    chosen = select(quick_rows(), more_rows(), ["sender-off", "on"])
    assert [row.name for row in chosen] == ["on", "sender-off"]
    assert select(quick_rows(), more_rows(), []) == quick_rows()


@pytest.mark.parametrize("rows", [quick_rows(), full_rows()])
def test_a_group_is_chosen_by_its_name(rows: tuple) -> None:  # type: ignore[type-arg]
    for group, count in (("ranks", 8), ("groups", 8), ("storms", 9)):
        chosen = select(rows, more_rows(), [group])
        assert len(chosen) == count
        assert {row.group for row in chosen} == {group}
        assert {row.guarded for row in chosen} == {True, False}


def test_every_rank_fault_is_played_with_agreement_and_without() -> None:
    played = {(row.fault, row.guards) for row in more_rows() if row.group == "ranks"}
    assert played == {(fault, guards) for fault in RANK_FAULTS for guards in ("on", "rank_agreement")}
    assert all(row.must_stick is not row.guarded for row in more_rows() if row.group == "ranks")


def test_a_bad_name_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(UnknownRowError, match=r"no row .sender.; did you mean sender-off. there are: on, indexer-off"):
        select(quick_rows(), more_rows(), ["on", "sender"])
