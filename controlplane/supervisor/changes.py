"""A broadcast: whoever waits for a condition looks again after each `notify`."""

from __future__ import annotations

from collections.abc import Callable

import anyio


class Changes:
    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = anyio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once `condition()` holds. The caller sets the deadline."""
        while not condition():
            await self._event.wait()
