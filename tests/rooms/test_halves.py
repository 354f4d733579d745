"""The two halves of a room: every event in every state, and the incident reports that they answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest

from dsv4ctl.controlplane.rooms.effects import AckPeer, Enter, Quarantine, Refusal, ReleasePages, TellPeer
from dsv4ctl.controlplane.rooms.half import Half
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.rooms.states import LIVE, NEXT, TERMINAL, AbortSource, Quiet, RoomKey, RoomState
from dsv4ctl.controlplane.rooms.tables import markdown
from dsv4ctl.controlplane.rooms.writer import Writer

KEY = RoomKey(7, 1)
CLIENT = AbortSource.CLIENT
QUIET, POISONED = Quiet.QUIET, Quiet.POISONED


def writer(*peers: str) -> Writer:
    return Writer(KEY, peers or ("D0",))


def reader(*peers: str) -> Reader:
    return Reader(KEY, peers or ("P0",))


def abort(half: Any) -> list[Any]:
    return half.abort(CLIENT, "client left")  # type: ignore[no-any-return]


def sending() -> Writer:
    half = writer()
    half.destination("D0")
    half.post()
    return half


def landed() -> Reader:
    half = reader()
    half.expose()
    half.landed("P0")
    return half


WRITER_EVENTS: dict[str, Callable[[Writer], Any]] = {
    "destination": lambda half: half.destination("D0"),
    "forward_begin": Writer.forward_begin,
    "forward_end": Writer.forward_end,
    "post": Writer.post,
    "written": lambda half: half.written(True),
    "written_badly": lambda half: half.written(False),
    "sent_all": Writer.sent_all,
    "abort": abort,
    "peer_abort": lambda half: half.peer_abort("D0", CLIENT, "left"),
    "fenced": lambda half: half.fenced("D0"),
    "foreign": lambda half: half.destination("D9"),
}
READER_EVENTS: dict[str, Callable[[Reader], Any]] = {
    "expose": Reader.expose,
    "landed": lambda half: half.landed("P0"),
    "verified": Reader.verified,
    "forward_begin": Reader.forward_begin,
    "forward_end": Reader.forward_end,
    "decoding": Reader.decoding,
    "finished": Reader.finished,
    "abort": abort,
    "ack": lambda half: half.ack("P0", QUIET),
    "poisoned": lambda half: half.ack("P0", POISONED),
    "fenced": lambda half: half.fenced("P0"),
    "overdue": Reader.ack_overdue,
    "foreign": lambda half: half.ack("P9", QUIET),
}


def snapshot(half: Half) -> dict[str, Any]:
    values = {field.name: getattr(half, field.name) for field in fields(half)}
    return {name: set(value) if isinstance(value, set) else value for name, value in values.items()}


@pytest.mark.parametrize(("make", "events"), [(writer, WRITER_EVENTS), (reader, READER_EVENTS)])
def test_every_event_in_every_reachable_state_obeys_the_table(make: Any, events: dict[str, Any]) -> None:
    """Exhaustive: all histories of five events. Refused events change nothing; terminal states stay."""
    seen: dict[Any, tuple[str, ...]] = {}
    frontier: list[tuple[str, ...]] = [()]
    reached: set[RoomState] = set()
    while frontier:
        history = frontier.pop()
        for name, event in events.items():
            half = make()
            for earlier in history:
                events[earlier](half)
            before = snapshot(half)
            try:
                effects = event(half)
            except Refusal:
                assert snapshot(half) == before
                continue
            path = [before["state"], *(effect.state for effect in effects if isinstance(effect, Enter))]
            assert all(after in NEXT[at] for at, after in pairwise(path)), (history, name)
            assert half.state is path[-1], (history, name)
            if before["state"] in TERMINAL:
                assert not any(isinstance(effect, ReleasePages) for effect in effects), (history, name)
            reached.add(half.state)
            state = repr(snapshot(half))
            if state not in seen and len(history) < 5:
                seen[state] = (*history, name)
                frontier.append((*history, name))
    unreachable = {"Writer": {RoomState.LANDED, RoomState.VERIFIED, RoomState.DECODING}, "Reader": {RoomState.SENDING}}
    expected = set(RoomState) - unreachable[type(make()).__name__] - {RoomState.LOADING, RoomState.ALLOCATED}
    # Aborting is passed through at once, either to wait or to end.
    assert reached - {RoomState.LOADING, RoomState.ALLOCATED} == expected - {RoomState.ABORTING}


def test_the_printed_tables_name_every_state_and_event() -> None:
    text = markdown()
    assert all(f"`{state.value}`" in text for state in RoomState)
    for half in (Writer, Reader):
        for event, move in half.MOVES.items():
            assert f"| `{event}` |" in text
            assert f"| `{move.to.value}` | {move.when} |" in text
    assert "| `closed` | nothing |" in text
    assert all(NEXT[state] & {RoomState.ABORTING} for state in LIVE)


# ---- the writer ------------------------------------------------------------------------------------------


def test_source_pages_are_held_until_the_last_write_ended() -> None:
    half = sending()
    assert half.sent_all() == []
    assert half.written(True) == [ReleasePages(), Enter(RoomState.CLOSED)]


def test_nothing_is_posted_after_the_last_write_or_in_an_aborted_room() -> None:
    half = sending()
    half.sent_all()
    with pytest.raises(Refusal, match="after the last one"):
        half.post()
    half = sending()
    abort(half)
    with pytest.raises(Refusal, match=r"room 7\.1 is quiescing: no post in this state"):
        half.post()
    with pytest.raises(Refusal, match="no forward begin"):
        half.forward_begin()


def test_the_ack_waits_for_writes_and_forwards_and_goes_to_every_peer() -> None:
    half = writer("D0", "D1")
    half.forward_begin()
    half.post()
    told = [TellPeer(peer, CLIENT, "client left") for peer in ("D0", "D1")]
    assert abort(half) == [Enter(RoomState.ABORTING), *told, Enter(RoomState.QUIESCING)]
    assert half.written(True) == []
    assert half.forward_end() == [
        AckPeer("D0", QUIET), AckPeer("D1", QUIET), ReleasePages(), Enter(RoomState.ABORTED),
    ]  # fmt: skip


def test_aborts_of_two_readers_and_one_drain_ack_both() -> None:
    """sglang#38961: the second reader's abort must not overwrite the first one's ack target."""
    half = writer("D0", "D1")
    half.post()
    half.peer_abort("D0", CLIENT, "left")
    half.peer_abort("D1", CLIENT, "left")
    acks = [effect.peer for effect in half.written(True) if isinstance(effect, AckPeer)]
    assert acks == ["D0", "D1"]
    assert half.peer_abort("D1", CLIENT, "again") == [AckPeer("D1", QUIET)]


