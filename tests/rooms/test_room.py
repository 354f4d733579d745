"""A whole room at the control plane, in virtual time: deadlines, fences, and an end that comes exactly once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4ctl.controlplane.rooms.room import Ended, Entered, Fence, ParticipantInfo, Room, SendAbort, StaleReport
from dsv4ctl.controlplane.rooms.states import ABORTS, NEXT, TERMINAL, AbortSource, Quiet, RoomKey, RoomState

KEY = RoomKey(7, 1)
P, D = "P-1", "D-1"
DEADLINES = {state.value: 10.0 for state in RoomState if state not in TERMINAL | ABORTS} | {"ack": 2.0}
CLIENT = AbortSource.CLIENT


def room(**roles: str) -> Room:
    roles = roles or {"P-1": "prefill", "D-1": "decode"}
    infos = {name: ParticipantInfo(name.split("-", maxsplit=1)[0], 0, role) for name, role in roles.items()}
    return Room(KEY, "req-1", None, infos, DEADLINES, 100.0)


def report(found: Room, name: str, *states: RoomState, now: float = 101.0, **detail: Any) -> list[Any]:
    return [effect for state in states for effect in found.report(name, state, detail, now)]


def test_the_room_is_where_its_furthest_rank_is_and_closed_once_all_are() -> None:
    found = room()
    report(found, P, RoomState.ALLOCATED)
    assert not found.allocated
    report(found, D, RoomState.ALLOCATED)
    assert found.allocated
    report(found, P, RoomState.SENDING)
    assert report(found, D, RoomState.BOOTSTRAPPING) == []
    assert report(found, P, RoomState.CLOSED) == []
    assert report(found, D, RoomState.LANDED, RoomState.DECODING)[-1] == Entered(KEY, RoomState.DECODING)
    assert report(found, D, RoomState.CLOSED) == [Entered(KEY, RoomState.CLOSED), Ended(KEY, RoomState.CLOSED, None)]
    assert found.next_deadline() is None
    assert found.abort(CLIENT, "late", 102.0) == []


def test_an_abort_tells_every_rank_and_ends_when_all_are_quiet() -> None:
    found = room()
    assert found.abort(CLIENT, "left", 101.0) == [
        Entered(KEY, RoomState.ABORTING), SendAbort(P, KEY, CLIENT, "left"), SendAbort(D, KEY, CLIENT, "left"),
    ]  # fmt: skip
    assert found.abort(AbortSource.ADMIN, "again", 101.0) == []
    assert found.ack(P, Quiet.QUIET, 102.0) == []
    assert report(found, D, RoomState.ABORTING) == [Entered(KEY, RoomState.QUIESCING)]
    assert found.ack(D, Quiet.QUIET, 102.0)[-1] == Ended(KEY, RoomState.ABORTED, "left")
    assert found.ack(D, Quiet.QUIET, 103.0) == []
    assert (found.source, found.reason) == (CLIENT, "left")


def test_a_rank_that_aborts_says_why_and_the_others_are_told() -> None:
    found = room()
    effects = report(found, D, RoomState.ABORTING, source="integrity", reason="index_k differs")
    assert SendAbort(P, KEY, AbortSource.INTEGRITY, "index_k differs") in effects
    assert report(found, P, RoomState.ABORTING, source="admin", reason="told to") == [Entered(KEY, RoomState.QUIESCING)]
    assert (found.source, found.reason) == (AbortSource.INTEGRITY, "index_k differs")


def test_what_a_rank_says_later_of_the_abort_is_no_fact_of_the_room() -> None:
    """A rank that hears of its client's leaving before it hears of the abort that made it leave."""
    found = room()
    found.abort(AbortSource.ADMIN, "told to", 101.0)
    report(found, D, RoomState.ABORTING, source="client", reason="the client left", cached_tokens=3)
    assert (found.source, found.reason) == (AbortSource.ADMIN, "told to")
    assert found.details == {"cached_tokens": 3}


