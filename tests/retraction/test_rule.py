"""The rule of retraction by itself: every room ends, the oldest is never retracted, and no page is owed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.engine_adapters.reference.facts import Budget, Space
from dsv4ctl.engine_adapters.reference.pressure import PAGE, Age, Holder, first_pages, grow

SPACES = ("full", "swa")


def budget(free: int, coming: int = 0) -> Budget:
    return Budget(SPACES, [Space(free, coming)] * 2)


def holders(*grows: bool) -> list[Holder]:
    """The oldest first; room numbers say nothing about age."""
    return [Holder(Age(turn, RoomKey(100 - turn, 1)), wants) for turn, wants in enumerate(grows)]


def key(turn: int) -> RoomKey:
    return RoomKey(100 - turn, 1)


@pytest.mark.parametrize(
    ("retracted", "oldest", "pages"), [(False, False, 4), (False, True, 4), (True, False, 9), (True, True, 4)]
)
def test_a_room_begins_with_its_prompt_and_a_page_and_a_retracted_one_with_all(
    retracted: bool, oldest: bool, pages: int
) -> None:
    assert first_pages(3, 9, retracted=retracted, oldest=oldest) == pages
    assert first_pages(3, 3, retracted=retracted, oldest=oldest) == 3


def test_who_finds_a_page_grows_and_nobody_is_retracted() -> None:
    growth = grow(holders(True, False, True), budget(2), leaving=False)
    assert (growth.grown, growth.starved, growth.retracted) == ({key(0), key(2)}, frozenset(), None)


def test_the_oldest_grow_first_and_the_youngest_is_retracted_once() -> None:
    """The youngest, whether it grows or not, and one at a time: its pages may be enough."""
    growth = grow(reversed(holders(True, True, True, False)), budget(1), leaving=False)
    assert (growth.grown, growth.starved, growth.retracted) == ({key(0)}, {key(1), key(2)}, key(3))


@pytest.mark.parametrize(("coming", "leaving"), [(1, False), (0, True)])
def test_nobody_is_retracted_while_pages_are_coming(coming: int, leaving: bool) -> None:
    growth = grow(holders(True, True), budget(0, coming), leaving)
    assert (growth.starved, growth.retracted) == ({key(0), key(1)}, None)


def test_a_room_alone_is_never_retracted() -> None:
    assert grow(holders(True), budget(0), leaving=False).retracted is None


@dataclass
class _Room:
    """One request through its generations. `quiet`: steps until the pages of a generation that ended come back."""

    turn: int
    prompt: int
    whole: int
    quiet: int
    generation: int = 1
    need: int = 0  #: pages that its next token needs
    held: int = 0
    leaving: int | None = None
    done: bool = False

    @property
    def age(self) -> Age:
        return Age(self.turn, RoomKey(100 - self.turn, self.generation))

    def begin(self, oldest: bool) -> int:
        return first_pages(self.prompt, self.whole, retracted=self.generation > 1, oldest=oldest)


class _Pool:
    """What the step loop does around the rule, with pages alone."""

    def __init__(self, pages: int, rooms: Sequence[_Room]) -> None:
        self.pages, self.rooms = pages, list(rooms)
        self.retractions = 0

    def step(self) -> None:
        for room in self.rooms:
            self._let_go(room)
        free = self.pages - sum(room.held for room in self.rooms)
        assert free >= 0
        budget_ = budget(free)
        held = [room for room in self.rooms if room.held and room.leaving is None]
        growth = grow(
            [Holder(room.age, room.need > room.held) for room in held],
            budget_,
            any(r.leaving is not None for r in self.rooms),
        )
        for room in held:
            room.held += room.age.key in growth.grown
        if growth.retracted is not None:
            self._retract(growth.retracted, held)
        if not growth.starved:
            self._admit(budget_)
        for room in held:
            if room.age.key not in growth.starved and room.leaving is None:
                self._advance(room)

    def _let_go(self, room: _Room) -> None:
        if room.leaving is None:
            return
        room.leaving -= 1
        if room.leaving < 0:
            room.held, room.leaving = 0, None
            room.generation += not room.done

    def _retract(self, which: RoomKey, held: list[_Room]) -> None:
        (victim,) = [room for room in held if room.age.key == which]
        assert any(room.age < victim.age for room in held), "the oldest is retracted"
        victim.leaving = victim.quiet
        self.retractions += 1

    def _admit(self, budget_: Budget) -> None:
        living = [room for room in self.rooms if not room.done]
        for room in sorted(living, key=lambda room: room.age):
            if room.held:
                continue
            pages = room.begin(oldest=room is min(living, key=lambda room: room.age))
            if not budget_.take(dict.fromkeys(PAGE, pages)):
                return
            room.held, room.need = pages, room.prompt

    def _advance(self, room: _Room) -> None:
        """A page's worth of tokens."""
        if room.need >= room.whole:
            room.done, room.leaving = True, room.quiet
        else:
            room.need += 1


@settings(max_examples=100)
@given(st.data())
def test_every_room_ends_after_finitely_many_retractions(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, 8))
    sizes = [
        (data.draw(st.integers(1, 4)), data.draw(st.integers(0, 5)), data.draw(st.integers(0, 3)))
        for _ in range(number)
    ]
    rooms = [_Room(turn, prompt, prompt + more, quiet) for turn, (prompt, more, quiet) in enumerate(sizes)]
    pool = _Pool(max(room.whole for room in rooms) + data.draw(st.integers(0, 6)), rooms)
    growing = sum(room.whole for room in rooms)
    for _ in range(20 * (growing + number) * number):
        if all(room.done and not room.held for room in rooms):
            break
        pool.step()
    assert all(room.done and not room.held for room in rooms), "a room never ends"
    assert pool.retractions <= growing * number
