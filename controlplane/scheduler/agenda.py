"""When which room is to be looked at: a heap, so that a look costs what is due, however many rooms live."""

from __future__ import annotations

from heapq import heappop, heappush

from dsv4ctl.controlplane.rooms.states import RoomKey

_NEVER = float("inf")


class Agenda:
    """The earliest moment that was noted of each room. One whose deadline moved away is looked at in vain, once."""

    def __init__(self) -> None:
        self._noted: dict[RoomKey, float] = {}
        self._heap: list[tuple[float, RoomKey]] = []  #: also moments that no longer count, until they have passed

    def note(self, key: RoomKey, due: float) -> None:
        if due < self._noted.get(key, _NEVER):
            self._noted[key] = due
            heappush(self._heap, (due, key))

    def forget(self, key: RoomKey) -> None:
        self._noted.pop(key, None)

    def take(self, now: float) -> list[RoomKey]:
        """The rooms to look at now. Whoever lives on has to be noted again."""
        taken = []
        while self._heap and self._heap[0][0] <= now:
            due, key = heappop(self._heap)
            if self._noted.get(key) == due:
                del self._noted[key]
                taken.append(key)
        return taken

    @property
    def next(self) -> float:
        return self._heap[0][0] if self._heap else _NEVER
