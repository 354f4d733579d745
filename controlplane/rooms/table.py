"""The rooms of one rank, by key: older generations are refused, ends and early aborts remembered (design section 6)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from dsv4ctl.controlplane.rooms.states import Quiet, RoomKey

#: Tombstones kept at most; the oldest go first. Each is also dropped after its deadline.
MAX_TOMBSTONES = 4096
#: Ended rooms remembered at most, so that a late abort of one is answered as it ended. Poisoned ones are never
#: forgotten: their process will be fenced.
MAX_ENDED = 8192

Half = TypeVar("Half")


class RoomTable(Generic[Half]):
    """At most one generation of a room lives on a rank. `tombstones`, `ends`: how many are remembered."""

    def __init__(self, tombstones: int = MAX_TOMBSTONES, ends: int = MAX_ENDED) -> None:
        self._max_tombstones = tombstones
        self._max_ended = ends
        self._rooms: dict[int, tuple[int, Half]] = {}
        self._tombstones: dict[RoomKey, float] = {}
        self._ended: dict[int, int] = {}  #: by room number: the last generation that ended here
        self._poisons: dict[int, int] = {}  #: the same of rooms of which a generation was poisoned
        self._turns: dict[int, int] = {}  #: by room number, of those that live here or are remembered
        #: By generation: the highest turn of a room of which it was the last to end, and that is remembered no more.
        self._forgotten: dict[int, int] = {}
        self.stale = 0  #: frames of an older generation, or of a room that ended, that were refused

    def __len__(self) -> int:
        return len(self._rooms)

    def __iter__(self) -> Iterator[tuple[RoomKey, Half]]:
        return ((RoomKey(room, gen), half) for room, (gen, half) in list(self._rooms.items()))

    def open(self, key: RoomKey, half: Half, turn: int = 0) -> bool:
        """Adds the room. True if an abort for it came first: the caller aborts it at once. `turn`: see `OpenRoom`.

        Raises ValueError while any generation of it lives here, and once this or a newer one has ended here, or may
        have: a room that is not remembered, as old as one that was forgotten, and not of a later generation.
        """
        present = self._rooms.get(key.room)
        if present is not None:
            raise ValueError(f"room {key} cannot open: generation {present[0]} lives here")
        ended = self._last(key.room)
        if ended >= key.generation:
            raise ValueError(f"room {key} cannot open: generation {ended} has ended here")
        forgotten = max((turn for gen, turn in self._forgotten.items() if gen >= key.generation), default=-1)
        if not ended and turn <= forgotten:
            raise ValueError(
                f"room {key} cannot open: it may have ended here, what ended up to turn {forgotten} is forgotten"
            )
        self._rooms[key.room] = (key.generation, half)
        self._turns[key.room] = turn
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
        self._ended.pop(key.room, None)
        # A process with a poisoned room is fenced; until then nothing it says of that number is good news.
        poisoned = outcome is Quiet.POISONED or key.room in self._poisons
        (self._poisons if poisoned else self._ended)[key.room] = key.generation
        while len(self._ended) > self._max_ended:
            oldest = next(iter(self._ended))
            generation = self._ended.pop(oldest)
            if oldest not in self._rooms:
                turn = self._turns.pop(oldest, -1)
                self._forgotten[generation] = max(self._forgotten.get(generation, -1), turn)

    def is_over(self, key: RoomKey) -> bool:
        """It ended here, as far as that is remembered, and no newer generation of it has been here since."""
        return key.room not in self._rooms and self._last(key.room) == key.generation

    def ended(self, key: RoomKey) -> Quiet | None:
        """How the room, or a newer generation of it, ended here, if that is remembered."""
        if self._last(key.room) < key.generation:
            return None
        return Quiet.POISONED if key.room in self._poisons else Quiet.QUIET

    def poisoned(self) -> list[RoomKey]:
        """Ended rooms whose writes nobody can vouch for."""
        return [RoomKey(room, generation) for room, generation in self._poisons.items()]

    def bury(self, key: RoomKey, until: float) -> None:
        """Remembers the abort of a room that is not known (yet) until `until`, in the caller's clock."""
        if self.ended(key) is not None:
            return
        self._tombstones.pop(key, None)
        self._tombstones[key] = until
        while len(self._tombstones) > self._max_tombstones:
            del self._tombstones[next(iter(self._tombstones))]

    def adopted(self) -> None:
        """Another control plane counts turns from 1; what its predecessor sent comes no more."""
        self._turns.clear()
        self._forgotten.clear()

    def sweep(self, now: float) -> None:
        """Drops tombstones past their time."""
        for key in [key for key, until in self._tombstones.items() if until <= now]:
            del self._tombstones[key]

    def _last(self, room: int) -> int:
        """The last generation of which is remembered that it ended here; they count from 1."""
        return self._poisons.get(room) or self._ended.get(room, 0)
