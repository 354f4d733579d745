"""One simulated rank: a process that runs the real agent, ledger and gate, and computes nothing.

It has no task: whatever reaches it is a call, which waits while the process is stopped. `sender`, `receiver` and
the group's rounds do what the reference engine's parts of these names do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from dsv4ctl.controlplane.aborts.log import AbortEntry
from dsv4ctl.controlplane.link.wire import (
    WIRE_VERSION,
    Fenced,
    Geometry,
    Hello,
    OpenRoom,
    PoolGeometry,
    Progress,
    Refused,
    Role,
    ToRank,
    Welcome,
)
from dsv4ctl.controlplane.rooms.effects import Refusal
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey
from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.types import Consumer, SpaceSpec
from dsv4ctl.controlplane.trace.format import Rank as TraceRank
from dsv4ctl.controlplane.trace.format import page
from dsv4ctl.controlplane.trace.ring import Ring
from dsv4ctl.engine_adapters.agent import Agent, UnknownRoomError
from simulation.memory import Memory
from simulation.net import RankEnd
from simulation.receiver import Receiver
from simulation.sender import Sender

if TYPE_CHECKING:
    from simulation.group import Group, Part
    from simulation.host import Host

LAYERS = 2
SPACE = "full"
POOLS = ("c4_kv", "index_k")
GONE = (Refusal, UnknownRoomError)
#: Seconds: from the start of a process to its Hello; from a kill to the reaped process; from SIGTERM to the end.
_START, _REAP, _STOP = (0.3, 1.2), (0.001, 0.2), (0.05, 0.3)
#: Seconds between two looks for another control plane.
_SEEK = 0.2
#: Seconds of a link before Welcome.
_GREETING = 30.0
#: Events kept for `trace` queries: the ring's own capacity is for hours.
_TRACE_EVENTS = 4096


class _Agent(Agent):
    """The agent, and in which order it applied its aborts; that of a room which is over here changes nothing."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.applied: list[RoomKey] = []

    def _apply_abort(self, entry: AbortEntry) -> None:
        if self._rooms.ended(entry.key) is None:
            self.applied.append(entry.key)
        super()._apply_abort(entry)


