"""Live events to whoever asks for them (`dsv4ctl logs --follow`)."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

Record = dict[str, Any]

#: The latest records, kept for whoever asks what just happened.
RECENT = 200
#: Events held for one slow subscriber; above it they are dropped and counted.
BUFFER = 1000


class _Subscriber:
    def __init__(self, stream: MemoryObjectSendStream[Record], dropped_record: Callable[[int], Record]) -> None:
        self._stream = stream
        self._dropped_record = dropped_record
        self._missed = 0
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def publish(self, record: Record) -> None:
        if threading.get_ident() == self._thread:
            self._send(record)
            return
        try:
            self._loop.call_soon_threadsafe(self._send, record)
        except RuntimeError:  # the loop is closed: nobody listens any more
            return

    def _send(self, record: Record) -> None:
        try:
            if self._missed:
                self._stream.send_nowait(self._dropped_record(self._missed))
                self._missed = 0
            self._stream.send_nowait(record)
        except anyio.WouldBlock:
            self._missed += 1
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # the subscriber is leaving


class Hub:
    """Fans records out; publishing never blocks and may be done from any thread."""

    def __init__(self, dropped_record: Callable[[int], Record]) -> None:
        self._dropped_record = dropped_record
        self._subscribers: tuple[_Subscriber, ...] = ()
        self._lock = threading.Lock()
        self._recent: deque[Record] = deque(maxlen=RECENT)

    def recent(self) -> list[Record]:
        return list(self._recent)

    def publish(self, record: Record) -> None:
        self._recent.append(record)
        for subscriber in self._subscribers:
            subscriber.publish(record)

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[MemoryObjectReceiveStream[Record]]:
        send, receive = anyio.create_memory_object_stream[Record](BUFFER)
        subscriber = _Subscriber(send, self._dropped_record)
        with self._lock:
            self._subscribers = (*self._subscribers, subscriber)
        try:
            with send, receive:
                yield receive
        finally:
            with self._lock:
                self._subscribers = tuple(one for one in self._subscribers if one is not subscriber)