@pytest.mark.parametrize("source", [None, "nonsense", 7])
def test_a_rank_that_aborts_without_a_good_reason_aborts_all_the_same(source: object) -> None:
    found = room()
    report(found, D, RoomState.ABORTING, source=source)
    assert (found.source, found.reason) == (AbortSource.ENGINE_FAULT, "D rank 0 aborted the room")


def test_a_report_of_aborted_is_no_ack() -> None:
    """The rank's ack says whether its writes ended in a known state; its report does not."""
    found = room()
    report(found, P, RoomState.ABORTED)
    found.ack(D, Quiet.QUIET, 102.0)
    assert found.state is RoomState.QUIESCING
    assert found.ack(P, Quiet.QUIET, 102.0)[-1] == Ended(KEY, RoomState.ABORTED, "P rank 0 aborted the room")


def test_a_rank_that_opens_the_room_after_its_ack_is_told_again() -> None:
    """It acked the abort before it knew the room, and has forgotten that since."""
    found = room()
    found.abort(CLIENT, "left", 101.0)
    found.ack(P, Quiet.QUIET, 101.0)
    assert report(found, P, RoomState.ALLOCATED) == [SendAbort(P, KEY, CLIENT, "left")]
    assert report(found, P, RoomState.ABORTING, RoomState.ABORTED) == []
    assert found.ack(D, Quiet.QUIET, 102.0)[-1] == Ended(KEY, RoomState.ABORTED, "left")


def test_a_poisoned_rank_is_fenced_and_nothing_else_ends_the_room() -> None:
    found = room()
    report(found, P, RoomState.ABORTING, RoomState.QUIESCING, RoomState.ABORTED)
    assert found.ack(P, Quiet.POISONED, 101.0) == [Fence(P, KEY, "poisoned: its writes ended without a known state")]
    found.ack(D, Quiet.QUIET, 101.0)
    assert found.ack(P, Quiet.QUIET, 101.0) == []
    assert found.state is RoomState.QUIESCING
    assert found.fenced(P, 103.0)[-1] == Ended(KEY, RoomState.ABORTED, "P rank 0 aborted the room")


def test_a_poisoned_ack_aborts_a_room_that_did_not_know() -> None:
    found = room()
    effects = found.ack(P, Quiet.POISONED, 101.0)
    assert SendAbort(D, KEY, AbortSource.ENGINE_FAULT, "P rank 0: writes ended without a known state") in effects
    assert isinstance(effects[-1], Fence)


def test_a_fenced_rank_aborts_the_room_for_the_others() -> None:
    found = room()
    effects = found.fenced(P, 101.0)
    assert [effect.incarnation for effect in effects if isinstance(effect, SendAbort)] == [D]
    assert found.fenced("X-9", 101.0) == []
    assert found.ack(D, Quiet.QUIET, 102.0)[-1] == Ended(KEY, RoomState.ABORTED, "P rank 0 ended")


def test_a_rank_that_closed_is_missed_by_nobody() -> None:
    found = room()
    report(found, P, RoomState.CLOSED)
    assert found.fenced(P, 101.0) == []
    assert found.abort(CLIENT, "left", 101.0)[1:] == [SendAbort(D, KEY, CLIENT, "left")]


def test_deadlines_abort_then_fence_writers_then_readers() -> None:
    found = room()
    assert found.next_deadline() == 110.0
    assert found.tick(109.9) == []
    effects = found.tick(110.0)
    assert effects[1] == SendAbort(P, KEY, AbortSource.DEADLINE, "allocated lasted over 10 s")
    assert found.next_deadline() == 112.0
    assert found.tick(111.9) == []
    assert found.tick(112.0) == [Fence(P, KEY, "no abort-ack within 2 s")]
    assert found.tick(114.0) == []  # the kill takes its time
    found.fenced(P, 114.5)
    assert found.tick(116.0) == []
    assert found.tick(116.5) == [Fence(D, KEY, "no abort-ack within 2 s")]
    assert found.fenced(D, 117.0)[-1] == Ended(KEY, RoomState.ABORTED, "allocated lasted over 10 s")
    assert found.tick(999.0) == []


