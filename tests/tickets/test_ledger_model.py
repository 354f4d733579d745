"""Random histories of the ledger against a naive model: sets of readers and writers by page, checked at each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsv4ctl.controlplane.tickets.ledger import Ledger, LedgerError, Load, Ticket
from dsv4ctl.controlplane.tickets.types import Consumer, Extent, LoadKind, SpaceSpec, TicketState

PAGES, LAYERS = 5, 2
POOLS = ("a", "b")
LIVE = (TicketState.PENDING, TicketState.GRANTED, TicketState.REVOKING)

page_sets = st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=3, unique=True)
pool_sets = st.sampled_from([("a",), ("b",), POOLS])
rooms = st.sampled_from([None, 1, 2])


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
        self.refused = 0

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

    def call(self, allowed: bool, method: Any, *args: Any, **options: Any) -> Any:
        """The ledger does it exactly if the model allows it."""
        if allowed:
            return method(*args, **options)
        self.refused += 1
        with pytest.raises(LedgerError):
            method(*args, **options)
        return None

    def sync(self) -> None:
        """Tickets that ended leave their pages."""
        for page in self.pages:
            page.readers = [ticket for ticket in page.readers if ticket.state in LIVE]
            page.settle()

    # ---- events --------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 3))
    def allocate(self, count: int) -> None:
        taken = self.ledger.allocate({"full": count})
        free = [number for number, page in enumerate(self.pages) if page.state == "free"]
        assert (taken is None) == (len(free) < count)
        for number in taken["full"] if taken else ():
            page = self.pages[number]
            assert (page.state, page.readers, page.writer) == ("free", [], None)
            page.state, page.filled = "owned", set()
            page.generation += 1

    @rule(pages=page_sets)
    def free(self, pages: list[int]) -> None:
        allowed = all(self.pages[page].state == "owned" for page in pages)
        self.call(allowed, self.ledger.free, "full", pages)
        for page in pages if allowed else ():
            self.pages[page].state = "retiring"
        self.sync()

    @rule(
        pages=page_sets, pools=pool_sets, kind=st.sampled_from(LoadKind), verify=st.booleans(), stale=st.integers(0, 8)
    )
    def open_load(self, pages: list[int], pools: tuple[str, ...], kind: LoadKind, verify: bool, stale: int) -> None:
        extent = self.extent(pages, pools, stale)
        allowed = self.current(extent) and all(
            not self.pages[page].readers and self.pages[page].writer is None for page in pages
        )
        load = self.call(allowed, self.ledger.open_load, kind, [extent], verify=verify)
        for page in (self.pages[number] for number in pages) if allowed else ():
            page.generation += 1
            page.writer, page.writing, page.filled = load, set(pools), set()
        if allowed:
            self.loads.append(load)

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), layers=st.integers(0, LAYERS + 1), verified=st.booleans())
    def advance(self, data: st.DataObject, layers: int, verified: bool) -> None:
        load = data.draw(st.sampled_from(self.loads))
        present = load.verified if verified else load.landed
        ceiling = load.landed if verified else LAYERS
        allowed = load.open and present <= layers <= ceiling
        self.call(allowed, self.ledger.layer_verified if verified else self.ledger.layer_landed, load, layers)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from(self.loads))
        self.call(load.open, self.ledger.fail_load, load)
        self.sync()

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from(self.loads))
        allowed = load.open
        self.call(allowed, self.ledger.quarantine, load)
        for page in self.pages_of(load) if allowed else ():
            page.state = "quarantined"
        self.sync()

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from(self.loads))
        allowed = load.open
        whole = not load.failed and load.landed == LAYERS and (not load.verify or load.verified == LAYERS)
        self.call(allowed, self.ledger.end_load, load)
        for page in self.pages_of(load) if allowed else ():
            page.writer = None
            page.filled = page.writing if whole else set()
        self.sync()

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), pages=page_sets)
    def seal(self, data: st.DataObject, pages: list[int]) -> None:
        load = data.draw(st.sampled_from(self.loads))
        held = all(self.pages[page].writer is load for page in pages)
        allowed = held and load.kind is LoadKind.FORWARD and not load.failed
        self.call(allowed, self.ledger.seal, load, "full", pages)
        for page in (self.pages[number] for number in pages) if allowed else ():
            page.writer, page.filled = None, page.writing
        self.sync()

    @rule(
        pages=page_sets,
        pools=pool_sets,
        consumer=st.sampled_from([Consumer.ATTENTION, Consumer.CHECKSUM]),
        room=rooms,
        stale=st.integers(0, 8),
    )
    def request(
        self, pages: list[int], pools: tuple[str, ...], consumer: Consumer, room: int | None, stale: int
    ) -> None:
        extent = self.extent(pages, pools, stale)
        allowed = self.joinable(extent)
        ticket = self.call(allowed, self.ledger.request, consumer, [extent], room=room)
        if allowed:
            self.tickets.append(ticket)
            for page in pages:
                self.pages[page].readers.append(ticket)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), pages=page_sets, pools=pool_sets)
    def extend(self, data: st.DataObject, pages: list[int], pools: tuple[str, ...]) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        extent = self.extent(pages, pools, 0)
        allowed = ticket.state in LIVE[:2] and self.joinable(extent)
        self.call(allowed, self.ledger.extend, ticket, [extent])
        for page in pages if allowed else ():
            self.pages[page].readers.append(ticket)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), pages=page_sets)
    def trim(self, data: st.DataObject, pages: list[int]) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        held = {page for extent in ticket.extents for page in extent.pages}
        allowed = ticket.state in LIVE and not ticket.posted and set(pages) <= held
        self.call(allowed, self.ledger.trim, ticket, "full", pages)
        for page in (self.pages[number] for number in pages) if allowed else ():
            page.readers = [reader for reader in page.readers if reader is not ticket]
        self.sync()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), guarded=st.booleans())
    def post(self, data: st.DataObject, guarded: bool) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        granted = ticket.state is TicketState.GRANTED and ticket.readable == LAYERS
        allowed = granted if guarded else ticket.state in LIVE
        self.call(allowed, self.ledger.post, ticket, guarded=guarded)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        self.call(ticket.posted > 0, self.ledger.complete, ticket)
        self.sync()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        posted, allowed = ticket.posted, ticket.state in LIVE and not ticket.left
        self.call(allowed, self.ledger.release, ticket)
        if allowed:
            assert ticket.state is (TicketState.REVOKING if posted else TicketState.RELEASED)
        self.sync()

    @rule(room=st.sampled_from([1, 2]))
    def revoke(self, room: int) -> None:
        self.ledger.revoke(room)
        for ticket in self.tickets:
            if ticket.room == room and ticket.state in LIVE:
                assert ticket.state is TicketState.REVOKING
        self.sync()

    def extent(self, pages: list[int], pools: tuple[str, ...], stale: int) -> Extent:
        """One in nine is a generation old."""
        extent = self.ledger.extent("full", pages, pools)
        if stale == 8:
            return extent._replace(generations=tuple(generation - 1 for generation in extent.generations))
        return extent

    # ---- what always holds ---------------------------------------------------------------------------

    @invariant()
    def pages_are_conserved(self) -> None:
        counts = self.ledger.counts()
        by_state = {state: sum(page.state == state for page in self.pages) for state in ("free", "owned", "retiring")}
        assert {state: counts[state]["full"] for state in by_state} == by_state
        assert sum(counts[state]["full"] for state in ("free", "owned", "retiring", "quarantined")) == PAGES
        assert counts["leased"]["full"] == sum(page.writer is not None for page in self.pages)
        assert self.ledger.available("full") == by_state["free"]
        assert self.ledger.refused == self.refused

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
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedger = LedgerMachine.TestCase