def test_a_destination_that_comes_too_late_is_answered_by_the_ack() -> None:
    half = writer()
    abort(half)
    assert half.destination("D0") == [AckPeer("D0", QUIET)]


def test_a_write_without_a_known_end_poisons_the_room() -> None:
    half = sending()
    half.post()
    half.written(False)
    assert (half.state, half.source) == (RoomState.QUIESCING, AbortSource.ENGINE_FAULT)
    assert half.written(True)[0] == AckPeer("D0", POISONED)
    assert half.peer_abort("D0", CLIENT, "again") == [AckPeer("D0", POISONED)]


def test_what_a_write_without_a_known_end_may_still_read_is_not_released() -> None:
    half = sending()
    half.post()
    half.written(False)
    assert ReleasePages() not in half.written(True)
    assert half.state is RoomState.ABORTED


def test_the_first_reason_is_kept() -> None:
    half = sending()
    abort(half)
    half.peer_abort("D0", AbortSource.ADMIN, "later")
    half.fenced("D0")
    assert (half.source, half.reason) == (CLIENT, "client left")


# ---- the reader ------------------------------------------------------------------------------------------


def test_pages_are_released_only_after_every_writer_that_saw_them_acked() -> None:
    half = reader("P0", "P1")
    half.expose()
    abort(half)
    assert half.ack("P0", QUIET) == []
    assert half.ack("P0", QUIET) == []
    assert half.ack("P1", QUIET) == [ReleasePages(), Enter(RoomState.ABORTED)]
    assert half.ack("P1", QUIET) == []


def test_pages_that_nobody_was_told_are_released_at_once() -> None:
    assert abort(reader())[-2:] == [ReleasePages(), Enter(RoomState.ABORTED)]


def test_pages_wait_for_the_running_forward_too() -> None:
    half = landed()
    half.forward_begin()
    abort(half)
    assert half.state is RoomState.QUIESCING
    assert half.forward_end() == [ReleasePages(), Enter(RoomState.ABORTED)]


