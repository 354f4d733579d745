"""The events of several ranks in one order that respects cause and effect, whatever their clocks say."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dsv4ctl.controlplane.trace.format import Event, Extents

#: Frames between ranks that both sides record: their receipt comes after their sending. So does the notification
#: `chunk N`, which rides on a `write`.
ORDERED = frozenset({"destination", "ack:quiet", "ack:poisoned"})
CHUNK = "chunk "
Stream = Iterator[tuple[Event, Extents]]
#: (frame, room, sender, receiver)
FrameKey = tuple[str, str, str, str]


class Merged(NamedTuple):
    incarnation: str
    event: Event
    extents: Extents


def frame_key(incarnation: str, event: Event) -> FrameKey:
    if event.kind != "received":
        return event.note, event.room, incarnation, event.who
    return event.note, event.room, event.who, incarnation


def merge(streams: Mapping[str, Stream], ahead_ns: Mapping[str, int]) -> Iterator[Merged]:
    """By time (`at_ns` + `ahead_ns` of the rank), but no frame is received before it is sent.

    A frame whose sending was not recorded is waited for until every rank waits; then the oldest goes on.
    """
    if len(streams) == 1:
        ((incarnation, stream),) = streams.items()
        for event, extents in stream:
            yield Merged(incarnation, event, extents)
        return
    yield from _Merge(streams, ahead_ns).run()


class _Merge:
    def __init__(self, streams: Mapping[str, Stream], ahead_ns: Mapping[str, int]) -> None:
        self._streams = dict(streams)
        self._ahead = ahead_ns
        self._heads: dict[str, tuple[Event, Extents]] = {}
        self._ready: list[tuple[int, str]] = []
        self._waiting: dict[FrameKey, str] = {}
        self._sent: Counter[FrameKey] = Counter()

    def run(self) -> Iterator[Merged]:
        for incarnation in list(self._streams):
            self._advance(incarnation)
        while self._ready or self._waiting:
            if not self._ready:
                self._let_oldest_go()
            _, incarnation = heapq.heappop(self._ready)
            event, extents = self._heads[incarnation]
            yield Merged(incarnation, event, extents)
            if event.kind == "write" or (event.kind == "sent" and event.note in ORDERED):
                self._was_sent(frame_key(incarnation, event))
            self._advance(incarnation)

    def _advance(self, incarnation: str) -> None:
        head = next(self._streams[incarnation], None)
        if head is None:
            del self._streams[incarnation]
            self._heads.pop(incarnation, None)
            for key in [key for key in self._waiting if key[2] == incarnation]:  # it will never come
                self._push(self._waiting.pop(key))
            return
        self._heads[incarnation] = head
        event = head[0]
        if event.kind == "received" and (event.note in ORDERED or event.note.startswith(CHUNK)):
            key = frame_key(incarnation, event)
            if self._sent[key]:
                self._sent[key] -= 1
                if not self._sent[key]:
                    del self._sent[key]
            else:
                del self._sent[key]
                if key[2] in self._streams:
                    self._waiting[key] = incarnation
                    return
        self._push(incarnation)

    def _push(self, incarnation: str) -> None:
        heapq.heappush(self._ready, (self._heads[incarnation][0].at_ns + self._ahead.get(incarnation, 0), incarnation))

    def _was_sent(self, key: FrameKey) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            self._sent[key] += 1
        else:
            self._push(waiting)

    def _let_oldest_go(self) -> None:
        def age(key: FrameKey) -> int:
            incarnation = self._waiting[key]
            return self._heads[incarnation][0].at_ns + self._ahead.get(incarnation, 0)

        self._push(self._waiting.pop(min(self._waiting, key=age)))
