"""Drain: stop admitting, wait for the rooms (not only for HTTP), abort what is left, stop - in one budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import anyio

from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.controlplane.scheduler.fleet import EngineState
from dsv4ctl.controlplane.supervisor.supervisor import Supervisor
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.policies import registry
from dsv4ctl.policies.drain import Action


class Drained(NamedTuple):
    engines: list[str]
    left: list[str]  #: rooms that had to be aborted


async def drain(supervisor: Supervisor, names: Iterable[str], budget: float | None) -> Drained:
    """Drains engines; returns once they have ended or the budget is spent (they end all the same).

    An engine that is resumed meanwhile drops out. Nothing here waits longer than the policy's steps say.
    """
    config, telemetry = supervisor.config, supervisor.telemetry
    asked = list(names)
    deadlines = config.deadlines
    total = deadlines.drain if budget is None else budget
    policy = registry.load("drain", config.policies.drain)(budget=total, ack=deadlines.ack, fence=deadlines.fence)
    begun = anyio.current_time()
    telemetry.emit(Event.DRAIN_BEGIN, engines=asked, deadline_s=total)
    left: list[str] = []

    def draining() -> list[str]:
        return [name for name in asked if supervisor.fleet.engines[name].state is EngineState.DRAINING]

    for step in policy.steps():
        with anyio.CancelScope(deadline=begun + step.until):
            match step.action:
                case Action.REFUSE:
                    for name in asked:
                        supervisor.runners[name].drain()
                case Action.FINISH:
                    await supervisor.desk.until_empty(draining)
                case Action.ABORT:
                    left = _abort(supervisor, draining())
                    await supervisor.desk.until_empty(draining)
                case Action.STOP:
                    await _stop(supervisor, policy.stop_order(_roles(supervisor, asked)))
    done = [name for name in asked if supervisor.fleet.engines[name].state is EngineState.DRAINED]
    telemetry.emit(Event.DRAIN_DONE, engines=done, rooms=left, seconds=round(anyio.current_time() - begun, 3))
    return Drained(done, left)


def _abort(supervisor: Supervisor, names: list[str]) -> list[str]:
    """Aborts the rooms of `names` that are left, and names them."""
    left = supervisor.desk.rooms_of(names)
    if not left:
        return []
    keys = [str(live.key) for live in left]
    supervisor.telemetry.emit(Event.DRAIN_LEFTOVERS, "warning", rooms=keys)
    for live in left:
        supervisor.desk.abort(live, AbortSource.DRAIN, "the drain deadline passed")
    return keys


def _roles(supervisor: Supervisor, names: list[str]) -> list[tuple[str, str]]:
    return [(name, supervisor.fleet.engines[name].config.role) for name in names]


async def _stop(supervisor: Supervisor, order: Iterable[str]) -> None:
    """Ends engines in order; one that was resumed meanwhile is left alone."""
    engines = [supervisor.fleet.engines[name] for name in order]
    stopped = [engine for engine in engines if engine.state is EngineState.DRAINING]
    for engine in stopped:
        supervisor.runners[engine.name].stop()
    await supervisor.changes.until(lambda: all(engine.state is EngineState.DRAINED for engine in stopped))
