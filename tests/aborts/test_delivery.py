"""Aborts between the control plane and a rank: lost, repeated and reordered on the way, applied once and in order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4ctl.controlplane.aborts.inbox import MAX_AHEAD, AbortInbox
from dsv4ctl.controlplane.aborts.log import RESEND_AFTER, AbortEntry, AbortLog
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey


def append(log: AbortLog, room: int) -> AbortEntry:
    return log.append(RoomKey(room, 1), AbortSource.ADMIN, "all")


def entry(seq: int) -> AbortEntry:
    return AbortEntry(seq, RoomKey(seq, 1), AbortSource.ADMIN, "all")


def test_a_new_abort_is_due_at_once_and_again_until_received() -> None:
    log = AbortLog()
    assert (log.due(0.0), log.next_due()) == ([], None)
    first = append(log, 1)
    assert log.next_due() == float("-inf")
    assert log.due(10.0) == [first]
    assert log.due(10.0) == []
    assert log.next_due() == 10.0 + RESEND_AFTER
    assert log.due(10.0 + RESEND_AFTER) == [first]
    log.received(1)
    assert (log.due(99.0), log.next_due(), log.pending) == ([], None, 0)


def test_a_second_abort_does_not_wait_for_the_first_ones_repetition() -> None:
    log = AbortLog()
    first = append(log, 1)
    log.due(10.0)
    second = append(log, 2)
    assert log.next_due() == float("-inf")
    assert log.due(10.1) == [second]
    assert log.due(10.0 + RESEND_AFTER) == [first, second]


def test_what_was_never_sent_cannot_have_been_received() -> None:
    log = AbortLog()
    append(log, 1)
    with pytest.raises(ValueError, match="abort 2 was reported as received, only 1 were sent"):
        log.received(2)
    assert log.pending == 1


def test_received_is_cumulative_and_may_be_repeated() -> None:
    log = AbortLog()
    for room in range(3):
        append(log, room)
    log.received(2)
    log.received(1)
    assert [left.seq for left in log.due(0.0)] == [3]


def test_entries_are_handed_out_in_order_once() -> None:
    inbox = AbortInbox()
    assert inbox.offer(entry(2)) == []
    assert inbox.offer(entry(3)) == []
    assert inbox.received == 0
    assert inbox.offer(entry(1)) == [entry(1), entry(2), entry(3)]
    assert inbox.offer(entry(2)) == []
    assert inbox.received == 3
    assert inbox._held == {}


def test_a_full_inbox_still_takes_the_entry_it_waits_for() -> None:
    inbox = AbortInbox()
    for seq in range(2, 3 * MAX_AHEAD):
        assert inbox.offer(entry(seq)) == []
    assert [ready.seq for ready in inbox.offer(entry(1))] == list(range(1, MAX_AHEAD + 1))
    assert inbox.offer(entry(MAX_AHEAD + 1)) == [entry(MAX_AHEAD + 1)]


@settings(max_examples=300)
@given(st.data(), st.integers(1, 12))
def test_every_abort_is_applied_once_in_order_whatever_the_link_does(data: st.DataObject, aborts: int) -> None:
    log, inbox = AbortLog(), AbortInbox()
    wire: list[Any] = []
    applied: list[int] = []
    now = 0.0
    for room in range(aborts):
        append(log, room)
        for _ in range(data.draw(st.integers(0, 4))):
            now += data.draw(st.sampled_from([0.0, RESEND_AFTER]))
            wire += log.due(now)
            if wire:
                _arrive(data, wire, log, inbox, applied)
    while log.pending:  # from here the link loses nothing
        now += RESEND_AFTER
        for sent in log.due(now):
            applied += [ready.seq for ready in inbox.offer(sent)]
        log.received(inbox.received)
    assert applied == list(range(1, aborts + 1))
    assert log.next_due() is None


def _arrive(data: st.DataObject, wire: list[Any], log: AbortLog, inbox: AbortInbox, applied: list[int]) -> None:
    """Some frame arrives, or is lost; it may arrive again; the report back may be lost too."""
    at = data.draw(st.integers(0, len(wire) - 1))
    frame = wire[at]
    if data.draw(st.booleans()):
        del wire[at]
    if data.draw(st.booleans()):
        applied += [ready.seq for ready in inbox.offer(frame)]
        if data.draw(st.booleans()):
            log.received(inbox.received)
