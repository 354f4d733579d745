"""The KV race detector: happens-before over a trace, with per-page state only.

Each access lasts from one event to another: a load writes from `lease` to `landed` (of the layer), a peer from
`write` to `complete`, a consumer reads from `read` (or its grant) to its ticket's end. The gate's lock orders the
events of one rank, so a rank is one component of the vector clock; frames between ranks order the rest. Two accesses
of which one writes must not overlap: one has to end before an event that is ordered before the other's begin.

Pure: events in, races out. Memory: pages, live tickets, open loads, rooms under way, and a bounded number of races.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from dsv4ctl.controlplane.trace.findings import Findings
from dsv4ctl.controlplane.trace.format import Event, Extents, Rank
from dsv4ctl.controlplane.trace.merge import Merged
from dsv4ctl.controlplane.trace.peers import Peers
from dsv4ctl.controlplane.trace.races import Report
from dsv4ctl.controlplane.trace.readers import Readers
from dsv4ctl.controlplane.trace.state import RankState
from dsv4ctl.controlplane.trace.writers import Writers


def check(ranks: Mapping[str, Rank], events: Iterable[Merged]) -> Report:
    detector = Detector(ranks)
    feed = detector.feed
    for incarnation, event, extents in events:
        feed(incarnation, event, extents)
    return detector.report()


class Detector:
    def __init__(self, ranks: Mapping[str, Rank]) -> None:
        self._ranks = {incarnation: RankState(rank) for incarnation, rank in ranks.items()}
        self._findings = Findings()
        self._events = self._resets = 0
        peers = Peers(self._findings, self._ranks)
        writers, readers = Writers(self._findings, peers), Readers(self._findings, peers)
        self._handlers: dict[str, Callable[[RankState, Event, Extents], None]] = {
            **writers.handlers(),
            **readers.handlers(),
            **peers.handlers(),
        }

    def feed(self, incarnation: str, event: Event, extents: Extents) -> None:
        """One event; those of a rank come in order. Kinds that order nothing are passed over."""
        rank = self._ranks[incarnation]
        if rank.next_seq != event.seq and rank.next_seq is not None:
            self._resets += 1
            rank.forget()
        rank.next_seq = event.seq + 1
        self._events += 1
        handler = self._handlers.get(event.kind)
        if handler is not None:
            handler(rank, event, extents)

    def report(self) -> Report:
        findings = self._findings
        return Report(
            findings.races(),
            self._events,
            [state.rank.name for state in self._ranks.values()],
            accesses=findings.accesses,
            dropped=findings.dropped,
            resets=self._resets,
        )