def test_each_state_has_its_own_deadline() -> None:
    found = room()
    report(found, P, RoomState.SENDING, now=105.0)
    assert found.next_deadline() == 115.0
    report(found, D, RoomState.BOOTSTRAPPING, now=106.0)  # not further: the clock of `sending` runs on
    assert found.next_deadline() == 115.0
    assert found.tick(115.0)[1].reason == "sending lasted over 10 s"


def test_a_late_ack_before_the_kill_ends_the_room() -> None:
    found = room()
    found.abort(CLIENT, "left", 101.0)
    found.ack(D, Quiet.QUIET, 101.0)
    assert found.tick(103.0) == [Fence(P, KEY, "no abort-ack within 2 s")]
    assert found.ack(P, Quiet.QUIET, 103.5)[-1] == Ended(KEY, RoomState.ABORTED, "left")


def test_foreign_incarnations_are_refused() -> None:
    found = room()
    for call in (lambda: report(found, "P-0", RoomState.SENDING), lambda: found.ack("P-0", Quiet.QUIET, 101.0)):
        with pytest.raises(StaleReport, match=r"room 7\.1: P-0 takes no part in it"):
            call()


def test_a_rank_that_aborts_does_not_come_back() -> None:
    found = room()
    report(found, D, RoomState.ABORTING)
    assert report(found, D, RoomState.LANDED) == []
    assert report(found, P, RoomState.ABORTING) == [Entered(KEY, RoomState.QUIESCING)]


participants = st.sampled_from(["P-1", "P-2", "D-1", "D-2"])
events = st.lists(
    st.one_of(
        st.tuples(st.just("report"), participants, st.sampled_from(RoomState)),
        st.tuples(st.just("ack"), participants, st.sampled_from(Quiet)),
        st.tuples(st.just("fenced"), participants),
        st.tuples(st.just("abort")),
        st.tuples(st.just("tick"), st.floats(0.0, 12.0)),
    ),
    max_size=30,
)


@settings(max_examples=400)
@given(events)
def test_any_history_ends_exactly_once_and_never_leaves_its_table(history: list[Any]) -> None:
    found = room(**{"P-1": "prefill", "P-2": "prefill", "D-1": "decode", "D-2": "decode"})
    now, effects, poisoned, fences = 100.0, [], set(), set()
    for event in history:
        now += event[1] if event[0] == "tick" else 0.0
        match event:
            case ("report", name, state):
                effects += found.report(name, state, {}, now)
            case ("ack", name, outcome):
                if outcome is Quiet.POISONED and found.state not in TERMINAL:
                    poisoned |= {name} if not found._ranks[name].done else set()
                effects += found.ack(name, outcome, now)
            case ("fenced", name):
                poisoned.discard(name)
                effects += found.fenced(name, now)
            case ("abort",):
                effects += found.abort(CLIENT, "left", now)
            case ("tick", _):
                effects += found.tick(now)
        assert not (poisoned and found.state in TERMINAL)
    for _ in range(10):  # the shell's part: time passes, and who is to be fenced is
        now += 12.0
        effects += found.tick(now)
        for name in {effect.incarnation for effect in effects if isinstance(effect, Fence)} - fences:
            fences.add(name)
            effects += found.fenced(name, now)
    assert found.state in TERMINAL
    assert sum(isinstance(effect, Ended) for effect in effects) == 1
    path = [state for state, _ in found.history]
    assert all(after in NEXT[at] for at, after in pairwise(path))
    assert [effect.state for effect in effects if isinstance(effect, Entered)] == path[1:]
    fenced = [effect.incarnation for effect in effects if isinstance(effect, Fence)]
    assert len(fenced) == len(set(fenced))
