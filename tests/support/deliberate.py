"""A clock of what is waited for on purpose: time-outs, sleeps, deadlines. How fast the machine is does not show."""

from __future__ import annotations

import asyncio
import selectors

#: Seconds that sockets of this process may take to bring what was sent, before time passes.
_DELIVERY = 0.05


class _Selector(selectors.DefaultSelector):
    """Waits for sockets as ever; `passed` is what was waited in vain, each time for as long as it was meant to be."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout if timeout is None else min(timeout, _DELIVERY))
        if not found and timeout is not None:
            self.passed += max(timeout, 0.0)
        return found


class DeliberateLoop(asyncio.SelectorEventLoop):
    """Its time stands still while anything is computed or arrives, and jumps to whatever is due next."""

    def __init__(self) -> None:
        self._waits = _Selector()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.passed


def pytest_asyncio_loop_factories() -> dict[str, type[DeliberateLoop]]:
    """For the conftest.py of tests all of whose parties live in their process."""
    return {"deliberate": DeliberateLoop}
