"""A rank without a model: real pools, ledger, agent and transfer half; its pages are filled with seeded bytes.

`python transfer_rank.py PORT` runs a decode rank as a process that exposes one room to the prefill rank at PORT.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, Self

import msgspec
import torch

from dsv4ctl.controlplane.config.schema import DeadlinesConfig
from dsv4ctl.controlplane.link.wire import (
    AbortAck,
    Fenced,
    OpenRoom,
    PoolGeometry,
    Role,
    RoomReport,
    SetGuards,
    ToControlPlane,
)
from dsv4ctl.controlplane.link.wire import Geometry as LinkGeometry
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey, RoomState
from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.ticket import Load
from dsv4ctl.controlplane.tickets.types import Consumer, Guard, LoadKind, SpaceSpec
from dsv4ctl.controlplane.trace.ring import Ring
from dsv4ctl.engine_adapters.agent import Agent
from dsv4ctl.engine_adapters.reference.digests import digest_page
from dsv4ctl.engine_adapters.reference.evidence import Witness
from dsv4ctl.engine_adapters.reference.geometry import Geometry, pool_specs
from dsv4ctl.engine_adapters.reference.nixl import Nixl
from dsv4ctl.engine_adapters.reference.peer_wire import Manifest
from dsv4ctl.engine_adapters.reference.pools import DevicePools
from dsv4ctl.engine_adapters.reference.sender import SealedChunk
from dsv4ctl.engine_adapters.reference.sequence import PageTable
from dsv4ctl.engine_adapters.reference.transfer import Transfer
from dsv4ctl.policies.integrity import Verdict

#: No wait of a test lasts longer: a hang is a failure.
LIMIT = 60.0
PAGES = {"full": 16, "swa": 16, "state": 8}
KEY = RoomKey(7, 1)


class Rank:
    """Its hooks do what an engine does; `reports`, `acks` and `ready` are what came out of it."""

    def __init__(
        self,
        role: Role,
        incarnation: str,
        *,
        index_k_dtype: Literal["bf16", "fp8"] = "bf16",
        port: int = 0,
        ack_seconds: float = 5.0,
        make_transport: Callable[..., Any] = Nixl,
    ) -> None:
        geometry = Geometry(index_k_dtype=index_k_dtype)
        self.role, self.incarnation = role, incarnation
        self.deadlines = msgspec.to_builtins(DeadlinesConfig(ack=ack_seconds))
        self.pools = DevicePools(geometry, PAGES)
        names = {space: tuple(n for n, spec in self.pools.specs.items() if spec.space == space) for space in PAGES}
        spaces = {space: SpaceSpec(count, names[space]) for space, count in PAGES.items()}
        self.trace = Ring(time.monotonic_ns)
        self.gate = Gate(spaces, geometry.layers, self.trace)
        for consumer in Consumer:
            self.gate.register(consumer, "here")
        self.changed = threading.Condition()
        self.reports: list[RoomReport] = []
        self.acks: list[AbortAck] = []
        self.ready: dict[RoomKey, Manifest] = {}
        self.vouched: list[RoomKey] = []
        self.witness = Witness()
        self.logged: list[tuple[str, dict[str, object]]] = []
        self.died: list[str] = []
        self.owned: dict[RoomKey, tuple[PageTable, Load | None]] = {}
        self.agent = Agent(role, incarnation, self.gate, self, self._sent, time.monotonic)
        self.transfer = Transfer(
            role,
            incarnation.lower(),
            0,
            incarnation,
            _link_geometry(geometry),
            self.pools,
            self.agent,
            ready=self._ready,
            vouched=self._vouched,
            witness=self.witness,
            died=self._died,
            log=self._log,
            port=port,
            make_transport=make_transport,
        )

    def __enter__(self) -> Self:
        self.transfer.start(LIMIT)
        return self

    def __exit__(self, *_: object) -> None:
        self.transfer.stop(LIMIT)
        assert self.transfer.fault is None or self.died

    # ---- hooks ---------------------------------------------------------------------------------------

    def opened(self, opening: OpenRoom) -> None:
        self.transfer.opened(opening)

    def dropped(self, key: RoomKey, source: AbortSource, reason: str) -> None:
        self.transfer.dropped(key)

    def tell_peer(self, key: RoomKey, peer: str, source: AbortSource, reason: str) -> None:
        self.transfer.tell_peer(key, peer, source, reason)

    def ack_peer(self, key: RoomKey, peer: str, outcome: Quiet) -> None:
        self.transfer.ack_peer(key, peer, outcome)

    def release(self, key: RoomKey) -> None:
        table, load = self.owned.pop(key, (None, None))
        if load is not None and load.open:
            self.gate.end_load(load)
        if table is not None:
            self.gate.free("full", table.full)
            self.gate.free("swa", table.swa.values())
            self.gate.free("state", [table.state])

    def quarantine(self, key: RoomKey) -> dict[str, int]:
        return {}

    def query(self, what: str) -> Any:
        raise ValueError(what)

    # ---- what tests do -------------------------------------------------------------------------------

    def open(self, peer: str, key: RoomKey = KEY) -> OpenRoom:
        opening = OpenRoom(key, "r", None, "peer", (peer,), self.deadlines, "read")
        self.agent.handle(opening)
        return opening

    def fence(self, incarnation: str) -> None:
        self.transfer.fenced(incarnation)
        self.agent.handle(Fenced(incarnation))

    def guards_off(self, *guards: Guard) -> None:
        self.agent.handle(SetGuards(tuple(guard.value for guard in guards)))

    def take(self, tokens: int, kind: LoadKind, verify: bool = False, key: RoomKey = KEY) -> tuple[PageTable, Load]:
        """Pages for a prompt, under an open load; freed by the room's end."""
        pages = self.pools.geometry.pages_for(tokens)
        first = (tokens - self.pools.geometry.window + 1) // self.pools.geometry.page_tokens if pages > 1 else 0
        taken = self.gate.allocate({"full": pages, "swa": pages - first, "state": 1})
        assert taken is not None
        table = PageTable(list(taken["full"]), dict(enumerate(taken["swa"], start=first)), taken["state"][0])
        load = self.gate.open_load(kind, self._extents(table), room=key, verify=verify)
        self.owned[key] = table, load
        return table, load

    def fill(self, table: PageTable, seed: int) -> None:
        """Seeded bytes in every page of the table."""
        random = torch.Generator().manual_seed(seed)
        for spec in self.pools.specs.values():
            for page in _pages(table, spec.space):
                shape = (len(spec.model_layers), spec.page_bytes)
                self.pools.bytes_of(spec.name)[:, page] = torch.randint(
                    0, 256, shape, dtype=torch.uint8, generator=random
                )

    def land(self, load: Load) -> None:
        self.gate.layer_landed(load, self.gate.layers)
        self.gate.end_load(load)

    def computed(self, tokens: int, seed: int = 0, key: RoomKey = KEY) -> PageTable:
        """A prompt whose pages are sealed."""
        table, load = self.take(tokens, LoadKind.FORWARD, key=key)
        self.fill(table, seed)
        self.land(load)
        return table

    def chunks(self, table: PageTable, tokens: int) -> list[SealedChunk]:
        """One a page, with the digests of what the pages hold now."""
        made = []
        for logical, page in enumerate(table.full):
            extents = [self.gate.extent("full", [page])]
            if logical in table.swa:
                extents.append(self.gate.extent("swa", [table.swa[logical]]))
            if logical == len(table.full) - 1:
                extents.append(self.gate.extent("state", [table.state]))
            made.append(SealedChunk(logical, tuple(extents), digest_page(self.pools, logical, tokens, table)))
        return made

    def send(self, table: PageTable, tokens: int, key: RoomKey = KEY) -> None:
        for chunk in self.chunks(table, tokens):
            self.transfer.sender.chunk(key, chunk)
        self.transfer.sender.finish(key, Manifest(tokens, first_token=42, chunks=len(table.full)))

    def expect(
        self,
        opening: OpenRoom,
        tokens: int,
        port: int,
        verdict: Verdict = Verdict.BEFORE_READ,
        observe: bool = False,
    ) -> PageTable:
        verify = verdict is Verdict.BEFORE_READ and not observe
        table, load = self.take(tokens, LoadKind.TRANSFER, verify, opening.key)
        self.transfer.receiver.expect(opening, table, tokens, load, ("127.0.0.1", port), verdict, observe)
        return table

    def until(self, what: Callable[[], bool]) -> None:
        """Waits for a condition that this rank's events, or its counters, bring about."""
        deadline = time.monotonic() + LIMIT
        with self.changed:
            while not what():
                assert time.monotonic() < deadline, f"{self.incarnation}: {self.reports} {self.transfer.counters()}"
                self.changed.wait(0.01)

    def reported(self, state: RoomState, key: RoomKey = KEY) -> RoomReport | None:
        return next((r for r in self.reports if r.key == key and r.state is state), None)

    def wait(self, state: RoomState, key: RoomKey = KEY) -> RoomReport:
        self.until(lambda: self.reported(state, key) is not None)
        report = self.reported(state, key)
        assert report is not None
        return report

    def acked(self) -> Quiet:
        """The outcome of its first ack, which follows the report that its room is aborted."""
        self.until(lambda: bool(self.acks))
        return self.acks[0].outcome

    # ---- inside --------------------------------------------------------------------------------------

    def _extents(self, table: PageTable) -> list[Any]:
        return [self.gate.extent(space, _pages(table, space)) for space in PAGES]

    def _sent(self, frame: ToControlPlane) -> None:
        with self.changed:
            if isinstance(frame, RoomReport):
                self.reports.append(frame)
            elif isinstance(frame, AbortAck):
                self.acks.append(frame)
            self.changed.notify_all()

    def _ready(self, key: RoomKey, manifest: Manifest) -> None:
        with self.changed:
            self.ready[key] = manifest
            self.changed.notify_all()

    def _vouched(self, key: RoomKey) -> None:
        with self.changed:
            self.vouched.append(key)
            self.changed.notify_all()

    def _died(self, why: str) -> None:
        with self.changed:
            self.died.append(why)
            self.changed.notify_all()

    def _log(self, event: str, level: str, **fields: object) -> None:
        self.logged.append((event, fields))