def test_the_last_bytes_of_a_writer_are_as_good_as_its_ack() -> None:
    """vllm#32255: abort then finished frees at finish; finished then abort frees at once; each exactly once."""
    half = reader()
    half.expose()
    abort(half)
    assert half.landed("P0") == [ReleasePages(), Enter(RoomState.ABORTED)]
    assert half.ack("P0", QUIET) == []
    assert abort(landed())[-2:] == [ReleasePages(), Enter(RoomState.ABORTED)]


def test_no_forward_before_everything_landed() -> None:
    half = reader("P0", "P1")
    half.expose()
    half.landed("P0")
    for event in (half.forward_begin, half.verified, half.decoding, half.finished):
        with pytest.raises(Refusal, match=r"room 7\.1 is bootstrapping: no"):
            event()
    half.landed("P1")
    assert half.forward_begin() == [Enter(RoomState.DECODING)]


def test_an_early_ack_aborts_instead_of_opening_the_way_to_decode() -> None:
    """sglang#30233: a writer that gave up is quiet, but its bytes are not here."""
    half = reader("P0", "P1")
    half.expose()
    half.ack("P0", QUIET)
    assert (half.state, half.reason) == (RoomState.QUIESCING, "peer P0 aborted")


def test_exposing_again_does_not_forget_what_landed() -> None:
    half = landed()
    assert half.expose() == []
    assert half.awaiting == frozenset()


def test_nothing_lands_in_pages_that_were_not_exposed() -> None:
    with pytest.raises(Refusal, match="is allocated: no landed"):
        reader().landed("P0")


def test_a_room_is_not_finished_under_a_forward() -> None:
    half = landed()
    half.forward_begin()
    with pytest.raises(Refusal, match="finished with 1 forwards running"):
        half.finished()
    half.forward_end()
    assert half.finished() == [ReleasePages(), Enter(RoomState.CLOSED)]


def test_a_time_out_quarantines_and_frees_nothing() -> None:
    half = reader("P0", "P1")
    half.expose()
    abort(half)
    half.ack("P0", QUIET)
    assert half.ack_overdue() == [Quarantine(("P1",))]
    assert half.ack_overdue() == []
    assert half.state is RoomState.QUIESCING
    assert half.fenced("P1") == [ReleasePages(), Enter(RoomState.ABORTED)]


def test_a_late_ack_of_a_quarantined_room_releases_it() -> None:
    half = reader()
    half.expose()
    abort(half)
    half.ack_overdue()
    assert half.ack("P0", QUIET) == [ReleasePages(), Enter(RoomState.ABORTED)]


def test_a_poisoned_writer_is_settled_by_its_fence_alone() -> None:
    half = reader()
    half.expose()
    assert half.ack("P0", POISONED)[-1] == Quarantine(("P0",))
    assert half.ack("P0", QUIET) == []
    assert half.landed("P0") == []
    assert half.state is RoomState.QUIESCING
    assert half.fenced("P0") == [ReleasePages(), Enter(RoomState.ABORTED)]


def test_an_ack_that_a_fenced_writer_sent_before_it_was_killed_says_nothing() -> None:
    """It asked for the ack again after the abort, so that a second one was on its way."""
    half = landed()
    half.forward_begin()
    half.ack("P0", POISONED)
    assert half.fenced("P0") == []
    assert half.ack("P0", POISONED) == []
    assert half.forward_end() == [ReleasePages(), Enter(RoomState.ABORTED)]


def test_poison_counts_even_if_everything_seemed_to_have_landed() -> None:
    half = landed()
    half.ack("P0", POISONED)
    assert (half.state, half.awaiting) == (RoomState.QUIESCING, {"P0"})


def test_a_fence_ends_a_room_that_still_waits_and_not_one_that_has_everything() -> None:
    half = reader()
    half.expose()
    assert half.fenced("P0")[-1] == Enter(RoomState.ABORTED)
    assert half.reason == "peer P0 ended"
    assert landed().fenced("P0") == []
    assert reader().fenced("P9") == []


def test_a_single_engine_has_nobody_to_wait_for() -> None:
    half = Reader(KEY, ())
    assert half.forward_begin() == [Enter(RoomState.LOADING)]
    assert half.decoding() == [Enter(RoomState.DECODING)]
    abort(half)
    assert half.state is RoomState.QUIESCING
    assert half.forward_end() == [ReleasePages(), Enter(RoomState.ABORTED)]
