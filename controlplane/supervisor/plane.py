"""What the admin verbs see: the control plane's state as JSON, and what may be asked of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from typing import Any

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream

from dsv4ctl.controlplane.admin.errors import AdminError
from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.controlplane.scheduler.fleet import Engine, EngineState
from dsv4ctl.controlplane.supervisor.draining import drain
from dsv4ctl.controlplane.supervisor.supervisor import Supervisor
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.tickets.types import Guard
from dsv4ctl.controlplane.watchdog.judge import State, judge_engine

#: Seconds a rank has to drop its cached pages.
FLUSH_DEADLINE = 10.0
#: Seconds between two looks into the ranks' trace rings, which hold tens of thousands of events.
TRACE_INTERVAL = 0.5


class SupervisedPlane:
    """Implements `admin.plane.Plane` over the supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._began = anyio.current_time()
        self._ready_once = False
        self.config = supervisor.config
        self.telemetry = supervisor.telemetry
        self.gateway: str | None = None  #: its URL once it listens
        self.stopping = False  #: a signal has asked for the end: nothing is resumed any more

    # ---- looking ----------------------------------------------------------------------------------

    def state(self) -> str:
        fleet = self._supervisor.fleet
        states = {engine.state for engine in fleet}
        if states == {EngineState.DRAINED}:
            return "stopped"
        if self._supervisor.desk.refusing:
            return "draining"
        if fleet.draining:
            return "draining" if EngineState.DRAINING in states else "drained"
        self._ready_once = self._ready_once or states == {EngineState.READY}
        return "ready" if self._ready_once else "starting"

    async def status(self) -> dict[str, Any]:
        supervisor = self._supervisor
        now, wedge = anyio.current_time(), self.config.deadlines.wedge
        return {
            "state": self.state(),
            "version": version("dsv4ctl"),
            "pid": os.getpid(),
            "uptime_s": round(now - self._began, 3),
            "gateway": self.gateway,
            "engines": {engine.name: engine.state.value for engine in supervisor.fleet},
            "paused": [e.name for e in supervisor.fleet if _verdict(e, now, wedge) is State.PAUSED],
            "rooms": supervisor.desk.counts(),
            "unsafe": list(supervisor.guards_off),
            "quarantined": sum(engine.quarantined for engine in supervisor.fleet),
            "dropped_log_lines": self.telemetry.dropped,
            "loops": supervisor.loops.status() if supervisor.loops else {},
        }

    async def engines(self) -> list[dict[str, Any]]:
        now, wedge = anyio.current_time(), self.config.deadlines.wedge
        return [_engine(engine, now, wedge) for engine in self._supervisor.fleet]

    async def rooms(self, room: int | None) -> list[dict[str, Any]]:
        now = anyio.current_time()
        desk = self._supervisor.desk
        if room is None:
            return [live.describe(now, full=False) for live in desk.live.values()]
        return [live.describe(now, full=True) for live in desk.find(room)]

    async def tickets(self) -> list[dict[str, Any]]:
        answers = await self._supervisor.query_all("tickets")
        return [_renamed(answer, "answer", "tickets") for answer in answers]

    async def trace(self, follow: bool) -> AsyncIterator[dict[str, Any]]:
        """Every rank in turn, a page at a time, until each has been read to its end."""
        begins: dict[str, int] = {}
        unread = True
        while unread or follow:
            unread = False
            for _, rank in list(self._supervisor.fleet.ranks()):
                if rank.link is None and rank.incarnation in begins:
                    continue  # its end has been told
                begin = begins.get(rank.incarnation, 0)
                found = await self._supervisor.query(rank, f"trace {begin}")
                part = found.get("answer")
                if part is None:
                    begins[rank.incarnation] = begin
                    yield {**rank.fields(), "error": found["error"]}
                elif part["next"] > begin or rank.incarnation not in begins:
                    begins[rank.incarnation] = part["next"]
                    unread = unread or part["more"]
                    yield {**rank.fields(), "identity": part["rank"], "events": part["events"]}
            if follow and not unread:
                await anyio.sleep(TRACE_INTERVAL)

    def subscribe(self) -> AbstractAsyncContextManager[MemoryObjectReceiveStream[dict[str, Any]]]:
        return self.telemetry.subscribe()

    # ---- asking -----------------------------------------------------------------------------------

    async def abort(self, room: int | None, reason: str) -> dict[str, Any]:
        desk = self._supervisor.desk
        if room is not None and not desk.find(room):
            raise AdminError("not_found", f"no room {room}; `rooms` lists those in flight")
        chosen = desk.abort_where(
            lambda live: room is None or live.key.room == room, AbortSource.ADMIN, reason or "asked by the operator"
        )
        return {"aborted": [str(live.key) for live in chosen]}

    async def drain(self, engines: list[str], deadline_s: float | None) -> dict[str, Any]:
        """All of them: new requests are refused from now on, and `start` ends once all have ended."""
        names = self._names(engines)
        fleet = self._supervisor.fleet
        remaining = [e.name for e in fleet if e.name not in names and e.state is not EngineState.DRAINED]
        if not remaining:
            self._supervisor.desk.refusing = "draining"
        drained = await drain(self._supervisor, names, deadline_s)
        return {"drained": drained.engines, "left": drained.left}

    async def resume(self, engines: list[str]) -> dict[str, Any]:
        """Undoes what an operator asked for. Raises AdminError after a signal, which is not theirs to take back."""
        if self.stopping:
            raise AdminError("refused", "the control plane is stopping on a signal")
        leaving = (EngineState.DRAINING, EngineState.DRAINED, EngineState.FAILED)
        names = self._names(engines)
        resumed = [name for name in names if self._supervisor.fleet.engines[name].state in leaving]
        self._supervisor.desk.refusing = None
        for name in resumed:
            self._supervisor.runners[name].start_again()
        self.telemetry.emit(Event.DRAIN_RESUMED, engines=resumed)
        return {"resumed": resumed}

    async def set_guards(self, off: list[str]) -> dict[str, Any]:
        if not self.config.unsafe.runtime:
            raise AdminError("refused", "guards change at run time only with `unsafe.runtime = true`")
        valid = {guard.value for guard in Guard}
        unknown = sorted(set(off) - valid)
        if unknown:
            raise AdminError("bad_request", f"no guard {unknown[0]!r}; there are: {', '.join(sorted(valid))}")
        before = set(self._supervisor.guards_off)
        self._supervisor.set_guards(tuple(off))
        for guard in sorted(set(off) - before):
            self.telemetry.emit(Event.GUARD_OFF, "warning", guard=guard)
        for guard in sorted(before - set(off)):
            self.telemetry.emit(Event.GUARD_ON, guard=guard)
        return {"off": list(off)}

    async def flush(self) -> dict[str, Any]:
        failed = await self.flush_caches()
        if failed is not None:
            raise AdminError("refused", failed)
        return {"flushed": [engine.name for engine in self._supervisor.fleet if engine.ranks]}

    async def flush_caches(self) -> str | None:
        """None, or which rank did not drop every cached page, and why."""
        failed = [
            f"{name}: it is not known yet whether it survived"
            for name, runner in self._supervisor.runners.items()
            if not runner.settled
        ]
        answers = await self._supervisor.query_all("flush", FLUSH_DEADLINE)
        failed += [f"{a['engine']} rank {a['rank']}: {a['error']}" for a in answers if "error" in a]
        return "; ".join(failed) or None

    def _names(self, asked: list[str]) -> list[str]:
        known = self._supervisor.fleet.engines
        for name in asked:
            if name not in known:
                raise AdminError("not_found", f"no engine {name!r}; there are: {', '.join(known)}")
        return list(asked or known)


