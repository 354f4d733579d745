"""The machine that everything runs on: processes, connections between them, and what is wrong with each at present."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from anyio.abc import ByteStream, Listener

from dsv4ctl.controlplane.scheduler.fleet import Engine
from dsv4ctl.controlplane.scheduler.fleet import Rank as Planned
from dsv4ctl.controlplane.supervisor.survival import Kept
from simulation.group import Group
from simulation.loop import VirtualLoop
from simulation.memory import Violated
from simulation.net import Conditions, MemoryListener, RankEnd
from simulation.plan import Plan
from simulation.rank import Rank
from simulation.wires import Destination, PeerAbort, PeerAck, Wire


@dataclass
class Faults:
    """Of one rank, over all its lives. `link` to the control plane, `wire` to its peers."""

    link: Conditions = field(default_factory=Conditions)
    wire: Conditions = field(default_factory=Conditions)
    peers_cut: bool = False
    write_lost: bool = False
    corrupt: bool = False


class Process:
    """A rank as one control plane holds it: what it did not do before its death it never does."""

    def __init__(self, host: Host, rank: Rank) -> None:
        self._host, self._rank, self._life = host, rank, host.plane_life
        self.argv, self.pid, self.relayed = rank.argv, rank.pid, rank.relayed

    @property
    def _dead(self) -> bool:
        return self._life != self._host.plane_life

    async def serving(self) -> None:
        """Its HTTP server is there before its link."""

    async def reaped(self) -> int:
        return 0 if self._dead else await self._rank.reaped()

    def terminate(self) -> None:
        if not self._dead:
            self._rank.terminate()

    def kill(self) -> None:
        if not self._dead:
            self._rank.end(-signal.SIGKILL)

    async def relay(self, line: Callable[[str, str], None]) -> None:
        await self._rank.relay(line)

    async def close(self) -> None:
        return


class Host:
    def __init__(self, loop: VirtualLoop, plan: Plan, violated: Violated) -> None:
        self.loop, self.plan, self.seed, self.violated = loop, plan, plan.seed, violated
        self.ranks: dict[str, Rank] = {}  #: by incarnation, until reaped
        self.reaped: dict[str, float] = {}  #: by incarnation, and when
        self.groups: dict[str, Group] = {}  #: by the first incarnation
        self.listener = MemoryListener()
        self.plane_life = 0  #: counts the control planes that died
        self.held: set[str] = set()  #: incarnations that the present one started or adopted
        self._going_on: dict[str, Rank] = {}
        self._faults: dict[tuple[str, int], Faults] = {}
        self._wires: dict[tuple[str, str], Wire] = {}
        self._pids = itertools.count(100)
        self._lives = itertools.count(1)

    def faults(self, engine: str, rank: int) -> Faults:
        return self._faults.setdefault((engine, rank), Faults())

    # ---- processes -----------------------------------------------------------------------------------

    def processes_of(self, engine: Engine) -> int:
        """The control plane's launcher: every rank is a process."""
        return engine.config.ranks

    async def survivors(self, refused: Callable[[Kept, str], None]) -> dict[str, list[str]]:
        """Engines of which every rank lives; the rest of those that an earlier control plane left is killed."""
        while unfit := [group for group in self.groups.values() if not group.whole]:
            for rank in [rank for group in unfit for rank in group.ranks]:
                rank.end(-signal.SIGKILL)
            for rank in [rank for group in unfit for rank in group.ranks]:
                await rank.reaped()
        found = {group.name: group.ranks for group in self.groups.values()}
        self._going_on = {rank.incarnation: rank for ranks in found.values() for rank in ranks}
        return {name: [rank.incarnation for rank in ranks] for name, ranks in found.items()}

    async def __call__(self, engine: Engine, ranks: Sequence[Planned]) -> Process:
        (planned,) = ranks
        self.held.add(planned.incarnation)
        adopted = self._going_on.pop(planned.incarnation, None)
        if adopted is not None:
            return Process(self, adopted)
        name = next(iter(engine.ranks))
        group = self.groups.get(name)
        if group is None:
            numbers = range(engine.config.ranks)
            pages = self.plan.deployment.pages
            group = self.groups[name] = Group(self, engine.name, engine.role, numbers, pages, next(self._lives))
        rank = Rank(self, group, planned.number, planned.incarnation, next(self._pids))
        group.ranks.append(rank)
        self.ranks[planned.incarnation] = rank
        return Process(self, rank)

    def crash(self) -> None:
        """The control plane's process is gone. The kernel ends its engines with it, but for those that survive."""
        self.plane_life += 1
        self.listener.open = False
        for rank in list(self.ranks.values()):
            if self.plan.deployment.survive:
                rank.orphaned()
            else:
                rank.end(-signal.SIGKILL)

    def ended(self, rank: Rank) -> None:
        """It was reaped: its connections break."""
        del self.ranks[rank.incarnation]
        self.reaped[rank.incarnation] = self.loop.time()
        for wire in [wire for key, wire in self._wires.items() if rank.incarnation in key]:
            wire.close()
        self._wires = {key: wire for key, wire in self._wires.items() if rank.incarnation not in key}
        if rank.number == 0:
            rank.group.break_off()
        if all(one.reaped_at is not None for one in rank.group.ranks):
            self.groups = {name: group for name, group in self.groups.items() if group is not rank.group}

    def of(self, engine: str, number: int) -> Rank | None:
        """The present life of a rank, if it runs."""
        found = [r for r in self.ranks.values() if r.group.name == engine and r.number == number and not r.stopped]
        return found[-1] if found else None

    # ---- connections ---------------------------------------------------------------------------------

    async def listen(self, path: str) -> Listener[ByteStream]:
        """The link server's socket."""
        self.listener = MemoryListener()
        return self.listener

    def connect(self, end: RankEnd) -> None:
        """Raises OSError."""
        self.listener.connect(end)

    def server(self, url: str) -> Group | None:
        rank = self.ranks.get(url.removeprefix("http://"))
        return None if rank is None else rank.group

    def wire(self, dialler: Rank, peer: str) -> Wire | None:
        """The connection of a decode rank to a prefill rank; None if that one is reaped."""
        listener = self.ranks.get(peer)
        if listener is None:
            return None
        key = (dialler.incarnation, peer)
        if key not in self._wires:
            self._wires[key] = Wire(dialler, listener)
        return self._wires[key]

    def send(self, sender: Rank, peer: str, frame: Destination | PeerAbort | PeerAck) -> None:
        wire = self._wires.get((sender.incarnation, peer)) or self._wires.get((peer, sender.incarnation))
        if wire is not None:
            wire.send(sender, frame)

    def break_wires(self, which: Callable[[Wire], bool]) -> None:
        for wire in [wire for wire in self._wires.values() if which(wire)]:
            wire.close()
