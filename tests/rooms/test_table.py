"""The rooms of one rank by key: generations, tombstones, memory of ends, and none of them without bound."""

from __future__ import annotations

import pytest

from dsv4ctl.controlplane.rooms.states import Quiet, RoomKey
from dsv4ctl.controlplane.rooms.table import RoomTable

FIRST, SECOND, THIRD = RoomKey(7, 1), RoomKey(7, 2), RoomKey(7, 3)


@pytest.fixture
def rooms() -> RoomTable[str]:
    return RoomTable()


def test_a_frame_of_another_generation_finds_nothing(rooms: RoomTable[str]) -> None:
    rooms.open(SECOND, "half")
    assert rooms.get(SECOND) == "half"
    assert (rooms.get(FIRST), rooms.get(THIRD), rooms.get(RoomKey(8, 1))) == (None, None, None)
    assert rooms.stale == 3
    assert rooms.current(7) == (SECOND, "half")
    assert rooms.current(8) is None


def test_one_generation_lives_at_a_time(rooms: RoomTable[str]) -> None:
    rooms.open(SECOND, "half")
    for key in (FIRST, SECOND, THIRD):
        with pytest.raises(ValueError, match=f"room {key} cannot open: generation 2 lives here"):
            rooms.open(key, "other")
    assert list(rooms) == [(SECOND, "half")]


def test_a_generation_that_ended_never_opens_again_and_a_newer_one_does(rooms: RoomTable[str]) -> None:
    rooms.open(SECOND, "half")
    rooms.end(SECOND, Quiet.QUIET)
    for key in (FIRST, SECOND):
        with pytest.raises(ValueError, match=f"room {key} cannot open: generation 2 has ended here"):
            rooms.open(key, "other")
        assert rooms.ended(key) is Quiet.QUIET
    assert rooms.ended(THIRD) is None
    assert not rooms.open(THIRD, "newer")


def test_only_what_lives_ends(rooms: RoomTable[str]) -> None:
    rooms.open(SECOND, "half")
    for key in (FIRST, RoomKey(8, 1)):
        with pytest.raises(KeyError):
            rooms.end(key, Quiet.QUIET)
    assert len(rooms) == 1


def test_a_poisoned_room_stays_poisoned_in_memory(rooms: RoomTable[str]) -> None:
    for key, outcome in ((FIRST, Quiet.POISONED), (SECOND, Quiet.QUIET)):
        rooms.open(key, "half")
        rooms.end(key, outcome)
    assert rooms.ended(SECOND) is Quiet.POISONED


def test_an_abort_that_came_first_meets_the_room_when_it_opens(rooms: RoomTable[str]) -> None:
    rooms.bury(FIRST, until=100.0)
    rooms.sweep(99.0)
    assert rooms.open(FIRST, "half")
    rooms.end(FIRST, Quiet.QUIET)
    assert not rooms.open(SECOND, "newer")


def test_a_tombstone_is_for_one_generation_and_its_time(rooms: RoomTable[str]) -> None:
    rooms.bury(FIRST, until=100.0)
    assert not rooms.open(SECOND, "newer")
    rooms.bury(RoomKey(8, 1), until=100.0)
    rooms.sweep(100.0)
    assert not rooms.open(RoomKey(8, 1), "half")


def test_memory_is_bounded_and_the_oldest_goes() -> None:
    rooms = RoomTable[str](tombstones=3, ends=3)
    for number in range(5):
        rooms.bury(RoomKey(number, 1), until=100.0)
        rooms.open(RoomKey(100 + number, 1), "half", turn=number)
        rooms.end(RoomKey(100 + number, 1), Quiet.QUIET)
    rooms.bury(RoomKey(100, 2), until=100.0)
    opened = [rooms.open(RoomKey(number, 1), "half", turn=5 + number) for number in range(5)]
    assert opened == [False, False, False, True, True]
    assert [rooms.ended(RoomKey(100 + n, 1)) is None for n in range(5)] == [True, True, False, False, False]
    assert rooms.open(RoomKey(100, 2), "half", turn=10)


def test_a_room_whose_end_was_forgotten_does_not_open_again() -> None:
    rooms = RoomTable[str](ends=1)
    for turn, number in enumerate((7, 8, 9), start=1):
        rooms.open(RoomKey(number, 1), "half", turn)
        rooms.end(RoomKey(number, 1), Quiet.QUIET)
    for turn, number in ((1, 7), (2, 8)):
        assert rooms.ended(RoomKey(number, 1)) is None
        with pytest.raises(ValueError, match=f"room {number}.1 cannot open: it may have ended here"):
            rooms.open(RoomKey(number, 1), "half", turn)
    assert not rooms.open(RoomKey(9, 2), "a remembered room again", turn=3)
    assert not rooms.open(RoomKey(10, 1), "a younger room", turn=4)


def test_a_retracted_room_whose_end_was_forgotten_opens_as_its_next_generation() -> None:
    """A writer is done long before its room is: it keeps its turn, and many younger ones have ended here meanwhile."""
    rooms = RoomTable[str](ends=1)
    for turn, number in enumerate((7, 8, 9), start=1):
        rooms.open(RoomKey(number, 1), "half", turn)
        rooms.end(RoomKey(number, 1), Quiet.QUIET)
    again = RoomKey(7, 2)
    assert not rooms.open(again, "half", turn=1)
    rooms.end(again, Quiet.QUIET)
    rooms.open(RoomKey(10, 1), "half", turn=4)
    rooms.end(RoomKey(10, 1), Quiet.QUIET)
    for late in (again, RoomKey(7, 1)):
        with pytest.raises(ValueError, match=f"room {late} cannot open: it may have ended here"):
            rooms.open(late, "half", turn=1)
    assert not rooms.open(RoomKey(7, 3), "half", turn=1)


def test_another_control_plane_counts_turns_anew() -> None:
    rooms = RoomTable[str](ends=1)
    for number in (7, 8):
        rooms.open(RoomKey(number, 1), "half", turn=1000 + number)
        rooms.end(RoomKey(number, 1), Quiet.QUIET)
    rooms.adopted()
    rooms.open(RoomKey(9, 1), "half", turn=1)
    rooms.end(RoomKey(9, 1), Quiet.QUIET)  # the end of 8 is forgotten, and with it no turn of this control plane
    assert not rooms.open(RoomKey(10, 1), "half", turn=2)


def test_a_poisoned_end_is_never_forgotten() -> None:
    rooms = RoomTable[str](ends=1)
    for number, outcome in ((7, Quiet.POISONED), (8, Quiet.QUIET), (9, Quiet.QUIET)):
        rooms.open(RoomKey(number, 1), "half", turn=number)
        rooms.end(RoomKey(number, 1), outcome)
    assert rooms.ended(FIRST) is Quiet.POISONED
    assert rooms.poisoned() == [FIRST]


def test_the_dead_are_not_buried_twice(rooms: RoomTable[str]) -> None:
    rooms.open(FIRST, "half")
    rooms.end(FIRST, Quiet.QUIET)
    rooms.bury(FIRST, until=100.0)
    assert rooms._tombstones == {}
