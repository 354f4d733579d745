"""Rooms of a prefill rank: what is kept until its writes have ended, and nothing after."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.managers.io_struct import AbortReq

from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.controlplane.rooms.states import RoomState
from dsv4ctl.engine_adapters.sglang.hooks import life, rooms_prefill, sender
from sglang_contract.checks import alone, check
from sglang_contract.situations import world
from sglang_world import Manager, Queue, chunk


@check
def failed_room_keeps_its_source_pages_while_a_write_is_in_flight(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    made.open()
    manager = Manager()
    chunks = sender.Chunks(Queue(chunk(7, 3)), manager, made.rank)
    chunks.get()
    poller = SimpleNamespace(bootstrap_room=7, poll=lambda: KVPoll.Failed, aux_index=0)
    poll = utils.poll_and_all_reduce_attn_cp_tp_group
    assert poll([poller], None, None) == [KVPoll.Transferring]
    poller.aux_index = None
    assert poll([poller], None, None) == [KVPoll.Bootstrapping], "stock ends with the state of a transfer not begun"
    with contextlib.suppress(Queue.Empty):
        chunks.get()
    assert poll([poller], None, None) == [KVPoll.Failed]


@alone
def guard_of_one_rank_keeps_no_rank_out_of_a_reduction(_: bool) -> None:
    made = world(Role.PREFILL, True, "quiesce")
    made.open()
    entered: list[list[bool]] = []
    stock = rooms_prefill.any_rank
    rooms_prefill.any_rank = lambda flags, *groups: entered.append(flags) or flags
    poller = SimpleNamespace(bootstrap_room=7, poll=lambda: KVPoll.Failed)
    try:
        polls = utils.poll_and_all_reduce_attn_cp_tp_group([poller], None, None)
    finally:
        rooms_prefill.any_rank = stock
    assert (entered, polls) == ([[False]], [KVPoll.Failed])


def _manager() -> Manager:
    """With what it keeps of room 7."""
    manager = Manager()
    manager.__dict__.update(failure_lock=threading.Lock(), failure_records=manager.failures)
    manager.transfer_infos[7] = {}
    return manager


def _request(manager: Manager) -> Any:
    """A request of room 7 at a prefill rank."""
    waiting = object.__new__(conn.NixlKVSender)
    waiting.__dict__.update(kv_mgr=manager, bootstrap_room=7, conclude_state=None)
    return SimpleNamespace(bootstrap_room=7, rid="request", disagg_kv_sender=waiting, pending_bootstrap=False)


@alone
def aborted_chunked_request_leaves_nothing_behind(_: bool) -> None:
    made = world(Role.PREFILL, True)
    made.open()
    manager = _manager()
    request = _request(manager)
    scheduler = SimpleNamespace(_pending_chunked_abort_req=request, chunked_req=request)
    scheduler.attn_tp_cpu_group = scheduler.attn_cp_cpu_group = None

    def stock(_: Any) -> None:
        manager.record_failure(7, "Aborted by AbortReq.")
        manager.update_status(7, KVPoll.Failed)

    rooms_prefill.chunked_abort(stock, scheduler)
    assert (manager.request_status, manager.failures, manager.transfer_infos) == ({}, {}, {})


@check
def aborted_waiting_request_leaves_nothing_behind(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    made.open()
    manager = _manager()
    manager.update_status(7, KVPoll.WaitingForInput)
    request = _request(manager)
    scheduler = SimpleNamespace(waiting_queue=[request])
    order = AbortReq(rid="request")

    def drop(_: Any, order: Any) -> None:
        scheduler.waiting_queue.clear()

    rooms_prefill.abort_request(drop, scheduler, order)
    assert not manager.request_status, "the room's status stays for ever"
    assert not manager.transfer_infos


@alone
def forward_holds_an_aborted_room_until_its_result(_: bool) -> None:
    made = world(Role.PREFILL, True)
    key = made.open()
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(bootstrap_room=7)], forward_mode=SimpleNamespace(is_extend=lambda: True)
    )
    life.run_batch(lambda *_: None, made.scheduler, batch)
    made.abort(key)
    for state in (RoomState.QUIESCING, RoomState.ABORTED, RoomState.ABORTED):
        assert made.states(key)[-1] is state
        life.batch_result(lambda *_: None, made.scheduler, batch, None)
