"""An asyncio event loop in virtual time: nothing blocks, and the clock jumps to whatever is due next.

The same program gives the same run: tasks and cancel scopes are numbered, because anyio keeps them in sets, and a
set is walked in the order of its members' hashes, which by default are addresses.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import anyio
from anyio._backends import _asyncio as backend

Result = TypeVar("Result")

#: Turns of the loop in which no time passes, before it is called a livelock.
_MAX_TURNS = 5_000
_numbers = itertools.count()


class StuckError(RuntimeError):
    """Nobody waits for anything that can still happen: a wake-up was lost."""


class _Numbered(asyncio.Task[Any]):
    def __init__(self, coroutine: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = next(_numbers)
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class _NumberedScope(backend.CancelScope):
    __slots__ = ("_number",)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._number = next(_numbers)
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._number


class _NoSelector:
    """In place of a wait for sockets: time passes at once."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        self._loop.wait(timeout)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._selector = _NoSelector(self)
        self._clock_resolution = 1e-9
        self._now = 1000.0
        self._turns = 0
        self._signals: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self.set_task_factory(lambda loop, coroutine, **options: _Numbered(coroutine, loop=loop, **options))

    def time(self) -> float:
        return self._now

    def time_ns(self) -> int:
        return round(self._now * 1e9)

    def wait(self, timeout: float | None) -> None:
        """Raises StuckError if there is nothing to wait for, or too much happens without any time passing."""
        if timeout is None:
            raise StuckError("every task waits, and nothing is due")
        self._turns = 0 if timeout > 0 else self._turns + 1
        if self._turns > _MAX_TURNS:
            raise StuckError(f"{_MAX_TURNS} turns of the loop at {self._now:.3f} s")
        self._now += max(timeout, 0.0)

    def jump(self, seconds: float) -> None:
        """The machine was suspended: everything that was due meanwhile is due now."""
        self._now += seconds

    # ---- signals, as the control plane waits for them ------------------------------------------------

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *arguments: Any) -> None:
        self._signals[sig] = (callback, arguments)

    def remove_signal_handler(self, sig: int) -> bool:
        return self._signals.pop(sig, None) is not None

    def deliver(self, sig: signal.Signals) -> bool:
        """Whether anybody took it."""
        callback, arguments = self._signals.get(sig, (None, ()))
        if callback is None:
            return False
        self.call_soon(callback, *arguments)
        return True

    # ---- what BaseEventLoop leaves to those with a selector -------------------------------------------

    def _process_events(self, event_list: list[Any]) -> None:
        return

    def _write_to_self(self) -> None:
        return


@contextmanager
def _numbered() -> Iterator[None]:
    global _numbers  # noqa: PLW0603 - every run counts from 0
    _numbers = itertools.count()
    with patch.object(backend, "CancelScope", _NumberedScope):
        yield


def run(main: Callable[[VirtualLoop], Awaitable[Result]]) -> Result:
    """`main`'s result, in as much virtual time as it takes. What it raises is raised."""

    async def entry() -> Result:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return await main(loop)

    with _numbered():
        return anyio.run(entry, backend_options={"loop_factory": VirtualLoop})
