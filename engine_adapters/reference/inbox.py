"""Work handed to an event loop by other threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

import anyio


class Inbox:
    """Calls from any thread, carried out in order on the loop. A call that raises ends the loop, visibly."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken: anyio.Event | None = None

    def put(self, call: Callable[[], None]) -> None:
        """Never blocks. Before the loop runs the call waits for it; after its end it is not carried out."""
        self._calls.append(call)
        loop = self._loop
        if loop is not None:
            # The loop may close meanwhile: its end is reported elsewhere, and the caller must not pay for it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wake)

    def drain(self) -> None:
        """Carries out what is there: called before a frame is handled, so that what came first is done first."""
        while self._calls:
            self._calls.popleft()()

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                woken = self._woken = anyio.Event()
                self.drain()
                await woken.wait()
        finally:
            self._loop = None

    def _wake(self) -> None:
        if self._woken is not None:
            self._woken.set()
