"""What the transfer worker of a prefill rank waits for before it posts a chunk, and when it drops one."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from dsv4ctl.controlplane.link.wire import OpenRoom, Role
from dsv4ctl.controlplane.rooms.states import RoomKey, RoomState
from dsv4ctl.controlplane.tickets.types import LoadKind
from dsv4ctl.engine_adapters.sglang.hooks import sender
from dsv4ctl.engine_adapters.sglang.loads import Copy
from sglang_contract.checks import alone, check
from sglang_contract.situations import loading, world
from sglang_world import PEER, Manager, Queue, World, chunk


def _post(made: World, hooked: bool, pages: tuple[int, ...]) -> bool:
    """Whether the load had landed when the transfer worker got the chunk."""
    made.open()
    queue = Queue(chunk(7, *pages))
    source = sender.Chunks(queue, Manager(), made.rank) if hooked else queue
    landed: list[bool] = []

    def work() -> None:
        source.get()
        acks = made.controller.ack_load_queue
        landed.append(bool(acks) and acks[-1].finish_event.query())

    worker = threading.Thread(target=work)
    worker.start()
    while worker.is_alive() and not made.rank.counters["early_sends_held"]:
        worker.join(0.001)
    if not landed:
        if made.controller.load_queue:
            made.controller.start_loading()
        made.device.run()
    worker.join()
    return landed[0]


@check
def sender_waits_for_a_load_under_way(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    assert _post(made, hooked, loading(made))
    assert made.rank.counters["early_sends_held"] == 1


@check
def sender_waits_for_a_load_that_is_only_promised(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    for page in (0, 1):
        made.back_up(7, page)
    assert _post(made, hooked, made.load_back())


@alone
def sender_does_not_wait_for_other_pages(_: bool) -> None:
    made = world(Role.PREFILL, True)
    loading(made)
    made.open()
    assert sender.Chunks(Queue(chunk(7, 6)), Manager(), made.rank).get() is not None
    assert not made.rank.counters["early_sends_held"]


@alone
def chunk_of_an_older_generation_is_not_posted(_: bool) -> None:
    made = world(Role.PREFILL, True)
    queue = Queue()
    chunks = sender.Chunks(queue, Manager(), made.rank)
    key = made.open()
    queue.put(chunk(7, 3))
    made.abort(key)
    again = RoomKey(7, 2)
    made.rank.agent.handle(OpenRoom(again, "request", None, "other", (PEER,), {"ack": 10.0}, "off"))
    with contextlib.suppress(Queue.Empty):
        chunks.get()
        raise AssertionError("the chunk of the room that was aborted is posted in the next one")
    assert made.states(again) == [RoomState.ALLOCATED]
    queue.put(chunk(7, 4))
    assert chunks.get() is not None


@alone
def dying_transfer_worker_is_reported(_: bool) -> None:
    made = world(Role.PREFILL, True)
    ends: list[str] = []
    made.rank.end, made.rank.report = ends.append, lambda: 1 / 0
    with contextlib.suppress(Queue.Empty, ZeroDivisionError):
        sender.transfer_worker(lambda _, chunks: chunks.get(), Manager(), Queue())
    assert len(ends) == 1
    assert "transfer" in ends[0]


@alone
def chunk_that_waits_keeps_only_its_own_room_waiting(_: bool) -> None:
    made = world(Role.PREFILL, True)
    pages = loading(made)
    made.open()
    made.open(8)
    queue = Queue()
    chunks = sender.Chunks(queue, Manager(), made.rank)
    for waiting in (chunk(7, *pages), chunk(7, 6), chunk(8, 6)):
        queue.put(waiting)
    assert chunks.get().room == 8
    made.device.run()
    assert [chunks.get().prefill_kv_indices.tolist() for _ in range(2)] == [list(pages), [6]]


@alone
def chunk_waits_for_what_it_cannot_know_and_the_worker_does_not(_: bool) -> None:
    made = world(Role.PREFILL, True)
    load = Copy(LoadKind.HICACHE, _Unknown())
    made.rank.copies.promised([load])
    made.open()
    queue = Queue()
    chunks = sender.Chunks(queue, Manager(), made.rank)
    queue.put(chunk(7, 6))
    chunks._hold(queue.get())
    assert chunks._first_granted() is None, "nobody knows which pages the load fills"
    load.leased = True
    assert chunks._first_granted() is None, "of a load that the ledger refused nobody knows it either"
    made.rank.copies._keep(())
    assert chunks._first_granted() is not None


@alone
def chunk_that_waits_is_dropped_with_its_room(_: bool) -> None:
    made = world(Role.PREFILL, True)
    key, queue = made.open(), Queue()
    chunks = sender.Chunks(queue, Manager(), made.rank)
    queue.put(chunk(7, *loading(made)))
    chunks._hold(queue.get())
    assert chunks._first_granted() is None
    made.abort(key)
    again = RoomKey(7, 2)
    made.rank.agent.handle(OpenRoom(again, "request", None, "other", (PEER,), {"ack": 10.0}, "off"))
    assert chunks._first_granted() is None
    assert not chunks._held
    assert made.rank.gate.totals()["tickets"] == 1, "the load's own reads"
    assert made.states(again) == [RoomState.ALLOCATED], "the next room of this number is failed with it"


@alone
def chunk_whose_room_aborts_while_it_is_posted_is_not_posted(_: bool) -> None:
    """Between the room's word and the ledger's."""
    made = world(Role.PREFILL, True)
    key, queue, gate = made.open(), Queue(), made.rank.gate
    chunks = sender.Chunks(queue, Manager(), made.rank)
    queue.put(chunk(7, 6))
    chunks._hold(queue.get())
    post = gate.post

    def late(ticket: Any) -> None:
        made.abort(key)
        post(ticket)

    gate.post = late  # type: ignore[method-assign]
    assert chunks._first_granted() is None
    assert gate.totals()["tickets"] == 0
    assert made.states(key)[-1] is RoomState.ABORTED, "its writer waits for a write that nobody posted"


class _Unknown:
    """Page numbers that the device has not told yet."""

    def ready(self) -> bool:
        return False

    def get(self) -> tuple[int, ...]:
        raise AssertionError("the sender waits for page numbers that are none of its business")


@alone
def sender_does_not_wait_for_backups(_: bool) -> None:
    made = world(Role.PREFILL, True)
    made.rank.copies.promised([Copy(LoadKind.BACKUP, _Unknown())])
    made.open()
    assert sender.Chunks(Queue(chunk(7, 6)), Manager(), made.rank).get() is not None


@alone
def sender_guard_off_reads_too_early_and_is_seen(_: bool) -> None:
    made = world(Role.PREFILL, True, "sender_ticket")
    pages = loading(made)
    made.open()
    sender.Chunks(Queue(chunk(7, *pages)), Manager(), made.rank).get()
    assert made.rank.gate.violations == {"sender read * before hicache landed": 1}
