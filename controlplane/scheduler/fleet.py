"""The engines as the control plane knows them: who is there, in which state, over which links."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from dsv4ctl.controlplane.aborts.log import AbortLog
from dsv4ctl.controlplane.config.schema import EngineConfig
from dsv4ctl.controlplane.link.server import Link
from dsv4ctl.controlplane.link.wire import Geometry, Progress, Role
from dsv4ctl.controlplane.rooms.states import Cancellable

#: Seconds between two progress reports of a rank.
PROGRESS_INTERVAL = 0.25


class EngineState(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DRAINED = "drained"
    WEDGED = "wedged"
    RESTARTING = "restarting"
    FAILED = "failed"


class Sample(NamedTuple):
    """A progress report and when it came (monotonic seconds)."""

    at: float
    progress: Progress


def history(wedge: float) -> deque[Sample]:
    """For the reports of twice `wedge` seconds: whoever says that nothing was done all that time has seen all of it."""
    return deque(maxlen=math.ceil(2 * wedge / PROGRESS_INTERVAL) + 2)


@dataclass
class Rank:
    """One incarnation of one rank."""

    engine: str
    number: int
    incarnation: str
    pid: int | None = None
    link: Link | None = None
    started_at: float = 0.0
    aborts: AbortLog = field(default_factory=AbortLog)
    history: deque[Sample] = field(default_factory=deque)

    @property
    def progress(self) -> Progress | None:
        return self.history[-1].progress if self.history else None

    def fields(self) -> dict[str, Any]:
        """What every event about the rank carries."""
        return {"engine": self.engine, "rank": self.number, "incarnation": self.incarnation}

    @property
    def ready(self) -> bool:
        """It said Hello and reported progress."""
        return self.link is not None and self.link.lost is None and bool(self.history)


@dataclass
class Engine:
    config: EngineConfig
    state: EngineState = EngineState.STARTING
    cause: str | None = None  #: why it is not ready
    restarts: int = 0
    ranks: dict[str, Rank] = field(default_factory=dict)  #: by incarnation

    @property
    def name(self) -> str:
        return self.config.name

    @cached_property
    def role(self) -> Role:
        return Role(self.config.role)

    @property
    def ready(self) -> bool:
        return self.state is EngineState.READY

    @property
    def url(self) -> str | None:
        """Base URL of its HTTP server, which its first rank serves."""
        first = self._first()
        return first.link.hello.url if first is not None and first.link is not None else None

    @property
    def bootstrap_port(self) -> int:
        first = self._first()
        return first.link.hello.bootstrap_port if first is not None and first.link is not None else 0

    @property
    def bootstrap_ports(self) -> tuple[int, ...]:
        """Of every rank, by number; 0 for one that has no link (yet)."""
        return tuple(rank.link.hello.bootstrap_port if rank.link else 0 for rank in self.ranks.values())

    @property
    def geometry(self) -> Geometry | None:
        first = self._first()
        return first.link.hello.geometry if first is not None and first.link is not None else None

    @property
    def cancellable(self) -> Cancellable:
        first = self._first()
        return Cancellable.CHUNK if first is None or first.link is None else first.link.hello.cancellable

    @property
    def in_order(self) -> bool:
        """All its ranks are."""
        return all(rank.link is not None and rank.link.hello.in_order for rank in self.ranks.values())

    @property
    def quarantined(self) -> int:
        """Pages in quarantine on all its ranks."""
        return sum(sum(r.progress.ledger.pages_quarantined.values()) for r in self.ranks.values() if r.progress)

    def _first(self) -> Rank | None:
        return next((rank for rank in self.ranks.values() if rank.number == 0), None)


class Pair(NamedTuple):
    """Who serves a request: a decode engine and its prefill peer, or a single engine alone."""

    prefill: Engine | None
    decode: Engine

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


class Fleet:
    """All engines by name."""

    def __init__(self, configs: list[EngineConfig]) -> None:
        self.engines: dict[str, Engine] = {config.name: Engine(config) for config in configs}

    def __iter__(self) -> Iterator[Engine]:
        return iter(self.engines.values())

    def rank(self, incarnation: str) -> Rank | None:
        for engine in self.engines.values():
            if incarnation in engine.ranks:
                return engine.ranks[incarnation]
        return None

    def owner(self, incarnation: str) -> Engine | None:
        return next((engine for engine in self if incarnation in engine.ranks), None)

    def ranks(self) -> Iterator[tuple[Engine, Rank]]:
        for engine in self.engines.values():
            for rank in engine.ranks.values():
                yield engine, rank

    def ready(self, role: Role) -> list[Engine]:
        return [engine for engine in self if engine.role is role and engine.ready]

    @property
    def can_serve(self) -> bool:
        return bool(self.ready(Role.SINGLE) or (self.ready(Role.PREFILL) and self.ready(Role.DECODE)))

    @property
    def draining(self) -> bool:
        """Nothing can be served because all that could is being drained."""
        leaving = (EngineState.DRAINING, EngineState.DRAINED)
        return not self.can_serve and any(engine.state in leaving for engine in self)

    def why_not(self) -> str:
        """One line on each engine that is not ready."""
        return "; ".join(
            f"{engine.name} is {engine.state.value}" + (f" ({engine.cause})" if engine.cause else "")
            for engine in self
            if not engine.ready
        )
