"""A rank's half of abort delivery: applied in order, exactly once, whatever the link repeats or reorders."""

from __future__ import annotations

from dsv4ctl.controlplane.aborts.log import AbortEntry

#: How far ahead of a missing entry others are held; the sender repeats whatever is dropped here.
MAX_AHEAD = 1024


class AbortInbox:
    def __init__(self, ahead: int = MAX_AHEAD) -> None:
        self._ahead = ahead
        self.received = 0  #: every entry up to this number has been handed out
        self._held: dict[int, AbortEntry] = {}

    def offer(self, entry: AbortEntry) -> list[AbortEntry]:
        """The entries that may be applied now, in order. A repeated one yields nothing.

        The caller reports `received` after each call, also for a repeated entry: the report may have been lost.
        """
        if self.received < entry.seq <= self.received + self._ahead:
            self._held[entry.seq] = entry
        ready = []
        while (entry_next := self._held.pop(self.received + 1, None)) is not None:
            self.received += 1
            ready.append(entry_next)
        return ready
