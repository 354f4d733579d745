"""Random histories of the ledger against a naive model: sets of readers and writers by page, checked at each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from dsv4ctl.controlplane.tickets.ledger import Ledger, LedgerError
from dsv4ctl.controlplane.tickets.space import FREE, OWNED
from dsv4ctl.controlplane.tickets.ticket import Load, Ticket
from dsv4ctl.controlplane.tickets.types import Consumer, Extent, LoadKind, SpaceSpec, TicketState

PAGES, LAYERS = 3, 2
POOLS = ("a", "b")
LIVE = (TicketState.PENDING, TicketState.GRANTED, TicketState.REVOKING)

SEEDS = st.integers(0, 2**32 - 1)
#: What happens, by how often. One rule picks from it: rules of their own would be switched off in most histories.
EVENTS = {
    "allocate": 2, "free": 1, "open_load": 6, "advance": 8, "stop": 4, "seal": 1,
    "request": 8, "extend": 2, "trim": 2, "post": 4, "complete": 4, "release": 4, "revoke": 1,
}  # fmt: skip


@dataclass
class Page:
    state: str = "free"
    generation: int = 0
    readers: list[Ticket] = field(default_factory=list)
    writer: Load | None = None
    writing: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)

    def settle(self) -> None:
        if self.state in ("retiring", "quarantined") and not self.readers and self.writer is None:
            self.state = "free"


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger({"full": SpaceSpec(PAGES, POOLS)}, LAYERS)
        self.pages = [Page() for _ in range(PAGES)]
        self.loads: list[Load] = []
        self.tickets: list[Ticket] = []
        self.posted: Counter[Ticket] = Counter()
        self.left: set[Ticket] = set()
        self.refused = 0
        self.random = Random(0)

    @rule(event=st.sampled_from([name for name, often in EVENTS.items() for _ in range(often)]), seed=SEEDS)
    def step(self, event: str, seed: int) -> None:
        self.random = Random(seed)
        revoked = {ticket: ticket.readable for ticket in self.tickets if ticket.state is TicketState.REVOKING}
        getattr(self, f"do_{event}")()
        for page in self.pages:
            page.readers = [ticket for ticket in page.readers if ticket.state in LIVE]
            page.settle()
        assert all(ticket.readable <= granted for ticket, granted in revoked.items())

    # ---- choices: mostly what makes sense, so that histories go deep ---------------------------------

    def reckless(self) -> bool:
        """One choice in twelve is made without looking."""
        return self.random.randrange(12) == 0

    def some_load(self) -> Load | None:
        return self.some([load for load in self.loads if load.open], self.loads)

    def some_ticket(self) -> Ticket | None:
        return self.some([ticket for ticket in self.tickets if ticket.state in LIVE], self.tickets)

    def some(self, live: list[Any], every: list[Any]) -> Any:
        chosen = every if self.reckless() else live
        return self.random.choice(chosen) if chosen else None

    def some_pages(self, fits: Callable[[Page], bool]) -> list[int]:
        fitting = [number for number, page in enumerate(self.pages) if self.reckless() or fits(page)]
        return self.random.sample(fitting, min(len(fitting), self.random.randint(1, 2)))

    def some_extent(self, fits: Callable[[Page], bool]) -> Extent | None:
        """Now and then one of a generation that is gone."""
        pools = self.random.choice([POOLS, POOLS, POOLS, ("a",), ("b",)])
        extent = self.ledger.extent("full", self.some_pages(fits), pools)
        if self.reckless():
            extent = replace(extent, generations=tuple(generation - 1 for generation in extent.generations))
        return extent if extent.pages else None

    # ---- the model's own opinion ---------------------------------------------------------------------

    def current(self, extent: Extent) -> bool:
        return all(
            self.pages[page].state == "owned" and self.pages[page].generation == generation
            for page, generation in zip(extent.pages, extent.generations, strict=True)
        )

    def covered(self, page: Page, pools: frozenset[str]) -> bool:
        if page.writer is None:
            return pools <= page.filled
        return page.writer.kind is not LoadKind.FORWARD and not page.writer.failed and pools <= page.writing

    def joinable(self, extent: Extent) -> bool:
        return self.current(extent) and all(self.covered(self.pages[page], extent.pools) for page in extent.pages)

    def pages_of(self, load: Load) -> list[Page]:
        return [page for page in self.pages if page.writer is load]

    def has_bytes(self, page: Page) -> bool:
        return page.state == "owned" and (self.covered(page, frozenset(POOLS)) or bool(page.filled))

    def call(self, allowed: bool, method: Any, *args: Any, **options: Any) -> Any:
        """The ledger does it exactly if the model allows it."""
        if allowed:
            return method(*args, **options)
        self.refused += 1
        with pytest.raises(LedgerError):
            method(*args, **options)
        return None

    # ---- events --------------------------------------------------------------------------------------

    def do_allocate(self) -> None:
        count = self.random.randint(1, PAGES)
        taken = self.ledger.allocate({"full": count})
        free = [number for number, page in enumerate(self.pages) if page.state == "free"]
        assert (taken is None) == (len(free) < count)
        for number in taken["full"] if taken else ():
            page = self.pages[number]
            assert (page.state, page.readers, page.writer) == ("free", [], None)
            page.state, page.filled = "owned", set()
            page.generation += 1

    def do_free(self) -> None:
        pages = self.some_pages(lambda page: page.state == "owned")
        allowed = all(self.pages[page].state == "owned" for page in pages)
        self.call(allowed, self.ledger.free, "full", pages)
        for page in pages if allowed else ():
            self.pages[page].state = "retiring"

    def do_open_load(self) -> None:
        extent = self.some_extent(lambda page: page.state == "owned" and page.writer is None and not page.readers)
        if extent is None:
            return
        kind = self.random.choice([LoadKind.HICACHE, LoadKind.TRANSFER, LoadKind.FORWARD])
        untouched = all(not self.pages[page].readers and self.pages[page].writer is None for page in extent.pages)
        allowed = self.current(extent) and untouched
        load = self.call(allowed, self.ledger.open_load, kind, [extent], verify=self.random.random() < 0.4)
        for page in (self.pages[number] for number in extent.pages) if allowed else ():
            page.generation += 1
            page.writer, page.writing, page.filled = load, set(extent.pools), set()
        if allowed:
            self.loads.append(load)

    def do_advance(self) -> None:
        load = self.some_load()
        if load is None:
            return
        verified = load.verify and self.random.random() < 0.5
        present = load.verified if verified else load.landed
        layers = present + (self.random.randint(-1, LAYERS + 1) if self.reckless() else 1)
        allowed = load.open and present <= layers <= (load.landed if verified else LAYERS)
        self.call(allowed, self.ledger.layer_verified if verified else self.ledger.layer_landed, load, layers)

    def do_stop(self) -> None:
        load, how = self.some_load(), self.random.choice(["end"] * 6 + ["fail", "quarantine"])
        if load is None:
            return
        allowed = load.open
        whole = not load.failed and load.landed == LAYERS and (not load.verify or load.verified == LAYERS)
        calls = {"end": self.ledger.end_load, "fail": self.ledger.fail_load, "quarantine": self.ledger.quarantine}
        self.call(allowed, calls[how], load)
        for page in self.pages_of(load) if allowed else ():
            if how == "quarantine":
                page.state = "quarantined"
            if how == "end":
                page.writer = None
                page.filled = page.writing if whole else set()

    def do_seal(self) -> None:
        load = self.some_load()
        pages = self.some_pages(lambda page: page.writer is load)
        if load is None or not pages:
            return
        held = all(self.pages[page].writer is load for page in pages)
        allowed = held and load.kind is LoadKind.FORWARD and not load.failed
        self.call(allowed, self.ledger.seal, load, "full", pages)
        for page in (self.pages[number] for number in pages) if allowed else ():
            page.writer, page.filled = None, page.writing

    def do_request(self) -> None:
        extent = self.some_extent(self.has_bytes)
        if extent is None:
            return
        allowed = self.joinable(extent)
        consumer = self.random.choice([Consumer.ATTENTION, Consumer.CHECKSUM])
        room = self.random.choice([None, 1, 2])
        ticket = self.call(allowed, self.ledger.request, consumer, [extent], room=room)
        if allowed:
            self.tickets.append(ticket)
            for page in extent.pages:
                self.pages[page].readers.append(ticket)

    def do_extend(self) -> None:
        ticket, extent = self.some_ticket(), self.some_extent(self.has_bytes)
        if ticket is None or extent is None:
            return
        allowed = ticket.state in LIVE[:2] and self.joinable(extent)
        self.call(allowed, self.ledger.extend, ticket, [extent])
        for page in extent.pages if allowed else ():
            self.pages[page].readers.append(ticket)

    def do_trim(self) -> None:
        ticket = self.some_ticket()
        pages = self.some_pages(lambda page: ticket in page.readers)
        if ticket is None or not pages:
            return
        held = {page for extent in ticket.extents for page in extent.pages}
        allowed = ticket.state in LIVE and not self.posted[ticket] and set(pages) <= held
        self.call(allowed, self.ledger.trim, ticket, "full", pages)
        for page in (self.pages[number] for number in pages) if allowed else ():
            page.readers = [reader for reader in page.readers if reader is not ticket]

    def do_post(self) -> None:
        ticket, guarded = self.some_ticket(), self.random.random() < 0.8
        if ticket is not None:
            granted = ticket.state is TicketState.GRANTED and ticket.readable == LAYERS
            allowed = granted if guarded else ticket.state in LIVE
            self.call(allowed, self.ledger.post, ticket, guarded=guarded)
            self.posted[ticket] += allowed

    def do_complete(self) -> None:
        ticket = self.some([found for found, reads in self.posted.items() if reads], self.tickets)
        if ticket is not None:
            self.call(self.posted[ticket] > 0, self.ledger.complete, ticket)
            self.posted[ticket] -= self.posted[ticket] > 0

    def do_release(self) -> None:
        ticket = self.some_ticket()
        if ticket is not None:
            self.call(ticket.state in LIVE and ticket not in self.left, self.ledger.release, ticket)
            self.left.add(ticket)

    def do_revoke(self) -> None:
        room = self.random.choice([1, 2])
        self.ledger.revoke(room)
        for ticket in self.tickets:
            if ticket.room == room and ticket.state in LIVE:
                assert ticket.state is TicketState.REVOKING

    # ---- what always holds ---------------------------------------------------------------------------

    @invariant()
    def pages_are_conserved(self) -> None:
        counts = self.ledger.counts()
        by_state = {state: sum(page.state == state for page in self.pages) for state in ("free", "owned", "retiring")}
        assert {state: counts[state]["full"] for state in by_state} == by_state
        space = self.ledger._spaces["full"]
        assert sorted(space.free) == [page for page, state in enumerate(space.state) if state == FREE]
        assert counts["leased"]["full"] == sum(page.writer is not None for page in self.pages)
        assert self.ledger.available("full") == by_state["free"]
        assert self.ledger.refused == self.refused

    @invariant()
    def whole_pages_are_ready(self) -> None:
        """What `request` asks first says the same as the lists that it stands for."""
        space = self.ledger._spaces["full"]
        for page, ready in enumerate(space.ready):
            whole = space.state[page] == OWNED and space.load[page] is None and space.filled[page] == space.pools
            assert ready == (space.generation[page] if whole else None)

    @invariant()
    def s1_read_after_land(self) -> None:
        for ticket in self.tickets:
            if ticket.state not in LIVE:
                assert ticket.readable == 0
            for extent in ticket.extents if ticket.readable else ():
                for page, generation in zip(extent.pages, extent.generations, strict=True):
                    self.check_readable(ticket, self.pages[page], extent, generation)

    def check_readable(self, ticket: Ticket, page: Page, extent: Extent, generation: int) -> None:
        assert page.generation == generation
        if page.writer is None:
            # A revoking ticket keeps the layers it had; its load may have ended short behind it.
            assert extent.pools <= page.filled or ticket.state is TicketState.REVOKING
            return
        checked = page.writer.verify and ticket.consumer is not Consumer.CHECKSUM
        assert ticket.readable <= (page.writer.verified if checked else page.writer.landed)

    @invariant()
    def s2_no_write_and_no_reuse_under_a_reader(self) -> None:
        for number, page in enumerate(self.pages):
            if page.readers or page.writer is not None:
                assert page.state != "free"
            (generation,) = self.ledger.extent("full", [number]).generations
            assert generation == page.generation

    @invariant()
    def posted_reads_are_held(self) -> None:
        """A DMA reads: whatever became of the ticket's room, load or scope, its pages are not given away."""
        for ticket, reads in self.posted.items():
            if reads:
                assert ticket.state in LIVE
                for extent in ticket.extents:
                    assert all(self.pages[page].state != "free" for page in extent.pages)
            elif ticket in self.left:
                assert ticket.state not in LIVE

    @invariant()
    def tickets_are_counted(self) -> None:
        live = [ticket for ticket in self.tickets if ticket.state in LIVE]
        assert self.ledger.tickets == len(live)
        assert set(self.ledger.live()) == set(live)
        assert self.ledger.loads == {load for load in self.loads if load.open}

    @invariant()
    def grants_are_never_forgotten(self) -> None:
        """Nobody stays pending whose every byte is in place, or will not come."""
        for ticket in self.tickets:
            if ticket.state is not TicketState.PENDING:
                continue
            waits = [load for load in ticket.loads if load.readable(ticket.consumer) == 0]
            assert waits
            assert all(load.open and not load.failed for load in ticket.loads)


LedgerMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=60, suppress_health_check=list(HealthCheck)
)
TestLedger = LedgerMachine.TestCase
