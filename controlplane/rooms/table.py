"""The rooms of one rank, by key: older generations are refused, early aborts remembered (design section 6)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from dsv4ctl.controlplane.rooms.states import RoomKey

#: Tombstones kept at most; the oldest go first. Each is also dropped after its deadline.
MAX_TOMBSTONES = 4096

Half = TypeVar("Half")


class RoomTable(Generic[Half]):
    """At most one generation of a room lives on a rank."""

    def __init__(self) -> None:
        self._rooms: dict[int, tuple[int, Half]] = {}
        self._tombstones: dict[RoomKey, float] = {}
        self.stale = 0  #: frames of an older generation, or of a room that ended, that were refused

    def __len__(self) -> int:
        return len(self._rooms)

    def __iter__(self) -> Iterator[tuple[RoomKey, Half]]:
        return ((RoomKey(room, gen), half) for room, (gen, half) in list(self._rooms.items()))

    def open(self, key: RoomKey, half: Half) -> bool:
        """Adds the room. True if an abort for it came first: the caller aborts it at once.

        Raises ValueError if this or a newer generation already lives here.
        """
        present = self._rooms.get(key.room)
        if present is not None:
            raise ValueError(f"room {key} cannot open: generation {present[0]} lives here")
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

    def end(self, key: RoomKey) -> None:
        """Forgets an ended room. Raises KeyError if it does not live here."""
        if self._rooms[key.room][0] != key.generation:
            raise KeyError(key)
        del self._rooms[key.room]

    def bury(self, key: RoomKey, until: float) -> None:
        """Remembers the abort of a room that is not known (yet) until `until`, in the caller's clock."""
        self._tombstones[key] = until
        while len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def sweep(self, now: float) -> None:
        """Drops tombstones past their time."""
        for key in [key for key, until in self._tombstones.items() if until <= now]:
            del self._tombstones[key]
