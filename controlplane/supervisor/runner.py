"""One engine through its lives: start, readiness, end, fence, restart."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import anyio
from anyio.abc import TaskGroup

from dsv4ctl.controlplane.config.schema import Config
from dsv4ctl.controlplane.scheduler.desk import RoomDesk
from dsv4ctl.controlplane.scheduler.fleet import Engine, EngineState, Rank, history
from dsv4ctl.controlplane.supervisor.changes import Changes
from dsv4ctl.controlplane.supervisor.lines import fields_of, rank_of
from dsv4ctl.controlplane.supervisor.survival import Kept
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import LEVELS, Level, Telemetry
from dsv4ctl.policies.restart import GiveUp, Restart

#: Seconds that an engine asked to end (SIGTERM) has before it is killed. It holds no room by then.
STOP_GRACE = 3.0
#: Seconds for the last lines of a process that is gone; a grandchild may hold its pipes for ever.
LAST_LINES = 1.0


class LaunchError(RuntimeError):
    """An engine cannot be started at all; the message says why."""


class Running(Protocol):
    """A started process (`process.RankProcess`)."""

    argv: tuple[str, ...]
    pid: int
    relayed: anyio.Event

    async def serving(self) -> None: ...
    async def reaped(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    async def relay(self, line: Callable[[str, str], None]) -> None: ...
    async def close(self) -> None: ...


class Launcher(Protocol):
    def processes_of(self, engine: Engine) -> int:
        """How many processes run the engine's ranks, each as many of them. Raises LaunchError."""
        ...

    async def survivors(self, refused: Callable[[Kept, str], None]) -> dict[str, list[str]]:
        """Engines of an earlier control plane that go on: by name the incarnations of their ranks.

        Whatever else it left is gone when this returns; `refused` is told of each process that had to be killed.
        """
        ...

    async def __call__(self, engine: Engine, ranks: Sequence[Rank]) -> Running:
        """Starts the process that runs these ranks, or finds it. Raises LaunchError or OSError."""
        ...


class Started(NamedTuple):
    """A process and the ranks that it runs."""

    process: Running
    ranks: Sequence[Rank]