def _pages(table: PageTable, space: str) -> list[int]:
    return {"full": table.full, "swa": [page for _, page in sorted(table.swa.items())], "state": [table.state]}[space]


def _link_geometry(geometry: Geometry) -> LinkGeometry:
    pools = tuple(
        PoolGeometry(spec.name, spec.space, spec.span, spec.page_bytes, spec.model_layers)
        for spec in pool_specs(geometry).values()
    )
    return LinkGeometry(
        geometry.page_tokens, geometry.layers, geometry.index_k_dtype, geometry.context_tokens, pools, PAGES, "test"
    )


def same_bytes(one: Rank, mine: PageTable, other: Rank, theirs: PageTable) -> bool:
    """Whether the two tables hold the same bytes in every pool, layer and page that the second one has."""
    for spec in one.pools.specs.values():
        here = {"full": dict(enumerate(mine.full)), "swa": mine.swa, "state": {0: mine.state}}[spec.space]
        there = {"full": dict(enumerate(theirs.full)), "swa": theirs.swa, "state": {0: theirs.state}}[spec.space]
        for logical, page in there.items():
            source, landed = one.pools.bytes_of(spec.name), other.pools.bytes_of(spec.name)
            if not torch.equal(source[:, here[logical]], landed[:, page]):
                return False
    return True


def _main() -> None:
    with Rank(Role.DECODE, "D") as rank:
        rank.expect(rank.open("P"), 600, int(sys.argv[1]))
        print("up", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _main()