class Rank:
    def __init__(self, host: Host, group: Group, number: int, incarnation: str, pid: int) -> None:
        self.host, self.group, self.number, self.incarnation = host, group, number, incarnation
        self.name = f"{group.name}/{number}#{group.life}"
        self.random = Random(f"{host.seed} {self.name}")
        self.role = group.role
        self.argv = ("simulated", group.name, str(number))
        self.pid = pid
        self.relayed = anyio.Event()
        self.stopped = False  #: its code runs no more
        self.paused = False
        self.reaped_at: float | None = None
        self.code = 0
        self.faults = host.faults(group.name, number)
        self.memory = Memory(self.name, host.violated, group.pages)
        self.gate = Gate(
            {SPACE: SpaceSpec(group.pages, POOLS)}, LAYERS, Ring(host.loop.time_ns, capacity=_TRACE_EVENTS)
        )
        for consumer in (Consumer.SENDER, Consumer.ATTENTION, Consumer.CHECKSUM):
            self.gate.register(consumer, "simulated")
        self.agent = _Agent(self.role, incarnation, self.gate, self, self._send, host.loop.time)
        self.sender, self.receiver = Sender(self), Receiver(self)
        self.openings: dict[RoomKey, OpenRoom] = {}
        self.parts: dict[RoomKey, Part] = {}
        self.fences: dict[str, float] = {}  #: whose, and when it was told
        self._words = ""
        self._backlog: list[Callable[[], None]] = []
        self._reaped = anyio.Event()
        self._link = RankEnd(self.random, self.faults.link, self._arrived, self._link_lost)
        self._interval: float | None = None
        self._welcomed = False
        self._attempt = 0
        self.after(self.random.uniform(*_START), partial(self._connect, 0))

    # ---- a process -----------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return not (self.stopped or self.paused)

    def post(self, work: Callable[[], None]) -> None:
        """Something reaches the process: it takes it now, or once it goes on."""
        if self.paused and not self.stopped:
            self._backlog.append(work)
        elif not self.stopped:
            work()

    def after(self, seconds: float, work: Callable[[], None]) -> None:
        self.host.loop.call_later(seconds, self.post, work)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        backlog, self._backlog = self._backlog, []
        for work in backlog:
            self.post(work)
        self.group.wake()

    def end(self, code: int, words: str = "") -> None:
        """Its code runs no more; a moment later it is reaped. Until then what it posted may still land."""
        if not self.stopped:
            self.stopped, self.code, self._words = True, code, words
            self.host.loop.call_later(self.random.uniform(*_REAP), self._gone)

    def _gone(self) -> None:
        self.reaped_at = self.host.loop.time()
        self._link.close()
        self.host.ended(self)
        self._reaped.set()

    def terminate(self) -> None:
        self.post(lambda: self.after(self.random.uniform(*_STOP), lambda: self.end(0)))

    async def reaped(self) -> int:
        await self._reaped.wait()
        return self.code

    async def relay(self, line: Callable[[str, str], None]) -> None:
        line("stdout", '{"event": "engine.begins", "level": "info"}')
        await self._reaped.wait()
        if self._words:
            line("stderr", self._words)
        self.relayed.set()

    # ---- the link ------------------------------------------------------------------------------------

    def _connect(self, attempt: int) -> None:
        if attempt != self._attempt:
            return
        self._link = RankEnd(self.random, self.faults.link, self._arrived, self._link_lost)
        try:
            self.host.connect(self._link)
        except OSError as error:
            if self.host.plan.deployment.survive and self._interval is not None:
                self._seek()
            else:
                self.end(1, f"no control plane: {error}")
            return
        self._send(
            Hello(
                WIRE_VERSION, self.group.name, self.role, self.number, len(self.group.numbers), self.incarnation,
                self.pid, self.url, 9 if self.role is Role.PREFILL else 0, _geometry(self.group.pages),
            )
        )  # fmt: skip
        self.after(_GREETING, partial(self._unwelcome, attempt))

    def _unwelcome(self, attempt: int) -> None:
        if not self._welcomed and attempt == self._attempt:
            self.end(1, "no Welcome")

    @property
    def url(self) -> str:
        return f"http://{self.incarnation}"

    def _send(self, frame: Any) -> None:
        self._link.send(frame)

    def orphaned(self) -> None:
        """The control plane is gone: every room is aborted, and the next one is looked for."""
        self._link.close()
        self.post(lambda: self.agent.orphaned("the control plane is gone"))
        self.post(self.group.wake)
        self._welcomed = False
        self._seek()

    def _seek(self) -> None:
        """Only the latest attempt counts."""
        self._attempt += 1
        self.after(_SEEK, partial(self._connect, self._attempt))

    def break_link(self) -> None:
        """Both ends learn of it: the rank ends, and is not asked."""
        self._link.close()
        self._link_lost()

    def _link_lost(self) -> None:
        if self.host.plan.deployment.survive and self._interval is not None:
            self.orphaned()
        else:
            self.post(lambda: self.end(1, "the link is lost"))

    def _arrived(self, frame: ToRank) -> None:
        def take() -> None:
            self._link.plane.taken()
            self._take(frame)

        self.post(take)

    def _take(self, frame: ToRank) -> None:
        match frame:
            case Welcome():
                self._welcomed = True
                if self._interval is None:
                    self._interval = frame.progress_interval
                    self._tick()
                else:
                    self.agent.adopted()
                return
            case Refused():
                self.end(1, f"refused: {frame.reason}")
                return
            case Fenced():
                self.fences.setdefault(frame.incarnation, self.host.loop.time())
                self.sender.fenced(frame.incarnation)
                self.receiver.fenced(frame.incarnation)
        self.agent.handle(frame if not isinstance(frame, OpenRoom) else _own(frame, self.number))
        self.group.wake()

    def _tick(self) -> None:
        assert self._interval is not None
        self.agent.tick()
        self._send(
            Progress(
                steps=self.group.steps, work=self.group.work(), queues=self.group.queues(),
                ledger=self.agent.ledger_counts(), loops={}, counters=dict(self.agent.counters),
            )
        )  # fmt: skip
        self.after(self._interval, self._tick)

    # ---- Hooks ---------------------------------------------------------------------------------------

    def opened(self, opening: OpenRoom) -> None:
        self.openings[opening.key] = opening
        if self.role is Role.PREFILL:
            self.sender.opened(opening)

    def dropped(self, key: RoomKey, source: AbortSource, reason: str) -> None:
        self.sender.dropped(key)
        self.receiver.dropped(key)
        part = self.parts.get(key)
        if part is not None:
            part.aborting = (source, reason)
            self.group.failed(key, source, reason)
        self.group.wake()

    def tell_peer(self, key: RoomKey, peer: str, source: AbortSource, reason: str) -> None:
        half = self.sender if self.role is Role.PREFILL else self.receiver
        half.tell_peer(key, peer, source, reason)

    def ack_peer(self, key: RoomKey, peer: str, outcome: Quiet) -> None:
        self.sender.ack_peer(key, peer, outcome)

    def release(self, key: RoomKey) -> None:
        self.openings.pop(key, None)
        part = self.parts.get(key)
        if part is not None:
            part.quiet = True
        self.group.wake()

    def quarantine(self, key: RoomKey) -> dict[str, int]:
        part = self.parts.get(key)
        if part is None:
            return {}
        part.quarantining = True
        self.group.wake()
        return {SPACE: len(part.pages)}

    def query(self, what: str) -> Any:
        word, _, begin = what.partition(" ")
        if what == "stacks":
            return "simulated"
        if word == "trace":
            who = TraceRank(self.group.name, self.number, self.role.value, self.incarnation, 1, LAYERS, 0, 0, {})
            return page(self.gate.trace, who, int(begin or 0))
        raise ValueError(f"unknown query {what!r}")


def _own(opening: OpenRoom, number: int) -> OpenRoom:
    """Rank i writes to rank i of the peer, and to no other."""
    mine = slice(number, number + 1)
    return msgspec.structs.replace(opening, peers=opening.peers[mine], bootstrap_ports=opening.bootstrap_ports[mine])


def _geometry(pages: int) -> Geometry:
    return Geometry(
        page_tokens=256, layers=LAYERS, index_k_dtype="bf16", context_tokens=256 * pages,
        pools=tuple(PoolGeometry(pool, SPACE, "full", 4096, (0, 1)) for pool in POOLS),
        pages={SPACE: pages}, model="simulated",
    )  # fmt: skip
