"""What a run is made of: clients and faults with their times. Everything follows from it: it is kept and shrunk."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Literal

import msgspec

#: What may befall one engine's rank, or the whole host. MILD: what the protocol must bear without killing anybody.
Kind = Literal[
    "lose", "repeat", "reorder", "slow_link", "client_wave", "abort_wave", "log_reader_stalls", "trace_disk_full",
    "drain_engine", "corrupt", "retract",
    "kill", "pause", "partition", "break_link", "peer_break", "write_lost", "clock_jump", "drain_all",
    "restart", "crash", "wedge",
]  # fmt: skip
MILD: tuple[Kind, ...] = (
    "lose", "repeat", "reorder", "slow_link", "client_wave", "abort_wave", "log_reader_stalls", "trace_disk_full",
    "drain_engine", "corrupt", "retract",
)  # fmt: skip
HARSH: tuple[Kind, ...] = (
    "kill", "kill", "pause", "pause", "partition", "break_link", "peer_break", "write_lost", "write_lost",
    "clock_jump", "drain_all", "restart", "crash", "wedge",
)  # fmt: skip
#: What may befall a control plane that does not know yet which engines survived the one before.
_MEANWHILE: tuple[Kind, ...] = ("restart", "restart", "drain_all", "drain_engine", "kill", "crash")
#: Seconds from a crash to the next control plane, and of its wait for a rank that is killed.
_DOWN, _SETTLING = 1.5, 0.1


class Client(msgspec.Struct, frozen=True):
    """One request. `leaves`: seconds after which the client hangs up; `reads_slowly`: seconds it takes for an event."""

    number: int
    at: float
    pages: int
    tokens: int
    stream: bool
    leaves: float | None = None
    reads_slowly: float = 0.0


class Fault(msgspec.Struct, frozen=True):
    """`target`: an engine's name and a rank's number, or empty. What `amount` means depends on the kind."""

    kind: Kind
    at: float
    target: str = ""
    rank: int = 0
    seconds: float = 1.0
    amount: float = 0.5

    def __str__(self) -> str:
        where = f" {self.target} rank {self.rank}" if self.target else ""
        return f"{self.at:8.2f} s  {self.kind}{where} for {self.seconds:.2f} s ({self.amount:.2f})"


class Deployment(msgspec.Struct, frozen=True):
    """Engines of each role, ranks of each engine, pages of each rank; whether engines outlive their control plane."""

    prefill: int
    decode: int
    ranks: int
    pages: int
    max_rooms: int = 512
    survive: bool = False

    def engines(self) -> list[str]:
        return [f"prefill{n}" for n in range(self.prefill)] + [f"decode{n}" for n in range(self.decode)]


class Plan(msgspec.Struct, frozen=True):
    """`seconds`: when faults end; then the run must come to rest."""

    seed: int
    deployment: Deployment
    seconds: float
    clients: tuple[Client, ...]
    faults: tuple[Fault, ...]

    @property
    def mild(self) -> bool:
        """No engine is to be killed for any of its faults."""
        return all(fault.kind in MILD for fault in self.faults)

    def __str__(self) -> str:
        deployment = self.deployment
        engines = f"{deployment.prefill} prefill and {deployment.decode} decode engines of {deployment.ranks} ranks"
        survive = " that survive" if deployment.survive else ""
        lines = [f"seed {self.seed}: {engines}{survive}, {deployment.pages} pages a rank, {self.seconds:.0f} s"]
        lines += [f"  {fault}" for fault in sorted(self.faults, key=lambda fault: fault.at)]
        for one in self.clients if len(self.clients) <= 12 else ():
            goes = "" if one.leaves is None else f", leaves after {one.leaves:.2f} s"
            lines.append(f"  {one.at:8.2f} s  client {one.number}: {one.pages} pages, {one.tokens} tokens{goes}")
        if len(self.clients) > 12:
            lines.append(f"  {len(self.clients)} clients")
        return "\n".join(lines)


def small(seed: int) -> Plan:
    """2 to 4 engines, tens of rooms, a few faults; every third seed has mild ones only."""
    random = Random(f"plan {seed}")
    deployment = Deployment(
        prefill=random.choice((1, 1, 2)), decode=random.choice((1, 1, 2)), ranks=random.choice((1, 1, 1, 2)),
        pages=random.choice((8, 12, 40)),
    )  # fmt: skip
    deployment = msgspec.structs.replace(deployment, survive=seed % 5 == 3)
    seconds = random.choice((10.0, 20.0, 40.0))
    bursts = [random.uniform(1.5, seconds) for _ in range(random.randint(1, 3))]
    clients = tuple(_client(random, number, _near(random, bursts)) for number in range(random.randint(10, 40)))
    kinds = MILD if seed % 3 == 0 else MILD + HARSH
    faults = tuple(
        fault for _ in range(random.randint(1, 3)) for fault in _pair(random, kinds, deployment, _near(random, bursts))
    )
    if deployment.survive:
        faults = (*faults, *_crash(random, deployment, _near(random, bursts)))
    seconds = max(event.at for event in (*clients, *faults)) + 1.0
    return Plan(seed, deployment, seconds, clients, faults)


def large(seed: int, engines: int = 64, rooms: int = 10_000) -> Plan:
    """Half of the engines prefill, half decode. Half of the clients come within a second, and faults meet them."""
    random = Random(f"large plan {seed}")
    deployment = Deployment(engines // 2, engines - engines // 2, 1, pages=64, max_rooms=rooms)
    seconds = 600.0
    wave = random.uniform(60.0, seconds - 60.0)
    clients = tuple(
        _client(random, number, wave + random.random() if number % 2 else random.uniform(1.5, seconds))
        for number in range(rooms)
    )
    kinds = tuple(kind for kind in MILD + HARSH if kind not in ("drain_all", "restart", "crash", "wedge"))
    faults = [_fault(random, kinds, deployment, random.uniform(1.5, seconds)) for _ in range(2 * engines)]
    during: tuple[Kind, ...] = ("client_wave", "abort_wave", "drain_engine", "kill", "pause", "abort_wave")
    faults += [_fault(random, (kind,), deployment, wave + 4.0 * random.random()) for kind in during]
    return Plan(seed, deployment, seconds, clients, tuple(faults))


def idle(seed: int, days: float) -> Plan:
    """Days in which little happens: a client and a fault now and then."""
    random = Random(f"idle plan {seed}")
    seconds = days * 86_400
    clients = tuple(_client(random, number, random.uniform(1.5, seconds)) for number in range(int(200 * days)))
    deployment = Deployment(1, 1, 1, pages=40)
    faults = tuple(
        _fault(random, MILD + HARSH, deployment, random.uniform(1.5, seconds)) for _ in range(int(40 * days))
    )
    return Plan(seed, deployment, seconds, clients, faults)


def _near(random: Random, bursts: list[float]) -> float:
    """What happens at the same time meets: most of it within a second of a burst."""
    return random.choice(bursts) + random.choice((0.5, 0.5, 0.5, 4.0)) * random.random()


def _client(random: Random, number: int, at: float) -> Client:
    return Client(
        number=number,
        at=round(at, 4),
        pages=random.choice((1, 1, 2, 3, 5)),
        tokens=random.choice((1, 4, 12, 12, 40, 150)),
        stream=random.random() < 0.7,
        leaves=round(random.uniform(0.0, 2.0), 4) if random.random() < 0.15 else None,
        reads_slowly=0.05 if random.random() < 0.1 else 0.0,
    )


def _pair(random: Random, kinds: tuple[Kind, ...], deployment: Deployment, at: float) -> Iterator[Fault]:
    """A fault, and another that begins while it lasts: often at the same rank, or an abort of what goes on there."""
    first = _fault(random, kinds, deployment, at)
    yield first
    second = _fault(random, random.choice((kinds, ("abort_wave", "client_wave"))), deployment, at)
    target = random.choice((first, second))
    during = round(first.at + random.uniform(0.0, min(first.seconds, 2.0)), 4)
    yield msgspec.structs.replace(second, at=during, target=target.target, rank=target.rank)


def _crash(random: Random, deployment: Deployment, at: float) -> Iterator[Fault]:
    """The control plane dies; often a rank does just before the next one, which is told something while it waits."""
    yield Fault("crash", round(at, 4))
    if random.random() < 0.5:
        yield _fault(random, ("kill",), deployment, at + _DOWN - random.uniform(0.0, _SETTLING))
        for _ in range(random.choice((1, 1, 2))):
            yield _fault(random, _MEANWHILE, deployment, at + _DOWN + random.uniform(0.0, _SETTLING))


def _fault(random: Random, kinds: tuple[Kind, ...], deployment: Deployment, at: float) -> Fault:
    kind = random.choice(kinds)
    short = random.uniform(0.2, 1.0)
    return Fault(
        kind=kind,
        at=round(at, 4),
        target=random.choice(deployment.engines()),
        rank=random.randrange(deployment.ranks),
        seconds=round(short if kind in MILD else random.choice((short, 6.0, 12.0)), 3),
        amount=round(random.uniform(0.2, 0.9), 3),
    )
