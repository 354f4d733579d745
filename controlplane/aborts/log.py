"""The control plane's half of abort delivery: one ordered log per rank incarnation, re-sent until received."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
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
        self._sent = 0  #: every entry up to this number was handed out by `due`
        self._unreceived: deque[AbortEntry] = deque()
        self._resend_at = float("-inf")

    @property
    def pending(self) -> int:
        """Entries not yet reported as received."""
        return len(self._unreceived)

    def append(self, key: RoomKey, source: AbortSource, reason: str) -> AbortEntry:
        self._seq += 1
        entry = AbortEntry(self._seq, key, source, reason)
        self._unreceived.append(entry)
        return entry

    def received(self, seq: int) -> None:
        """The rank applied every entry up to `seq`. A number never sent is refused with ValueError."""
        if seq > self._seq:
            raise ValueError(f"abort {seq} was reported as received, only {self._seq} were sent")
        while self._unreceived and self._unreceived[0].seq <= seq:
            self._unreceived.popleft()

    def due(self, now: float) -> list[AbortEntry]:
        """Entries to send now: new ones at once, and all that are not received every `RESEND_AFTER`."""
        again = now >= self._resend_at
        newest_first = takewhile(lambda entry: again or entry.seq > self._sent, reversed(self._unreceived))
        entries = list(newest_first)[::-1]
        if entries and again:
            self._resend_at = now + RESEND_AFTER
        self._sent = self._seq
        return entries

    def next_due(self) -> float | None:
        if not self._unreceived:
            return None
        return self._resend_at if self._sent == self._seq else float("-inf")
