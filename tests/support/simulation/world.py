"""One run of a plan: the control plane as it is, engines, clients and faults, from the start to the last drain."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import traceback
from collections import Counter
from collections.abc import Callable
from random import Random
from time import process_time
from typing import Any, NamedTuple

import anyio

from dsv4ctl.controlplane.config.schema import (
    Config,
    DeadlinesConfig,
    EngineConfig,
    HiCacheConfig,
    LimitsConfig,
)
from dsv4ctl.controlplane.gateway.app import STOP_GRACE
from dsv4ctl.controlplane.gateway.completions import Completions
from dsv4ctl.controlplane.scheduler.fleet import EngineState
from dsv4ctl.controlplane.supervisor import runner
from dsv4ctl.controlplane.supervisor.plane import SupervisedPlane
from dsv4ctl.controlplane.supervisor.run import DRAINED, serve
from dsv4ctl.controlplane.supervisor.supervisor import Supervisor
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import Level, Telemetry
from simulation import loop as virtual
from simulation.checks import SLACK, Checks
from simulation.clients import Clients
from simulation.faults import Injector
from simulation.host import Host
from simulation.http import Session
from simulation.loop import VirtualLoop
from simulation.plan import Client, Plan

DEADLINES = DeadlinesConfig(
    allocated=20.0, bootstrapping=20.0, loading=20.0, sending=20.0, landed=5.0, verified=10.0, decoding=30.0,
    ack=2.0, fence=2.0, drain=15.0, ready=10.0, wedge=4.0,
)  # fmt: skip
#: Seconds after the last fault within which everything is to be over: the longest life of a room, and its abort.
_REST = 160.0
#: Seconds between two rounds of the checks.
_ROUND = 0.25
#: Lines of the run's story that are kept.
_STORY = 4000


class Violation(NamedTuple):
    invariant: str
    what: str
    at: float

    def __str__(self) -> str:
        return f"{self.invariant} at {self.at:.3f} s: {self.what}"


class Found(NamedTuple):
    """`slowest`: the largest share of its deadline that the end of an abort took. `digest`: of all that was said.

    `simulated`: virtual seconds; `cpu`: seconds of one core that they cost.
    """

    plan: Plan
    violations: list[Violation]
    story: list[str]
    digest: str
    rooms: int
    answers: Counter[str]
    events: Counter[str]
    slowest: float
    leaked: int
    simulated: float
    cpu: float


class _Said(Telemetry):
    """Telemetry of the run: into its story, its digest and its checks."""

    def __init__(self, world: World) -> None:
        super().__init__(level="debug", now=world.loop.time)
        self._world = world

    def emit(self, event: Event, level: Level = "info", **fields: Any) -> None:
        super().emit(event, level, **fields)
        self._world.said(event, level, fields)


class World:
    def __init__(self, loop: VirtualLoop, plan: Plan) -> None:
        self.loop, self.plan = loop, plan
        self.config = _config(plan)
        self.host = Host(loop, plan, self.violated)
        self.checks = Checks(self, self.violated)
        self.violations: list[Violation] = []
        self.events: Counter[str] = Counter()
        self.clients = Clients(self)
        self.leaked = 0
        self.rooms = 0
        self.supervisor: Supervisor
        self.plane: SupervisedPlane
        self._began = loop.time()
        self._random = Random(f"{plan.seed} names")
        self._telemetry = _Said(self)
        self._jumps: list[tuple[float, float]] = []
        self._names: dict[str, str] = {}
        self._story: list[str] = []
        self._digest = hashlib.sha256()
        self._over = anyio.Event()
        self._plane_scope = anyio.CancelScope()
        self._last_code: int | None = None
        self.stopping = False  #: the last drain has begun
        self._crashed = False

    @property
    def up(self) -> bool:
        return self.clients.gateway is not None

    # ---- time and words ------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.loop.time() - self._began

    def elapsed(self, since: float) -> float:
        """Seconds since then, less those for which the machine was suspended."""
        now = self.loop.time()
        return now - since - sum(min(at + seconds, now) - max(at, since) for at, seconds in self._jumps
                                 if at + seconds > since)  # fmt: skip

    @property
    def awake(self) -> float:
        """Since when the machine has not been suspended."""
        return max((at + seconds for at, seconds in self._jumps), default=0.0)

    def jump(self, seconds: float) -> None:
        self._jumps.append((self.loop.time(), seconds))
        self.loop.jump(seconds)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.loop.call_later(seconds, call)

    def violated(self, invariant: str, what: str) -> None:
        self.tell(f"VIOLATED {invariant}: {what}")
        self.violations.append(Violation(invariant, what, self.now))
        self._over.set()

    def tell(self, line: str) -> None:
        line = f"{self.now:10.4f} s  {line}"
        self._digest.update(line.encode())
        self._story.append(line)
        if len(self._story) > 2 * _STORY:
            del self._story[:_STORY]

    def said(self, event: Event, level: str, fields: dict[str, Any]) -> None:
        if self._crashed:
            return
        self.events[event.value] += 1
        if event is Event.ENGINE_STARTING:
            life = f"{fields['engine']}/{fields['rank']}"
            self._names[fields["incarnation"]] = life
        if event is Event.ROOM_OPENED:
            self.rooms += 1
        told = {name: self._plain(value) for name, value in fields.items() if name != "answer"}
        self.tell(
            f"{event.value}: " + ", ".join(f"{name}={value}" for name, value in told.items() if value is not None)
        )
        self.checks.event(event, level, fields)
        if event in (Event.ROOM_CLOSED, Event.ROOM_ABORTED):
            self.checks.ended(self.supervisor.desk._ended[-1])

    def name_of(self, incarnation: str) -> str:
        return self._names.get(incarnation, incarnation)

    def troubled(self, engine: str) -> bool:
        return self.injector.troubled(engine)

    def _plain(self, value: Any) -> Any:
        return self.name_of(value) if isinstance(value, str) else getattr(value, "value", value)

    # ---- the control plane ---------------------------------------------------------------------------

    async def _control_plane(self) -> None:
        """One life after another: a restarted control plane begins with nothing, and its engines are gone."""
        while not self.stopping:
            with anyio.CancelScope() as self._plane_scope:
                self.supervisor = Supervisor(
                    self.config, self._telemetry, "link", self.host, self.host.listen, self._random.getrandbits
                )
                self.plane = SupervisedPlane(self.supervisor)
                session: Any = Session(self.host.server)
                self.clients.gateway = Completions(self.config.gateway, self.supervisor.desk, session, self._telemetry)
                self.host.held.clear()
                self._last_code, self._crashed = None, False
                self._last_code = await serve(self.supervisor, self.plane, lambda plane: None)
                self.supervisor.desk.refusing = "stopped"
                with anyio.move_on_after(STOP_GRACE):
                    await until(lambda: not self.clients)
            self.clients.gateway = None
            self.tell(f"the control plane ended: {self._last_code}")
            self.clients.cut_off()
            await anyio.sleep(0.5)
            left = self._left_behind()
            if left:
                self.violated("S5", f"the control plane ended, and {len(left)} ranks live")

    def _left_behind(self) -> list[str]:
        """Ranks that live and that no next control plane is to go on with.

        One that is stopped before it has adopted them leaves them as it found them.
        """
        if not self.plan.deployment.survive or self._last_code == DRAINED:
            return list(self.host.ranks)
        return (
            [] if self._crashed else [incarnation for incarnation in self.host.ranks if incarnation in self.host.held]
        )

    def signal(self) -> None:
        """SIGTERM, as an operator or systemd sends it."""
        self.loop.deliver(signal.SIGTERM)

    def crash(self) -> None:
        """The control plane dies: what its code does from here on is done by nobody."""
        self._crashed = True
        self.host.crash()
        self._plane_scope.cancel()

    # ---- the run -------------------------------------------------------------------------------------

    async def run(self) -> None:
        self.loop.set_exception_handler(self._died)
        self.injector = Injector(self)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._control_plane)
            tasks.start_soon(self._rounds)
            tasks.start_soon(self._script, tasks)
            await self._over.wait()
            self.stopping = True
            tasks.cancel_scope.cancel()

    async def _script(self, tasks: Any) -> None:
        plan = self.plan
        async with anyio.create_task_group() as clients:
            for client in plan.clients:
                clients.start_soon(self.clients.at, client, self._began)
            for fault in plan.faults:
                self.loop.call_at(self._began + fault.at, self.injector.begin, fault, tasks)
            await anyio.sleep_until(self._began + plan.seconds)
            self.injector.heal()
            rest = anyio.current_time() + _REST
            with anyio.CancelScope(deadline=rest) as patience:
                await until(lambda: not self._unrest())
            if patience.cancelled_caught:
                self.violated("S5", f"not at rest {_REST:.0f} s after the last fault: {self._unrest()}")
        await anyio.sleep(SLACK)  # what was lost has been sent again
        self.checks.at_rest()
        await self._serves_again()
        await self._drains()
        self._over.set()

    def _unrest(self) -> str:
        """Who still waits for something, and which engines that are wanted are not ready."""
        if not self.up or self._last_code is not None or self.plane.stopping:
            return "the control plane is down"
        starting = [e.name for e in self.supervisor.fleet if e.state not in (EngineState.READY, EngineState.FAILED,
                                                                           EngineState.DRAINED)]  # fmt: skip
        rooms = [str(key) for key in self.supervisor.desk.live]
        held = [
            rank.name
            for rank in self.host.ranks.values()
            if not rank.group.wedged and (rank.parts or any(True for _ in rank.agent._rooms))
        ]
        clients = len(self.clients)
        parts = {"engines": starting, "rooms": rooms, "ranks with rooms": held, "clients": [clients] * bool(clients)}
        return "; ".join(f"{what} {', '.join(map(str, which))}" for what, which in parts.items() if which)

    async def _serves_again(self) -> None:
        """Whatever happened: an operator resumes what is drained or given up, and a request is answered."""
        await self.plane.resume([])
        for _ in [*self.supervisor.fleet, None]:  # that an idle engine is wedged shows when it gets work
            with anyio.move_on_after(60.0) as patience:
                await until(lambda: all(engine.ready for engine in self.supervisor.fleet))
            if patience.cancelled_caught:
                self.violated("S5", f"not ready again: {self.supervisor.fleet.why_not()}")
            told = await self.clients.ask(Client(-1, 0.0, pages=2, tokens=3, stream=True))
            if told == "200":
                return
        self.violated("S5", f"the system is at rest, and a request is answered {told}")

    async def _drains(self) -> None:
        """The last drain finds no room, and ends `start` with exit code 0 as soon as the engines have ended."""
        self.stopping = True
        self.signal()
        with anyio.move_on_after(runner.STOP_GRACE + STOP_GRACE + SLACK):
            await until(lambda: not self.up)
        if self.up or self._last_code != DRAINED:
            self.violated("S5", f"the last drain ended with {self._last_code}")

    async def _rounds(self) -> None:
        while True:
            if self.up:
                self.checks.round()
            await anyio.sleep(_ROUND)

    def _died(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.violated("S8", f"{context.get('message')}: {context.get('exception')!r}")

    def found(self, cpu: float) -> Found:
        return Found(
            self.plan, self.violations, self._story[-_STORY:], self._digest.hexdigest(), self.rooms, self.clients.told,
            self.events, self.checks.slowest, self.leaked, self.now, cpu,
        )  # fmt: skip


async def until(condition: Callable[[], bool]) -> None:
    """Looks a few times a second: in virtual time that costs nothing. The caller sets the deadline."""
    while not condition():  # noqa: ASYNC110 - what is looked at has no events
        await anyio.sleep(0.05)


def simulate(plan: Plan) -> Found:
    """Runs the plan. Whatever is raised inside is a violation too."""
    began = process_time()
    kept: list[World] = []

    async def main(loop: VirtualLoop) -> None:
        world = World(loop, plan)
        kept.append(world)
        await world.run()

    try:
        virtual.run(main)
    except Exception as error:  # noqa: BLE001 - a task that died, or a run that is stuck, is what is looked for
        first = _first(error)
        kept[0].tell("".join(traceback.format_exception(first)))
        kept[0].violated("S8", repr(first))
    return kept[0].found(process_time() - began)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _config(plan: Plan) -> Config:
    deployment = plan.deployment
    return Config(
        engines=[
            EngineConfig(
                name=name, role="prefill" if name.startswith("prefill") else "decode", ranks=deployment.ranks,
                hicache=HiCacheConfig(enabled=False), survive=deployment.survive,
            )
            for name in deployment.engines()
        ],
        deadlines=DEADLINES,
        limits=LimitsConfig(max_rooms=deployment.max_rooms, quarantine_max=max(4, deployment.pages // 2)),
    )  # fmt: skip
