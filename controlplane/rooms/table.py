"""The rooms of one rank, by key: older generations are refused, ends and early aborts remembered (design section 6)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from dsv4ctl.controlplane.rooms.states import Quiet, RoomKey

#: Tombstones kept at most; the oldest go first. Each is also dropped after its deadline.
MAX_TOMBSTONES = 4096
#: Ended rooms remembered at most, so that a late abort of one is answered as it ended.
MAX_ENDED = 8192

Half = TypeVar("Half")


class RoomTable(Generic[Half]):
    """At most one generation of a room lives on a rank."""

    def __init__(self) -> None:
        self._rooms: dict[int, tuple[int, Half]] = {}
        self._tombstones: dict[RoomKey, float] = {}
        self._ended: dict[int, tuple[int, Quiet]] = {}  #: by room number: the last generation that ended here
        self.stale = 0  #: frames of an older generation, or of a room that ended, that were refused

    def __len__(self) -> int:
        return len(self._rooms)

    def __iter__(self) -> Iterator[tuple[RoomKey, Half]]:
        return ((RoomKey(room, gen), half) for room, (gen, half) in list(self._rooms.items()))

    def open(self, key: RoomKey, half: Half) -> bool:
        """Adds the room. True if an abort for it came first: the caller aborts it at once.

        Raises ValueError while any generation of it lives here, and once this or a newer one has ended here.
        """
        present = self._rooms.get(key.room)
        if present is not None:
            raise ValueError(f"room {key} cannot open: generation {present[0]} lives here")
        ended = self._ended.get(key.room)
        if ended is not None and ended[0] >= key.generation:
            raise ValueError(f"room {key} cannot open: generation {ended[0]} has ended here")
        self._rooms[key.room] = (key.generation, half)
        return self._tombstones.pop(key, None) is not None

    def get(self, key: RoomKey) -> Half | None:
        """The room's half, or None if it is unknown, ended, or of another generation (counted as stale)."""
        present = self._rooms.get(key.room)
        if present is None or present[0] != key.generation:
            self.stale += 1
            return None
        return present[1]

    def current(self, room: int) -> tuple[RoomKey, Half] | None:
        """The generation of `room` that lives here, for callers that know only its number."""
        present = self._rooms.get(room)
        return None if present is None else (RoomKey(room, present[0]), present[1])

    def end(self, key: RoomKey, outcome: Quiet) -> None:
        """The room ended: only how is remembered. Raises KeyError if it does not live here."""
        if self._rooms[key.room][0] != key.generation:
            raise KeyError(key)
        del self._rooms[key.room]
        _, before = self._ended.pop(key.room, (0, Quiet.QUIET))
        # A process with a poisoned room is fenced; until then nothing it says of that number is good news.
        self._ended[key.room] = (key.generation, before if before is Quiet.POISONED else outcome)
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def is_over(self, key: RoomKey) -> bool:
        """It ended here, as far as that is remembered, and no newer generation of it has been here since."""
        return key.room not in self._rooms and self._ended.get(key.room, (None,))[0] == key.generation

    def ended(self, key: RoomKey) -> Quiet | None:
        """How the room, or a newer generation of it, ended here, if that is remembered."""
        last = self._ended.get(key.room)
        return None if last is None or last[0] < key.generation else last[1]

    def poisoned(self) -> list[RoomKey]:
        """Ended rooms whose writes nobody can vouch for, as far as they are remembered."""
        return [RoomKey(room, gen) for room, (gen, outcome) in self._ended.items() if outcome is Quiet.POISONED]

    def bury(self, key: RoomKey, until: float) -> None:
        """Remembers the abort of a room that is not known (yet) until `until`, in the caller's clock."""
        if self.ended(key) is not None:
            return
        self._tombstones.pop(key, None)
        self._tombstones[key] = until
        while len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def sweep(self, now: float) -> None:
        """Drops tombstones past their time."""
        for key in [key for key, until in self._tombstones.items() if until <= now]:
            del self._tombstones[key]
