"""Pool pressure on a decode rank: with how many pages a room begins, which room grows, which one is retracted.

Pure, and from rank-agreed facts alone (S4): the age of rooms, the pages they hold, the step's budget. Pages are
counted whole, space by space, as they are allocated.

- A room begins with the pages of its prompt and one to grow into, all or nothing, and grows page by page.
- When a page is missing for a room that grows, the youngest room that holds pages is retracted: all that it holds
  comes back once its writers are quiet. The room that grows pauses until then; while one pauses, none is admitted.
- The oldest room is never retracted, so it finishes; then the next one is the oldest.
- A retracted room begins again with all that it will ever need, or as the oldest. So each retraction pays for a page
  that an older room keeps until its end: there are finitely many, whatever comes later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.engine_adapters.reference.facts import Budget

#: What a room grows by: a logical page lies in both spaces.
PAGE = {"full": 1, "swa": 1}


class Age(NamedTuple):
    """Smaller is older. A new generation of a room is as old as its first one."""

    turn: int
    key: RoomKey


class Holder(NamedTuple):
    """A room that holds pages. `grows`: its next token needs a page that it does not have."""

    age: Age
    grows: bool


class Growth(NamedTuple):
    grown: frozenset[RoomKey]  #: a page each was taken from the budget
    starved: frozenset[RoomKey]  #: they do not run in this step
    retracted: RoomKey | None


def first_pages(prompt: int, whole: int, *, retracted: bool, oldest: bool) -> int:
    """Logical pages that a room begins with: `prompt` pages are the prompt's, `whole` is all it can ever need."""
    return whole if retracted and not oldest else min(prompt + 1, whole)


def grow(holders: Iterable[Holder], budget: Budget, leaving: bool) -> Growth:
    """One step's growth, the oldest room first. `leaving`: a room that holds pages is ending, so more will come."""
    rooms = sorted(holders, key=lambda holder: holder.age)
    grown: set[RoomKey] = set()
    starved: set[RoomKey] = set()
    for room in rooms:
        if room.grows:
            (grown if budget.take(PAGE) else starved).add(room.age.key)
    if not starved or leaving or not budget.missing(PAGE):
        return Growth(frozenset(grown), frozenset(starved), None)
    return Growth(frozenset(grown), frozenset(starved), _youngest(rooms))


def _youngest(rooms: Sequence[Holder]) -> RoomKey | None:
    """None if there is but one: alone it waits for quarantined pages only, which a fence gives back."""
    return rooms[-1].age.key if len(rooms) > 1 else None
