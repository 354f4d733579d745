"""The ledger as threads meet it: waiting, guards, the trace. Real threads, no sleeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from dsv4ctl.controlplane.tickets.gate import TicketRevokedError, TicketTimeoutError
from dsv4ctl.controlplane.tickets.ledger import LedgerError
from dsv4ctl.controlplane.tickets.types import Consumer, Guard, TicketState
from small_gate import LAYERS, SmallGate

LIMIT = 60.0


class Reader:
    """Reads in a thread of its own; `blocked` returns once it waits for the gate."""

    def __init__(self, gate: SmallGate) -> None:
        self._gate = gate
        self._pool = ThreadPoolExecutor(4)

    def read(self, *args: Any) -> Future[None]:
        """Returns once the thread waits inside the gate (or is done)."""
        before = len(self._gate._changed._waiters)  # type: ignore[attr-defined]
        future = self._pool.submit(self._gate.read, *args)
        while not future.done():
            with self._gate._lock:
                if len(self._gate._changed._waiters) > before:  # type: ignore[attr-defined]
                    break
        return future

    def run(self, call: Callable[[], object]) -> Future[object]:
        return self._pool.submit(call)


@pytest.fixture
def reader(gate: SmallGate) -> Reader:
    return Reader(gate)


def test_a_read_waits_for_its_own_layer_and_no_longer(gate: SmallGate, reader: Reader) -> None:
    load = gate.load()
    ticket = gate.request(Consumer.ATTENTION, load.extents)
    second = reader.read(ticket, "c4_kv", 1)
    gate.layer_landed(load, 1)
    assert not second.done()
    gate.layer_landed(load, 2)
    second.result(LIMIT)
    gate.read(ticket, "c4_kv", 0)
    assert gate.violations == {}


def test_one_landing_wakes_every_reader_that_it_concerns(gate: SmallGate, reader: Reader) -> None:
    load = gate.load()
    readers = [
        reader.read(gate.request(consumer, load.extents), "index_k", 0)
        for consumer in (Consumer.ATTENTION, Consumer.INDEXER, Consumer.INDEXER)
    ]
    gate.layer_landed(load, LAYERS)
    for future in readers:
        future.result(LIMIT)


def test_a_read_ends_with_its_room(gate: SmallGate, reader: Reader) -> None:
    ticket = gate.request(Consumer.ATTENTION, gate.load().extents, room=7)
    future = reader.read(ticket, "c4_kv", 0)
    gate.revoke(7)
    with pytest.raises(TicketRevokedError, match="attention ticket of room 7 is revoked"):
        future.result(LIMIT)


def test_a_read_ends_with_its_load(gate: SmallGate, reader: Reader) -> None:
    load = gate.load(landed=1)
    future = reader.read(gate.request(Consumer.ATTENTION, load.extents), "c4_kv", 1)
    gate.fail_load(load, "digest mismatch")
    with pytest.raises(TicketRevokedError, match="is revoking"):
        future.result(LIMIT)


def test_a_revoking_ticket_still_reads_what_it_was_granted(gate: SmallGate) -> None:
    """The forward that runs finishes its layer; its pages are held until it released."""
    ticket = gate.request(Consumer.ATTENTION, gate.load(landed=2).extents, room=7)
    gate.revoke(7)
    gate.read(ticket, "c4_kv", 1)
    with pytest.raises(TicketRevokedError):
        gate.read(ticket, "c4_kv", 2)


def test_a_deadline_names_the_layer(gate: SmallGate) -> None:
    ticket = gate.request(Consumer.INDEXER, gate.load(landed=1).extents)
    with pytest.raises(TicketTimeoutError, match=r"indexer: layer 1 did not land in 0.01 s"):
        gate.read(ticket, "index_k", 1, deadline=0.01)


def test_nobody_reads_under_a_ticket_that_was_released(gate: SmallGate) -> None:
    ticket = gate.request(Consumer.ATTENTION, gate.load(landed=LAYERS).extents)
    gate.release(ticket)
    with pytest.raises(TicketRevokedError, match="is released"):
        gate.read(ticket, "c4_kv", 0)


def test_leaving_is_idempotent_and_releasing_is_not(gate: SmallGate) -> None:
    """Between a look at the state and the release, another thread may revoke."""
    ticket = gate.request(Consumer.ATTENTION, gate.load().extents, room=7)
    gate.revoke(7)
    gate.leave(ticket)
    with pytest.raises(LedgerError, match="already revoked"):
        gate.release(ticket)
    assert gate.totals()["refused"] == 1


def test_an_unregistered_consumer_is_an_event_of_its_own(gate: SmallGate) -> None:
    with pytest.raises(LedgerError, match="consumer backup is not registered"):
        gate.request(Consumer.BACKUP, gate.load().extents)
    assert gate.violations == {"backup reads without being registered": 1}
    assert gate.traced()[-1] == "unregistered"


# ---- guards ----------------------------------------------------------------------------------------------


def test_with_its_guard_off_a_read_does_not_wait_and_is_recorded(gate: SmallGate) -> None:
    load = gate.load(landed=1)
    ticket = gate.request(Consumer.INDEXER, load.extents)
    gate.set_guards_off([Guard.INDEXER])
    gate.read(ticket, "index_k", 0)
    assert gate.violations == {}
    gate.read(ticket, "index_k", 2)
    assert gate.violations == {"indexer read index_k before hicache landed": 1}
    read = gate.trace.events()[-1]
    assert (read.where, read.note) == (("index_k", 2, ticket.extents), 1)
    assert gate.guarded(Guard.ATTENTION)
    assert gate.guarded(Guard.ATTENTION, Guard.COMPRESSOR)
    assert not gate.guarded(Guard.ATTENTION, Guard.INDEXER)
    with pytest.raises(TicketTimeoutError):
        gate.read(gate.request(Consumer.ATTENTION, load.extents), "c4_kv", 2, deadline=0.01)


def test_switching_a_guard_off_lets_the_waiting_go(gate: SmallGate, reader: Reader) -> None:
    future = reader.read(gate.request(Consumer.ATTENTION, gate.load().extents), "c4_kv", 0)
    gate.set_guards_off([Guard.ATTENTION])
    future.result(LIMIT)
    assert sum(gate.violations.values()) == 1


def test_an_early_post_is_recorded_and_still_holds(gate: SmallGate) -> None:
    load = gate.load()
    ticket = gate.request(Consumer.SENDER, load.extents, room=7)
    with pytest.raises(LedgerError, match="0 layers granted"):
        gate.post(ticket)
    assert gate.violations == {}
    gate.set_guards_off([Guard.SENDER])
    gate.post(ticket)
    assert gate.violations == {"sender read * before hicache landed": 1}
    gate.revoke(7)
    gate.leave(ticket)
    gate.end_load(load)
    gate.free("full", load.extents[0].pages)
    assert gate.room_in("full") == (7, 1)
    gate.complete(ticket)
    assert (ticket.state, gate.room_in("full")) == (TicketState.RELEASED, (8, 0))


# ---- trace and reports -----------------------------------------------------------------------------------


def test_the_trace_tells_what_happened_in_order_and_nothing_that_was_refused(gate: SmallGate) -> None:
    load = gate.load()
    ticket = gate.request(Consumer.ATTENTION, load.extents)
    with pytest.raises(LedgerError):
        gate.free("full", [7])
    gate.layer_landed(load, LAYERS)
    gate.read(ticket, "c4_kv", 0)
    gate.end_load(load)
    gate.release(ticket)
    with pytest.raises(LedgerError):
        gate.release(ticket)
    gate.free("full", load.extents[0].pages)
    assert gate.traced() == [
        *("allocate", "lease", "landed", "request", "landed", "grant", "read", "ended", "release", "free")
    ]
    landed = gate.trace.events()[4]
    assert (landed.who, landed.where, landed.note) == ("hicache", load.extents, 3)


def test_totals_and_live_agree(gate: SmallGate) -> None:
    load = gate.load(landed=LAYERS)
    gate.request(Consumer.ATTENTION, load.extents, room=1)
    gate.request(Consumer.INDEXER, gate.load().extents)
    gate.revoke(1)
    assert gate.totals() == {
        "tickets": 2, "pending": 1, "revoking": 1, "loads": 2, "refused": 0, "violations": 0,
    }  # fmt: skip
    assert {row["consumer"]: row["state"] for row in gate.live()} == {"attention": "revoking", "indexer": "pending"}


def test_many_threads_lose_no_wake_up_and_no_page(gate: SmallGate, reader: Reader) -> None:
    """Readers race with the loader layer by layer: each sees only layers that landed, and all end."""
    rounds, landed = 30, 0
    barrier = threading.Barrier(3)

    def read(consumer: Consumer) -> None:
        for _ in range(rounds):
            barrier.wait(LIMIT)
            ticket = gate.request(consumer, load.extents)
            for layer in range(LAYERS):
                gate.read(ticket, "c4_kv", layer, LIMIT)
                assert landed > layer
            gate.release(ticket)
            barrier.wait(LIMIT)

    readers = [reader.run(lambda c=c: read(c)) for c in (Consumer.ATTENTION, Consumer.INDEXER)]
    for _ in range(rounds):
        landed = 0
        load = gate.load()
        barrier.wait(LIMIT)
        for layer in range(1, LAYERS + 1):
            landed = layer
            gate.layer_landed(load, layer)
        barrier.wait(LIMIT)
        gate.end_load(load)
        gate.free("full", load.extents[0].pages)
        assert gate.room_in("full") == (8, 0)
    for future in readers:
        future.result(LIMIT)
    assert gate.violations == {}
