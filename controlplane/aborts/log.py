"""The control plane's half of abort delivery: one ordered log per rank incarnation, re-sent until received."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey

#: Seconds after which an abort that was not reported as received is sent again.
RESEND_AFTER = 0.5


class AbortEntry(NamedTuple):
    seq: int
    key: RoomKey
    source: AbortSource
    reason: str


class AbortLog:
    """Entries are numbered from 1 without gaps, so that the rank can apply them in order exactly once."""

    def __init__(self) -> None:
        self._seq = 0
        self._unreceived: deque[AbortEntry] = deque()
        self._due_at: float | None = None

    @property
    def pending(self) -> int:
        """Entries not yet reported as received."""
        return len(self._unreceived)

    def append(self, key: RoomKey, source: AbortSource, reason: str) -> AbortEntry:
        self._seq += 1
        entry = AbortEntry(self._seq, key, source, reason)
        self._unreceived.append(entry)
        if self._due_at is None:
            self._due_at = float("-inf")
        return entry

    def received(self, seq: int) -> None:
        """The rank applied every entry up to `seq`. A number never sent is refused with ValueError."""
        if seq > self._seq:
            raise ValueError(f"abort {seq} was reported as received, only {self._seq} were sent")
        while self._unreceived and self._unreceived[0].seq <= seq:
            self._unreceived.popleft()
        if not self._unreceived:
            self._due_at = None

    def due(self, now: float) -> list[AbortEntry]:
        """Every entry not yet received, if it is time to send: at once after `append`, then every `RESEND_AFTER`."""
        if self._due_at is None or now < self._due_at:
            return []
        self._due_at = now + RESEND_AFTER
        return list(self._unreceived)

    def next_due(self) -> float | None:
        return self._due_at
