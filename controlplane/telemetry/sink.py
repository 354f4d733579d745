"""Lines to a file descriptor that may have no reader: bounded queue, own thread, drops counted."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

#: Seconds that a line may wait for others: to wake the thread that writes costs its waker several times the line.
GATHER = 0.005


class LineSink:
    """Writes lines from its own thread, those of `GATHER` seconds at once; `put` never blocks.

    `capacity` bounds the lines held, those being written included. A line above it is dropped and counted;
    `dropped_line(count)` is written where the dropped ones would have stood.
    If the descriptor fails (its reader is gone), later lines are dropped and `failed(error)` is called once.
    """

    def __init__(
        self,
        fd: int,
        capacity: int,
        dropped_line: Callable[[int], str],
        failed: Callable[[OSError], None],
    ) -> None:
        self._fd = fd
        self._capacity = capacity
        self._dropped_line = dropped_line
        self._failed = failed
        self._queue: deque[str | int] = deque()  # lines, and how many were dropped between them
        self._held = 0  # lines in the queue or being written
        self._closing = threading.Event()
        self._broken = False
        self._change = threading.Condition()
        self.dropped = 0  #: lines lost since start
        # A daemon: a write that nobody reads blocks for ever, and must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        with self._change:
            if self._broken or self._closing.is_set() or self._held >= self._capacity:
                self.dropped += 1
                if self._queue and isinstance(self._queue[-1], int):
                    self._queue[-1] += 1
                    return
                self._queue.append(1)
            else:
                self._queue.append(line)
                self._held += 1
            self._change.notify()

    def close(self, timeout: float) -> None:
        """Writes what is held, for at most `timeout` seconds; what a stalled reader leaves is lost."""
        with self._change:
            self._closing.set()
            self._change.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._queue or self._closing.is_set())
                if not self._queue:
                    return
            self._closing.wait(GATHER)
            with self._change:
                batch, self._queue = self._queue, deque()
            texts = [self._dropped_line(item) if isinstance(item, int) else item for item in batch]
            try:
                self._write("".join(f"{text}\n" for text in texts))
            except OSError as error:
                self._break(error)
                return
            with self._change:
                self._held -= sum(isinstance(item, str) for item in batch)

    def _write(self, text: str) -> None:
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        while data:
            data = data[os.write(self._fd, data) :]

    def _break(self, error: OSError) -> None:
        with self._change:
            self._broken = True
            self.dropped += self._held
            self._queue.clear()
        self._failed(error)
