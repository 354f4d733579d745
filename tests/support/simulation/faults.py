"""Carries out a plan's faults."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from anyio.abc import TaskGroup

from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.controlplane.scheduler.fleet import EngineState
from simulation.host import Faults
from simulation.plan import Fault

if TYPE_CHECKING:
    from simulation.world import World

#: Seconds for which a rank may feel a fault that is over.
_AFTERMATH = 5.0
#: What keeps an engine from working, or its reports from coming.
_SILENCING = ("pause", "partition", "wedge", "slow_link")


class Injector:
    def __init__(self, world: World) -> None:
        self._world = world
        self._random = Random(f"{world.plan.seed} faults")
        self._heals: list[Callable[[], None]] = []
        self._troubled: dict[str, float] = {}
        self._silenced: dict[str, float] = {}

    def troubled(self, engine: str) -> bool:
        """Whether its lines may be slow, deaf or gone."""
        now = self._world.loop.time()
        return max(self._troubled.get(engine, 0.0), self._troubled.get("", 0.0)) > now

    def silenced(self, engine: str) -> bool:
        """Whether anything but its own fault can have kept it from working, or from saying so."""
        return self._silenced.get(engine, 0.0) > self._world.loop.time()

    def begin(self, fault: Fault, tasks: TaskGroup) -> None:
        world = self._world
        world.tell(f"fault: {fault}")
        on_engine = fault.kind not in ("clock_jump", "restart", "crash", "drain_all", "partition", "lose")
        until = world.loop.time() + fault.seconds + _AFTERMATH
        name = fault.target if on_engine else ""
        self._troubled[name] = max(self._troubled.get(name, 0.0), until)
        if fault.kind in _SILENCING:
            silent = float("inf") if fault.kind == "wedge" else until + world.config.deadlines.wedge
            self._silenced[fault.target] = max(self._silenced.get(fault.target, 0.0), silent)
        begin = getattr(self, f"_{fault.kind}")
        if fault.kind in ("log_reader_stalls", "trace_disk_full", "drain_engine", "drain_all"):
            tasks.start_soon(begin, fault)
        else:
            begin(fault)

    def heal(self) -> None:
        """Every fault is over."""
        for undo in self._heals:
            undo()
        self._heals.clear()

    def _for(self, fault: Fault, undo: Callable[[], None]) -> None:
        self._heals.append(undo)
        self._world.loop.call_later(fault.seconds, undo)

    def _faults(self, fault: Fault) -> Faults:
        return self._world.host.faults(fault.target, fault.rank)

    # ---- lines ---------------------------------------------------------------------------------------

    def _lines(self, fault: Fault, name: str, value: float) -> None:
        faults = self._faults(fault)
        for line in (faults.link, faults.wire):
            setattr(line, name, value)
            self._for(fault, partial(setattr, line, name, 1.0 if name == "slow" else 0.0))

    def _lose(self, fault: Fault) -> None:
        """On every link: where one rank is told, it tells its peer."""
        for engine in self._world.plan.deployment.engines():
            for rank in range(self._world.plan.deployment.ranks):
                self._lines(msgspec.structs.replace(fault, target=engine, rank=rank), "lose", fault.amount)

    def _repeat(self, fault: Fault) -> None:
        self._lines(fault, "repeat", fault.amount)

    def _reorder(self, fault: Fault) -> None:
        self._lines(fault, "reorder", fault.amount)

    def _slow_link(self, fault: Fault) -> None:
        self._lines(fault, "slow", 1.0 + 20.0 * fault.amount)

    def _partition(self, fault: Fault) -> None:
        """Nothing reaches the rank or leaves it; what was sent arrives once it is over."""
        faults = self._faults(fault)
        faults.link.cut, faults.peers_cut = True, True
        self._peer_break(fault)

        def undo() -> None:
            faults.peers_cut = False
            faults.link.heal()

        self._for(fault, undo)

    def _break_link(self, fault: Fault) -> None:
        rank = self._world.host.of(fault.target, fault.rank)
        if rank is not None:
            rank.break_link()

    def _peer_break(self, fault: Fault) -> None:
        self._world.host.break_wires(
            lambda wire: any(
                rank.group.name == fault.target and rank.number == fault.rank for rank in (wire.dialler, wire.listener)
            )
        )

    def _write_lost(self, fault: Fault) -> None:
        self._switch(fault, "write_lost")

    def _retract(self, fault: Fault) -> None:
        rank = self._world.host.of(fault.target, 0)
        if rank is not None and rank.role is Role.DECODE:
            rank.group.retract()

    def _corrupt(self, fault: Fault) -> None:
        self._switch(fault, "corrupt")

    def _switch(self, fault: Fault, name: str) -> None:
        faults = self._faults(fault)
        setattr(faults, name, True)
        self._for(fault, partial(setattr, faults, name, False))

    # ---- processes -----------------------------------------------------------------------------------

    def _kill(self, fault: Fault) -> None:
        rank = self._world.host.of(fault.target, fault.rank)
        if rank is not None:
            rank.end(-signal.SIGKILL)

    def _pause(self, fault: Fault) -> None:
        rank = self._world.host.of(fault.target, fault.rank)
        if rank is not None:
            rank.pause()
            self._for(fault, rank.resume)

    def _wedge(self, fault: Fault) -> None:
        """It reports, and computes nothing any more."""
        rank = self._world.host.of(fault.target, 0)
        if rank is not None:
            rank.group.wedged = True

    def _clock_jump(self, fault: Fault) -> None:
        self._world.jump(fault.seconds)

    def _restart(self, fault: Fault) -> None:
        self._world.signal()

    def _crash(self, fault: Fault) -> None:
        if self._world.up:
            self._world.crash()

    # ---- people --------------------------------------------------------------------------------------

    def _client_wave(self, fault: Fault) -> None:
        self._world.clients.leave_all(fault.amount, self._random)

    def _abort_wave(self, fault: Fault) -> None:
        desk = self._world.supervisor.desk
        desk.abort_where(lambda live: self._random.random() < fault.amount, AbortSource.ADMIN, "asked by the operator")

    async def _drain_engine(self, fault: Fault) -> None:
        """An operator drains one engine, with the aborts of what is left, and resumes it."""
        plane = self._world.plane
        await plane.drain([fault.target], 2.0 + fault.seconds)
        state = self._world.supervisor.fleet.engines[fault.target].state
        if plane is self._world.plane and state is not EngineState.DRAINED:
            self._world.tell(f"{fault.target} was resumed meanwhile: {state.value}")
        if plane is self._world.plane and not plane.stopping:
            await plane.resume([fault.target])

    async def _drain_all(self, fault: Fault) -> None:
        """The drain of everything ends the control plane; somebody starts it again."""
        await self._world.plane.drain([], 3.0)

    async def _log_reader_stalls(self, fault: Fault) -> None:
        """A reader of the events that reads nothing for a while, then reads on, then leaves."""
        async with self._world.plane.subscribe() as records:
            await anyio.sleep(fault.seconds)
            with anyio.move_on_after(1.0):
                async for _ in records:
                    pass

    async def _trace_disk_full(self, fault: Fault) -> None:
        """Whoever records the trace can write so many parts of it, and no more."""
        left = 3
        trace = self._world.plane.trace(follow=True)
        try:
            async for part in trace:
                _write(part, left)
                left -= 1
        except OSError as error:
            self._world.tell(f"trace record: {error}")
        finally:
            await trace.aclose()  # type: ignore[attr-defined]


def _write(part: dict[str, Any], left: int) -> None:
    if not left:
        raise OSError(errno.ENOSPC, "No space left on device")
