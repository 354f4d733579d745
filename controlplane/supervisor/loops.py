"""Every background loop by name: when it last ran and what it died of. A dead loop is never silent (S8)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.abc import TaskGroup

from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import Telemetry

#: Seconds before a loop that died is started again.
RESTART_AFTER = 0.5


@dataclass
class LoopState:
    runs: int = 0
    last_run: float | None = None
    last_error: str | None = None


class Loops:
    """Starts loops in one task group. One that dies is reported and started again."""

    def __init__(self, telemetry: Telemetry, tasks: TaskGroup) -> None:
        self._telemetry = telemetry
        self._tasks = tasks
        self._states: dict[str, LoopState] = {}

    def start(self, name: str, body: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """Runs `body(beat)` until it returns; `beat()` says that it lives."""
        state = self._states.setdefault(name, LoopState())
        self._tasks.start_soon(self._run, name, state, body, name=name)

    async def _run(self, name: str, state: LoopState, body: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        def beat() -> None:
            state.runs += 1
            state.last_run = anyio.current_time()

        while True:
            try:
                beat()
                await body(beat)
            except Exception as error:  # noqa: BLE001 - whatever a loop dies of is reported, and it is restarted
                state.last_error = repr(error)
                self._telemetry.emit(Event.LOOP_DIED, "error", loop=name, error=repr(error))
                await anyio.sleep(RESTART_AFTER)
            else:
                return

    def status(self) -> dict[str, dict[str, Any]]:
        now = anyio.current_time()
        return {
            name: {
                "runs": state.runs,
                "idle_s": None if state.last_run is None else round(now - state.last_run, 3),
                "last_error": state.last_error,
            }
            for name, state in self._states.items()
        }
