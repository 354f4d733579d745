"""What a rank knows of its sequences, as numbers that can be reduced over ranks by taking the least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dsv4ctl.controlplane.rooms.states import AbortSource

#: Of `Known.abort`: nobody aborts the room. Below it: the index of the source; the least one is told.
NO_ABORT = len(AbortSource)
SOURCES = tuple(AbortSource)


class Known(NamedTuple):
    """One sequence on one rank or, after the reduction, on all: a field is large only if it is so everywhere."""

    abort: int = NO_ABORT  #: below NO_ABORT: some rank's room is aborting, or was refused there
    told: int = 1  #: every peer told us where to write
    ready: int = 1  #: its bytes landed and are verified
    vouched: int = 1  #: what landed is what was sealed: its output may leave
    quiet: int = 1  #: its room ended: nobody touches its pages any more


class Space(NamedTuple):
    """Pages of one space: free now, and freed but still touched by somebody (they come without being asked for)."""

    free: int
    coming: int


FAILED, LOADING, LOADED = range(3)


def flatten(rows: Iterable[tuple[int, ...]]) -> list[int]:
    return [value for row in rows for value in row]


class Budget:
    """Pages that every rank can allocate in this step. All ranks make the same calls, so all agree on the rest."""

    def __init__(self, spaces: Sequence[str], values: Sequence[Space]) -> None:
        self._free = {space: value.free for space, value in zip(spaces, values, strict=True)}
        self._coming = {space: value.coming for space, value in zip(spaces, values, strict=True)}

    def take(self, wants: dict[str, int]) -> bool:
        """All or nothing."""
        if any(self._free[space] < count for space, count in wants.items()):
            return False
        for space, count in wants.items():
            self._free[space] -= count
        return True

    def missing(self, wants: dict[str, int]) -> dict[str, int]:
        """What will still be short once the pages that are coming are here: this much must be evicted."""
        short = {space: count - self._free[space] - self._coming[space] for space, count in wants.items()}
        return {space: count for space, count in short.items() if count > 0}

    def promise(self, space: str, pages: int) -> None:
        """These pages were evicted: they come back in a later step."""
        self._coming[space] += pages
