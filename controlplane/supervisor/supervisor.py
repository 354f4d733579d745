"""Owns the engines and their links: what happens to a rank reaches its engine, its rooms and the log."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import anyio
from anyio.abc import TaskGroup

from dsv4ctl.controlplane.config.schema import Config
from dsv4ctl.controlplane.link.codec import FrameError
from dsv4ctl.controlplane.link.handshake import Expected
from dsv4ctl.controlplane.link.server import Link, LinkLostError, LinkServer, Listen, QueryError, listen
from dsv4ctl.controlplane.link.wire import Hello, Progress, SetGuards, ToControlPlane
from dsv4ctl.controlplane.scheduler.desk import RoomDesk
from dsv4ctl.controlplane.scheduler.fleet import PROGRESS_INTERVAL, Engine, EngineState, Fleet, Rank
from dsv4ctl.controlplane.scheduler.live import LiveRoom
from dsv4ctl.controlplane.supervisor.changes import Changes
from dsv4ctl.controlplane.supervisor.evidence import Evidence, Kind
from dsv4ctl.controlplane.supervisor.loops import Loops
from dsv4ctl.controlplane.supervisor.runner import EngineRunner, Launcher
from dsv4ctl.controlplane.supervisor.survival import Kept
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import Level, Telemetry
from dsv4ctl.controlplane.watchdog.judge import dead_loop
from dsv4ctl.controlplane.watchdog.watch import Watched, watch
from dsv4ctl.policies import registry

#: Seconds for a query that only looks.
QUERY_DEADLINE = 2.0
#: What is asked of a wedged rank before it is killed, and seconds for all of it.
EVIDENCE = ("stacks", "rooms", "tickets")
EVIDENCE_DEADLINE = 1.0
#: Starts of engines overlap, but prefill engines are begun first: decode engines connect to them.
START_ORDER = ("prefill", "single", "decode")
#: Engines that serve, or finish what they have.
_WATCHED = (EngineState.READY, EngineState.DRAINING)


class Supervisor:
    """Everything that lives as long as the control plane does, except the servers in front."""

    def __init__(
        self,
        config: Config,
        telemetry: Telemetry,
        link_path: str,
        launcher: Launcher,
        listening: Listen = listen,
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        """`random_bits(n)` names rooms and incarnations: n bits that nobody has had before."""
        self.config = config
        self.telemetry = telemetry
        self.changes = Changes()
        self.fleet = Fleet(config.engines)
        self.desk = RoomDesk(config, self.fleet, telemetry, self.fence, self._mismatched, random_bits)
        self._kept = Evidence(config.evidence, telemetry, lambda rank, what: self.query(rank, what, EVIDENCE_DEADLINE))
        self.links = LinkServer(link_path, self, PROGRESS_INTERVAL, listening)
        self.guards_off: tuple[str, ...] = tuple(config.unsafe.off)
        self.runners: dict[str, EngineRunner] = {}
        restart = registry.load("restart", config.policies.restart)
        for engine in self.fleet:
            self.runners[engine.name] = EngineRunner(
                engine, config, launcher, restart(), self.desk, telemetry, self.changes, random_bits
            )
        self._launcher = launcher
        self._tasks: TaskGroup | None = None
        self.loops: Loops | None = None

    async def start(self, tasks: TaskGroup) -> None:
        """Starts every loop in `tasks`; returns once the link socket accepts. Raises OSError."""
        self._tasks = tasks
        survivors = await self._launcher.survivors(self._not_adopted)
        for name, runner in self.runners.items():
            runner.settle(survivors.get(name, []))
        self.loops = Loops(self.telemetry, tasks)
        await tasks.start(self.links.serve)
        self.loops.start("deadlines", self.desk.keep_deadlines)
        wedge = self.config.deadlines.wedge
        self.loops.start("watchdog", lambda beat: watch(self._watched, self._wedged, wedge, beat))
        for runner in sorted(self.runners.values(), key=lambda r: START_ORDER.index(r.engine.config.role)):
            self.loops.start(f"engine {runner.engine.name}", runner.run)

    def _not_adopted(self, kept: Kept, reason: str) -> None:
        fields = {"engine": kept.engine, "rank": kept.rank, "incarnation": kept.incarnation}
        self.telemetry.emit(Event.ENGINE_NOT_ADOPTED, "warning", **fields, pid=kept.pid, reason=reason)

    def runner_of(self, incarnation: str) -> EngineRunner | None:
        engine = self.fleet.owner(incarnation)
        return None if engine is None else self.runners[engine.name]

    def fence(self, incarnation: str, reason: str) -> None:
        """Ends the life of the engine that `incarnation` belongs to. One gone already is fenced already."""
        runner = self.runner_of(incarnation)
        if runner is None:
            return
        if not runner.ending:
            rooms = self.desk.rooms_of([runner.engine.name])
            engines = {engine.name: engine for live in rooms for engine in live.pair.engines}
            engines[runner.engine.name] = runner.engine
            self._take_evidence("fence", reason, engines.values(), rooms)
        runner.fail(f"fenced: {reason}")

    # ---- evidence ---------------------------------------------------------------------------------

    def _mismatched(self, live: LiveRoom) -> None:
        self._take_evidence("mismatch", live.room.reason or "", live.pair.engines, [live], str(live.key))

    def _take_evidence(
        self, kind: Kind, cause: str, engines: Iterable[Engine], rooms: Iterable[LiveRoom], room: str = ""
    ) -> None:
        assert self._tasks is not None
        now = anyio.current_time()
        ranks = [rank for engine in engines for rank in engine.ranks.values()]
        about = [live.describe(now, full=True) for live in rooms]
        self._kept.take(self._tasks, kind, cause, ranks, about, room)

    # ---- LinkHandler ------------------------------------------------------------------------------

    def expected(self) -> Mapping[str, Expected]:
        return {
            rank.incarnation: Expected(engine.name, engine.role, rank.number, engine.config.ranks)
            for engine, rank in self.fleet.ranks()
        }

    def connected(self, link: Link) -> None:
        rank = self.fleet.rank(link.incarnation)
        if rank is None:
            link.close("its incarnation was fenced meanwhile")
            return
        rank.link = link
        link.send(SetGuards(self.guards_off))  # a survivor was told others, perhaps
        self.telemetry.emit(Event.LINK_CONNECTED, **rank.fields(), pid=link.hello.pid, url=link.hello.url)

    def received(self, link: Link, frame: ToControlPlane) -> None:
        rank = self.fleet.rank(link.incarnation)
        if rank is None:
            raise FrameError(f"{link.incarnation} was fenced")
        first = not rank.history
        self.desk.received(rank, frame)
        if isinstance(frame, Progress):
            self._quarantine(rank)
            dead = dead_loop(frame)
            if dead is not None:  # said once, by a process that is about to end
                self._wedged(rank.engine, f"rank {rank.number}: {dead}")
            if first:
                self.changes.notify()

    def malformed(self, hello: Hello | None, error: str, count: int) -> None:
        self.telemetry.emit(Event.LINK_BAD_FRAME, "error", **_who(hello), error=error, count=count)

    def refused(self, hello: Hello | None, reason: str) -> None:
        self.telemetry.emit(Event.LINK_REFUSED, "error", **_who(hello), reason=reason)
        runner = None if hello is None else self.runner_of(hello.incarnation)
        if runner is not None and hello is not None and not self._is_connected(hello.incarnation):
            runner.fail(f"refused: {reason}")

    def lost(self, link: Link, reason: str) -> None:
        runner = self.runner_of(link.incarnation)
        level: Level = "info" if runner is None or runner.ending else "warning"
        self.telemetry.emit(Event.LINK_LOST, level, **_who(link.hello), reason=reason)
        if runner is not None:
            runner.fail(f"rank {link.hello.rank}: link lost: {reason}")

    def _is_connected(self, incarnation: str) -> bool:
        rank = self.fleet.rank(incarnation)
        return rank is not None and rank.link is not None

    # ---- watchdog ---------------------------------------------------------------------------------

    def _watched(self) -> Iterator[Watched]:
        for engine in self.fleet:
            if engine.ranks and engine.state in _WATCHED:
                yield Watched(engine.name, {rank.number: rank.history for rank in engine.ranks.values()})

    def _wedged(self, name: str, cause: str) -> None:
        engine = self.fleet.engines[name]
        if engine.state in _WATCHED:
            self._condemn(engine, Event.ENGINE_WEDGED, cause)

    def _quarantine(self, rank: Rank) -> None:
        engine = self.fleet.engines[rank.engine]
        limit = self.config.limits.quarantine_max
        if engine.quarantined > limit and engine.state in _WATCHED:
            cause = f"{engine.quarantined} quarantined pages, limit {limit}"
            self._condemn(engine, Event.ENGINE_QUARANTINE_FULL, cause)

    def _condemn(self, engine: Engine, event: Event, cause: str) -> None:
        """No new room, its rooms aborted now; then evidence is taken and its life ended."""
        if engine.state is EngineState.READY:
            engine.state = EngineState.WEDGED
        elif engine.cause is not None:
            return  # draining, and condemned in an earlier round
        engine.cause = cause
        rooms = [str(live.key) for live in self.desk.rooms_of([engine.name])]
        self.telemetry.emit(event, "error", engine=engine.name, cause=cause, rooms=rooms)
        self.desk.lost(engine.ranks, f"{engine.name}: {cause}")
        self.changes.notify()
        assert self._tasks is not None
        self._tasks.start_soon(self._evidence_then_fail, engine, cause)

    async def _evidence_then_fail(self, engine: Engine, cause: str) -> None:
        """An engine that ends meanwhile loses its links first, which ends this wait before its next life."""
        async with anyio.create_task_group() as tasks:
            for rank in list(engine.ranks.values()):
                tasks.start_soon(self._evidence, rank, cause)
        self.runners[engine.name].fail(cause)

    async def _evidence(self, rank: Rank, cause: str) -> None:
        found: dict[str, Any] = {}

        async def ask(what: str) -> None:
            found[what] = await self.query(rank, what, EVIDENCE_DEADLINE)

        # At once: a rank whose loop stands looks for what it is asked a few times a second.
        with anyio.move_on_after(EVIDENCE_DEADLINE):
            async with anyio.create_task_group() as tasks:
                for what in (*EVIDENCE, "evidence"):
                    tasks.start_soon(ask, what)
        facts = found.pop("evidence", {})
        self.telemetry.emit(Event.ENGINE_EVIDENCE, "error", **rank.fields(), cause=cause, **found)
        assert self._tasks is not None
        self._tasks.start_soon(self._kept.keep, "wedge", cause, rank, {"progress": rank.progress, **found, **facts})

    # ---- queries ----------------------------------------------------------------------------------

    async def query(self, rank: Rank, what: str, deadline: float = QUERY_DEADLINE) -> dict[str, Any]:
        """`{"answer": ...}` or `{"error": ...}`: a rank that cannot answer is part of the answer."""
        try:
            if rank.link is None:
                raise LinkLostError("not connected")
            return {"answer": await rank.link.query(what, deadline)}
        except TimeoutError:
            error = f"no answer within {deadline:g} s"
        except (LinkLostError, QueryError) as refused:
            error = str(refused)
        self.telemetry.emit(Event.LINK_QUERY_FAILED, "warning", **rank.fields(), what=what, error=error)
        return {"error": error}

    async def query_all(self, what: str, deadline: float = QUERY_DEADLINE) -> list[dict[str, Any]]:
        """One entry a rank, asked all at once: `engine`, `rank`, `incarnation`, and `answer` or `error`."""
        entries = [(rank, rank.fields()) for _, rank in self.fleet.ranks()]

        async def ask(rank: Rank, entry: dict[str, Any]) -> None:
            entry.update(await self.query(rank, what, deadline))

        async with anyio.create_task_group() as tasks:
            for rank, entry in entries:
                tasks.start_soon(ask, rank, entry)
        return [entry for _, entry in entries]

    def set_guards(self, off: tuple[str, ...]) -> None:
        """Tells every rank; those that start later are told at their Hello."""
        self.guards_off = off
        for _, rank in self.fleet.ranks():
            if rank.link is not None and rank.link.lost is None:
                rank.link.send(SetGuards(off))


def _who(hello: Hello | None) -> dict[str, Any]:
    if hello is None:
        return {}
    return {"engine": hello.engine, "rank": hello.rank, "incarnation": hello.incarnation}