def _engine(engine: Engine, now: float, wedge: float) -> dict[str, Any]:
    queues: Counter[str] = Counter()
    loops: dict[str, Any] = {}
    ledger: dict[str, Any] = {}
    counters: Counter[str] = Counter()
    for rank in engine.ranks.values():
        if rank.progress is None:
            continue
        queues.update(rank.progress.queues)
        counters.update(rank.progress.counters)
        ledger[str(rank.number)] = msgspec.to_builtins(rank.progress.ledger)
        for name, loop in rank.progress.loops.items():
            loops[f"{rank.number}/{name}"] = msgspec.to_builtins(loop)
    ranks = list(engine.ranks.values())
    geometry = engine.geometry
    return {
        "name": engine.name,
        "role": engine.role.value,
        "state": engine.state.value,
        "cause": engine.cause,
        "verdict": _verdict(engine, now, wedge).value,
        "pid": ranks[0].pid if ranks else None,
        "pids": [rank.pid for rank in ranks],
        "incarnations": [rank.incarnation for rank in ranks],
        "url": engine.url,
        "bootstrap_port": engine.bootstrap_port or None,
        "restarts": engine.restarts,
        "steps": sum(rank.progress.steps for rank in ranks if rank.progress),
        "reported_s_ago": _age((rank.history[-1].at for rank in ranks if rank.history), now),
        "queues": dict(queues),
        "counters": dict(counters),
        "ledger": ledger,
        "loops": loops,
        "malformed_frames": sum(rank.link.malformed for rank in ranks if rank.link),
        "aborts_pending": sum(rank.aborts.pending for rank in ranks),
        "cancellable": engine.cancellable.value,
        "geometry": None if geometry is None else _geometry(geometry),
    }


def _verdict(engine: Engine, now: float, wedge: float) -> State:
    return judge_engine({rank.number: rank.history for rank in engine.ranks.values()}, now, wedge).state


def _geometry(geometry: Any) -> dict[str, Any]:
    return {
        "model": geometry.model,
        "page_tokens": geometry.page_tokens,
        "layers": geometry.layers,
        "index_k_dtype": geometry.index_k_dtype,
        "context_tokens": geometry.context_tokens,
        "pages": dict(geometry.pages),
        "pools": [pool.name for pool in geometry.pools],
    }


def _age(times: Iterable[float], now: float) -> float | None:
    oldest = min(times, default=None)
    return None if oldest is None else round(now - oldest, 3)


def _renamed(entry: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {(new if key == old else key): value for key, value in entry.items()}