class EngineRunner:
    """Runs one engine until cancelled. `stop` and `start_again` change what is wanted; `fail` ends a life."""

    def __init__(
        self,
        engine: Engine,
        config: Config,
        launcher: Launcher,
        restart: Restart,
        desk: RoomDesk,
        telemetry: Telemetry,
        changes: Changes,
        random_bits: Callable[[int], int],
    ) -> None:
        self.engine = engine
        self._deadlines = config.deadlines
        self._launcher = launcher
        self._restart = restart
        self._desk = desk
        self._telemetry = telemetry
        self._changes = changes
        self._random_bits = random_bits
        self.settled = False  #: it is known whether an earlier control plane left its processes
        self._adopts = False  #: it did, and they are to be this engine's next life
        self._wanted = True
        self._failures: list[float] = []
        self._over = anyio.Event()  #: this life is to end
        self._cause: str | None = None  #: of a life that failed
        self._ended_itself = False
        self._served = False  #: this life has been ready
        self._last_words = ""

    @property
    def ending(self) -> bool:
        """This life is to end: that its links and processes go is no surprise."""
        return self._over.is_set()

    # ---- what others ask for ----------------------------------------------------------------------

    def fail(self, cause: str) -> None:
        """This life is over: its rooms are aborted at once, its processes killed, reaped and perhaps restarted."""
        if self._over.is_set() or not self.engine.ranks:
            return
        if self.engine.state is EngineState.WEDGED:
            cause = self.engine.cause or cause  # a condemned engine may end before it is ended: of what it was found
        self._cause = cause
        self.engine.cause = cause
        if self.engine.state is EngineState.READY:
            self._enter(EngineState.RESTARTING)
        self._over.set()
        self._desk.lost(self.engine.ranks, f"{self.engine.name}: {cause}")
        self._changes.notify()

    def settle(self, survivors: Sequence[str]) -> None:
        """What earlier control planes left of it: incarnations by rank, whose life goes on; or nothing.

        Whatever was asked for before holds of that life too: one that is stopped is adopted all the same, and ended.
        """
        self.settled = True
        self._adopts = bool(survivors)
        self._begin(survivors)
        if self.engine.state is EngineState.DRAINING and not survivors:
            self.stop()

    def drain(self) -> None:
        """Takes no new room; what it has goes on. Between two lives it has none, and ends here."""
        if self._may_live:
            self._enter(EngineState.DRAINING)
        else:
            self.stop()

    def stop(self) -> None:
        """It is not wanted any more. Its rooms are the caller's business."""
        self._wanted = False
        self._over.set()
        self._enter(self.engine.state if self._may_live else EngineState.DRAINED)

    def start_again(self) -> None:
        """Wanted (again): readmits a draining engine, starts a drained or failed one."""
        self._wanted = True
        self._failures.clear()
        if self.engine.state is EngineState.DRAINING:
            self._enter(self._readmitted())
        self._changes.notify()

    @property
    def _may_live(self) -> bool:
        """It has processes, or nobody knows yet."""
        return bool(self.engine.ranks) or not self.settled

    def _readmitted(self) -> EngineState:
        if self._over.is_set():
            return EngineState.RESTARTING  # too late for this life: the next one follows it
        ready = self._served and all(rank.ready for rank in self.engine.ranks.values())
        return EngineState.READY if ready else EngineState.STARTING

    def _enter(self, state: EngineState) -> None:
        self.engine.state = state
        self._changes.notify()

    # ---- lives ------------------------------------------------------------------------------------

    async def run(self, beat: Callable[[], None]) -> None:
        while True:
            beat()
            await self._changes.until(lambda: self._wanted or self._adopts)
            await self._life()
            if self._wanted and self.engine.state is not EngineState.DRAINING:
                if self._cause is not None:
                    await self._before_next_life()
                continue
            self._wanted = False
            self.engine.cause = None
            self._enter(EngineState.DRAINED)

    async def _before_next_life(self) -> None:
        now = anyio.current_time()
        self._failures.append(now)
        decision = self._restart.decide(self._failures, now)
        name = self.engine.name
        if isinstance(decision, GiveUp):
            self.engine.cause = f"{decision.reason}; the last time: {self._cause}"
            self._wanted = False
            self._enter(EngineState.FAILED)
            self._telemetry.emit(Event.ENGINE_GAVE_UP, "error", engine=name, cause=self.engine.cause)
            return
        self._enter(EngineState.RESTARTING)
        self.engine.restarts += 1
        self._telemetry.emit(
            Event.ENGINE_RESTARTING, "warning", engine=name, cause=self._cause, delay_s=decision.seconds
        )
        with anyio.move_on_after(decision.seconds):
            await self._changes.until(lambda: not self._wanted)
        if not self._wanted:
            self._enter(EngineState.DRAINED)

    async def _life(self) -> None:
        """From its incarnations, fresh ones or survivors, to the last process gone."""
        engine = self.engine
        adopts, self._adopts = self._adopts, False
        if not adopts:
            self._over, self._cause = anyio.Event(), None
            self._begin([f"{self._random_bits(128):032x}" for _ in range(engine.config.ranks)])
            self._enter(EngineState.STARTING)
        self._ended_itself, self._served, self._last_words = False, False, ""
        ranks = list(engine.ranks.values())
        started: list[Started] = []
        async with anyio.create_task_group() as tasks:
            try:
                each = 1 if adopts else len(ranks) // self._launcher.processes_of(engine)
                for first in range(0, len(ranks), each):
                    process = await self._start(ranks[first : first + each], tasks, adopts)
                    started.append(process)
                await self._until_over(ranks, [process for process, _ in started])
                if self._cause is None:
                    await self._ask_to_stop([process for process, _ in started])
            except (OSError, LaunchError) as error:
                self.fail(str(error))
            finally:
                with anyio.CancelScope(shield=True):
                    await self._fence(started)
                tasks.cancel_scope.cancel()
        if self._ended_itself and self._last_words:
            self._cause = self.engine.cause = f"{self._cause}: {self._last_words}"

    def _begin(self, incarnations: Sequence[str]) -> None:
        ranks = [
            Rank(self.engine.name, number, incarnation, history=history(self._deadlines.wedge))
            for number, incarnation in enumerate(incarnations)
        ]
        self.engine.ranks = {rank.incarnation: rank for rank in ranks}

    async def _start(self, ranks: Sequence[Rank], tasks: TaskGroup, adopts: bool) -> Started:
        for rank in () if adopts else ranks:
            self._telemetry.emit(Event.ENGINE_STARTING, **rank.fields())
        process = await self._launcher(self.engine, ranks)
        for rank in ranks:
            rank.pid = process.pid
            rank.started_at = anyio.current_time()
            self._telemetry.emit(
                Event.ENGINE_ADOPTED if adopts else Event.ENGINE_STARTED,
                **rank.fields(), pid=process.pid, argv=list(process.argv),
            )  # fmt: skip
        started = Started(process, ranks)
        tasks.start_soon(process.relay, self._relay_to(ranks))
        tasks.start_soon(self._watch_exit, started)
        return started

    async def _until_over(self, ranks: list[Rank], processes: Sequence[Running]) -> None:
        """Waits for readiness (with its deadline), then for the end of this life."""
        allowed = self._deadlines.ready
        with anyio.move_on_after(allowed):
            await self._changes.until(lambda: self._over.is_set() or all(rank.ready for rank in ranks))
            await self._until_served(processes)
        if self._over.is_set():
            return
        if not self._served:
            missing = [str(rank.number) for rank in ranks if not rank.ready]
            who = f"ranks {', '.join(missing)}" if missing else "its HTTP server does not answer"
            self.fail(f"not ready within {allowed:g} s ({who})")
            return
        self.engine.cause = None
        if self.engine.state is EngineState.STARTING:
            self._enter(EngineState.READY)
        seconds = anyio.current_time() - min(rank.started_at for rank in ranks)
        self._telemetry.emit(
            Event.ENGINE_READY, engine=self.engine.name, url=self.engine.url, seconds=round(seconds, 3)
        )
        await self._over.wait()

    async def _until_served(self, processes: Sequence[Running]) -> None:
        """Waits until every process serves, or this life ends."""
        async with anyio.create_task_group() as tasks:

            async def serving() -> None:
                for process in processes:
                    await process.serving()
                self._served = True
                tasks.cancel_scope.cancel()

            tasks.start_soon(serving)
            await self._over.wait()
            tasks.cancel_scope.cancel()

    async def _watch_exit(self, started: Started) -> None:
        """Says how a process ended, whoever ended it."""
        process, ranks = started
        code = await process.reaped()
        how = _how(code)
        expected = self._over.is_set()
        for rank in ranks:
            self._telemetry.emit(
                Event.ENGINE_EXITED, "info" if expected else "error", **rank.fields(), pid=process.pid,
                exit_code=None if (code or 0) < 0 else code, signal=how if (code or 0) < 0 else None,
            )  # fmt: skip
        self._ended_itself = self._ended_itself or not expected
        numbers = ", ".join(str(rank.number) for rank in ranks)
        self.fail(f"rank{'s' if len(ranks) > 1 else ''} {numbers} ended ({how})")

    def _relay_to(self, ranks: Sequence[Rank]) -> Callable[[str, str], None]:
        """Where the output of a process goes: a line that names one of its ranks is that rank's."""
        by_number: dict[int | None, Rank] = {rank.number: rank for rank in ranks}
        return lambda stream, text: self._line(by_number.get(rank_of(text), ranks[0]), stream, text)

    def _line(self, rank: Rank, stream: str, text: str) -> None:
        if stream == "stderr" and text.strip():
            self._last_words = text.strip()[:300]
        fields: dict[str, Any] = {"stream": stream, **fields_of(text), **rank.fields()}
        level: Level = "info"
        said = fields.pop("level", "info")
        if said in LEVELS:
            level = said
        self._telemetry.emit(Event.ENGINE_OUTPUT, level, **fields)

    # ---- the end of a life ------------------------------------------------------------------------

    async def _ask_to_stop(self, processes: Iterable[Running]) -> None:
        self._telemetry.emit(Event.ENGINE_STOPPING, engine=self.engine.name)
        for process in processes:
            process.terminate()
        with anyio.move_on_after(STOP_GRACE):
            for process in processes:
                await process.reaped()

    async def _fence(self, started: Sequence[Started]) -> None:
        """Kills and reaps. Nothing else proves that a rank writes no more, so nothing else ends this wait."""
        for process, _ in started:
            process.kill()
        for process, ranks in started:
            await self._reaped(process, ranks[0])
            for rank in ranks:
                if rank.link is not None:
                    rank.link.close("its process ended")
                self._telemetry.emit(Event.ENGINE_FENCED, **rank.fields(), pid=process.pid)
                self._desk.gone(rank.incarnation)
        with anyio.move_on_after(LAST_LINES):
            for process, _ in started:
                await process.relayed.wait()
        for process, _ in started:
            await process.close()
        self.engine.ranks = {}

    async def _reaped(self, process: Running, rank: Rank) -> None:
        while True:
            with anyio.move_on_after(self._deadlines.fence):
                await process.reaped()
                return
            self._telemetry.emit(
                Event.ENGINE_EVIDENCE, "error", **rank.fields(),
                cause=f"killed, and not reaped within {self._deadlines.fence:g} s",
            )  # fmt: skip


def _how(code: int | None) -> str:
    if code is None:
        return "its exit code went to an earlier control plane"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
