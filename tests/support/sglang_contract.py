"""Contract checks of the plugin on SGLang's real classes. Run as a module in a subprocess: prints {check: outcome}.

Each check runs twice: with the hooks, and with hooks that find no rank and so leave everything to SGLang. It has to
hold in the first and, but for the few that need hooks to run at all, to fail in the second.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import queue
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import triton  # noqa: F401 - before SGLang: it finds the installed one

import sglang_stubs

sglang_stubs.install()
warnings.simplefilter("ignore")

import sglang.srt.managers.scheduler as sglang_scheduler  # noqa: E402
from sglang.srt.disaggregation import decode, utils  # noqa: E402
from sglang.srt.disaggregation.base import KVPoll  # noqa: E402
from sglang.srt.disaggregation.common.utils import FastQueue  # noqa: E402
from sglang.srt.disaggregation.nixl import conn  # noqa: E402
from sglang.srt.managers.io_struct import (  # noqa: E402
    AbortReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.managers.scheduler_components import request_receiver  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

from dsv4ctl.controlplane.link.wire import Fenced, OpenRoom, Role, RoomReport  # noqa: E402
from dsv4ctl.controlplane.rooms.states import AbortSource, Cancellable, Quiet, RoomKey, RoomState  # noqa: E402
from dsv4ctl.controlplane.tickets.types import LoadKind  # noqa: E402
from dsv4ctl.engine_adapters.sglang import geometry, install, peers, rank, verify  # noqa: E402
from dsv4ctl.engine_adapters.sglang.digests import Expected, fetch  # noqa: E402
from dsv4ctl.engine_adapters.sglang.hooks import bootstrap, life, rooms_prefill, sender  # noqa: E402
from dsv4ctl.engine_adapters.sglang.loads import Copy  # noqa: E402
from dsv4ctl.engine_adapters.sglang.peers import MARK, Ack, Trailer  # noqa: E402
from dsv4ctl.engine_adapters.sglang.releases import hooks_of  # noqa: E402
from sglang_world import LAYERS, PAGE, PEER, STATE_TYPES, Manager, Queue, World, chunk, tokens  # noqa: E402

CHECKS: dict[str, Callable[[bool], None]] = {}
#: Checks that have no meaning without hooks.
ALONE: set[str] = set()
#: Checks of a hook that not every release needs.
NEEDS = {
    "every_rank_enters_the_handshake_reduction": "hooks.agreement:handshake_waiters",
    "own_acknowledgement_of_sglang_counts": "hooks.rooms_decode:abort_ack",
}


def check(function: Callable[[bool], None]) -> Callable[[bool], None]:
    CHECKS[function.__name__] = function
    return function


def alone(function: Callable[[bool], None]) -> Callable[[bool], None]:
    ALONE.add(function.__name__)
    return check(function)


def world(role: Role, hooked: bool, *off: str) -> World:
    made = World(role, off)
    if not hooked:
        rank._Process.rank = None
    return made


# ---- loads, readers, backups ---------------------------------------------------------------------------


def _loading(made: World) -> tuple[int, ...]:
    """Pages of a load that is on the device and has not begun to run."""
    for page in (0, 1):
        made.back_up(7, page)
    pages = made.load_back()
    made.controller.start_loading()
    return pages


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
    assert _post(made, hooked, _loading(made))
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
    _loading(made)
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
    pages = _loading(made)
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
    load = Copy(LoadKind.HICACHE, {"full": _Unknown()}, {"full": _Unknown()})
    made.rank.copies.promised([load])
    made.open()
    queue = Queue()
    chunks = sender.Chunks(queue, Manager(), made.rank)
    queue.put(chunk(7, 6))
    chunks._hold(queue.get())
    assert chunks._first_granted() is None, "nobody knows which pages the load fills"
    load.leased = True
    assert chunks._first_granted() is None, "of a load that the ledger refused nobody knows it either"
    made.rank.copies.pending = ()
    assert chunks._first_granted() is not None


@alone
def chunk_that_waits_is_dropped_with_its_room(_: bool) -> None:
    made = world(Role.PREFILL, True)
    key, queue = made.open(), Queue()
    chunks = sender.Chunks(queue, Manager(), made.rank)
    queue.put(chunk(7, *_loading(made)))
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
    made.rank.copies.promised([Copy(LoadKind.BACKUP, {"full": _Unknown()}, {"full": _Unknown()})])
    made.open()
    assert sender.Chunks(Queue(chunk(7, 6)), Manager(), made.rank).get() is not None


@alone
def sender_guard_off_reads_too_early_and_is_seen(_: bool) -> None:
    made = world(Role.PREFILL, True, "sender_ticket")
    pages = _loading(made)
    made.open()
    sender.Chunks(Queue(chunk(7, *pages)), Manager(), made.rank).get()
    assert made.rank.gate.violations == {"sender read * before hicache landed": 1}


@check
def fourth_load_waits_for_the_first(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    for _ in range(3):
        made.load_back()
        made.controller.start_loading()
    made.load_back()
    made.controller.start_loading()


@check
def load_runs_behind_the_forward(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    made.scheduler.forward_stream.put(lambda: made.host.done.append("forward"))
    made.load_back()
    made.controller.start_loading()
    made.device.run(made.device.streams[0], made.controller.load_stream)
    assert made.host.done == [], made.host.done
    made.device.run()
    assert made.host.done[-1] == ("load", LAYERS - 1), made.host.done


@check
def load_runs_behind_the_backup_of_what_it_reads(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    made.controller.write_queue.append(_operation(0, 7))
    made.controller.start_writing()
    made.load_back()
    made.controller.start_loading()
    made.device.run(made.device.streams[0], made.controller.load_stream)
    assert not made.host.done, made.host.done


@check
def backup_runs_behind_the_forward(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    made.scheduler.forward_stream.put(lambda: made.host.done.append("forward"))
    made.controller.write_queue.append(_operation(0, 7))
    made.controller.start_writing()
    made.device.run(made.device.streams[0], made.controller.write_stream)
    assert made.host.done == [], made.host.done
    made.device.run()
    assert made.host.done[-1] == ("backup",), made.host.done


@check
def backup_runs_behind_a_load(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    made.load_back()
    made.controller.start_loading()
    made.controller.write_queue.append(_operation(5, 7))
    made.controller.start_writing()
    made.device.run(made.device.streams[0], made.scheduler.forward_stream, made.controller.write_stream)
    assert not made.host.done, made.host.done


def _operation(host_page: int, device_page: int) -> Any:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import CacheOperation

    return CacheOperation(tokens(host_page), tokens(device_page), 1)


@check
def batch_without_a_load_waits_for_those_under_way(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    made.load_back()
    made.controller.start_loading()
    forward = made.scheduler.forward_stream
    with made.device.stream(forward):
        made.kvcache.get_index_k_with_scale_buffer(1)
        forward.put(lambda: made.host.done.append("read"))
    made.device.run()
    done = made.host.done
    assert done.index(("load", 1)) < done.index("read"), done


@check
def captured_prefill_waits_for_the_whole_load(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    made.load_back()
    made.controller.start_loading()
    forward = made.scheduler.forward_stream
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: True), reqs=[])
    with made.device.stream(forward):
        life.forward(lambda *args: forward.put(lambda: made.host.done.append("replay")), None, batch)
    made.device.run()
    assert made.host.done[-1] == "replay", made.host.done


@alone
def a_rank_tells_its_tickets_and_last_events(_: bool) -> None:
    made = world(Role.PREFILL, True)
    _loading(made)
    told = made.rank.query("evidence")
    assert {event[2] for event in told["trace"]} >= {"lease", "request"}, told
    assert {ticket["consumer"] for ticket in told["tickets"]} == {"load"}, told
    assert made.rank.query("evidence 7.1") == {"tickets": [], "trace": []}


@alone
def a_paused_scheduler_says_so_and_has_no_runnable_work(_: bool) -> None:
    made = World(Role.PREFILL)
    scheduler, stock = made.scheduler, sglang_scheduler.Scheduler
    scheduler.__dict__.update(
        waiting_queue=[object()] * 3,
        disagg_prefill_bootstrap_queue=SimpleNamespace(queue=[]),
        disagg_prefill_inflight_queue=[],
        disaggregation_mode=utils.DisaggregationMode.PREFILL,
        _engine_paused=False,
        _pause_started_at=None,
        _pause_intervals=[],
    )
    made.rank._link.send = made.frames.append

    def reported() -> tuple[bool, int]:
        made.rank.report()
        return made.frames[-1].paused, made.frames[-1].work

    assert reported() == (False, 3)
    stock.pause_generation(scheduler, PauseGenerationReqInput(mode="in_place"))
    assert reported() == (True, 0)
    stock.continue_generation(scheduler, ContinueGenerationReqInput(torch_empty_cache=False))
    assert reported() == (False, 3)


@alone
def a_scheduler_without_chunks_declares_whole_prompts(_: bool) -> None:
    """`chunked_prefill_size` is the scheduler's own, None if switched off."""
    assert "chunked_prefill_size" in sglang_scheduler.Scheduler.init_chunked_prefill.__code__.co_names
    for role, size, declared in (
        (Role.PREFILL, 8192, Cancellable.CHUNK),
        (Role.PREFILL, None, Cancellable.PROMPT),
        (Role.DECODE, None, Cancellable.CHUNK),
    ):
        made = World(role)
        made.scheduler.chunked_prefill_size = size
        assert made.rank._hello("http://x").cancellable is declared


@alone
def load_lands_layer_by_layer_and_ends(_: bool) -> None:
    made = world(Role.PREFILL, True)
    _loading(made)
    made.device.run(made.device.streams[0], made.scheduler.forward_stream)  # all that it starts behind
    while made.controller.load_stream.step():
        made.rank.step()
    made.rank.step()
    landed = [
        event.note for event in made.rank.gate.trace.events() if event.kind == "landed" and event.who == "hicache"
    ]
    assert landed == [*list(range(1, LAYERS + 1)), LAYERS], landed
    assert made.rank.gate.totals()["loads"] == 0
    assert made.rank.gate.totals()["tickets"] == 0
    assert made.rank.gate.totals()["refused"] == 0


# ---- the bootstrap port ----------------------------------------------------------------------------------

BAD_FRAMES: list[list[bytes]] = [
    [b""],
    [b"hello"],
    [b"ABORT"],
    [b"ABORT", b"seven", b"127.0.0.1", b"5", MARK, b"\x80"],
    [conn.GUARD, b"7"],
    [conn.GUARD, b"7", b"127.0.0.1", b"1", b"agent", b"odd", b"0", b"1", b"", b""],
    [b"WATERMARK", b"1"],
]


class _End(BaseException):
    pass


class _Socket:
    def __init__(self, frames: list[list[bytes]]) -> None:
        self._frames = iter(frames)

    def recv_multipart(self) -> list[bytes]:
        for frame in self._frames:
            return frame
        raise _End


def _bootstrap(made: World, hooked: bool, frames: list[list[bytes]]) -> Any:
    """A prefill rank's manager that heard these frames."""
    manager = Manager()
    manager.__dict__.update(
        server_socket=_Socket(frames),
        local_ip="127.0.0.1",
        rank_port=5,
        enable_staging=False,
        req_to_decode_prefix_len={},
        resolve_kv_replica_factor=lambda infos: None,
        _handle_abort_notification=lambda parts: parts[0] == b"ABORT",
    )
    try:
        if hooked:
            bootstrap._bound(manager)
            bootstrap.serve(manager, made.rank, lambda parts: bootstrap.from_decode(manager, made.rank, parts))
        else:
            conn.threading = SimpleNamespace(Thread=lambda target: SimpleNamespace(start=target))
            conn.NixlKVManager._start_bootstrap_thread.__wrapped__(manager)
    except _End:
        pass
    except Exception:  # noqa: BLE001 - what stock's thread ends with
        traceback.print_exc()
    finally:
        conn.threading = threading
    return manager


def _destination(room: int) -> list[bytes]:
    pages = torch.tensor([3, 4], dtype=torch.int32).numpy().tobytes()
    frame = [conn.GUARD, str(room).encode(), b"127.0.0.1", b"9", b"agent", pages, b"0", b"1", b"", b"0"]
    return peers.with_trailer(frame, Trailer(PEER, 1))


@check
def bootstrap_loop_lives_through_any_frame(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    key = made.open()
    manager = _bootstrap(made, hooked, [*BAD_FRAMES, _destination(7)])
    assert 7 in manager.transfer_infos, "the good frame after bad ones was not heard"
    assert made.rank.counters["bad_frames"] == len(BAD_FRAMES)
    assert made.states(key)[-1] is RoomState.BOOTSTRAPPING


def _acks(made: World) -> list[Any]:
    sent: list[Any] = []
    made.rank.outbox.send = lambda endpoint, parts: sent.append((endpoint, peers.decode(parts)))
    return sent


@alone
def abort_of_a_room_is_acknowledged_when_its_writes_have_ended(_: bool) -> None:
    made = world(Role.PREFILL, True)
    key, manager = made.open(), Manager()
    sent = _acks(made)
    made.rank.rooms.heard(PEER, "tcp://127.0.0.1:9")
    chunks = sender.Chunks(Queue(chunk(7, 3), chunk(7, 4)), manager, made.rank)
    chunks.get()
    made.rank.agent.peer_abort(key, PEER, AbortSource.CLIENT, "gone")
    assert not sent, "acknowledged with a write in flight"
    with contextlib.suppress(Queue.Empty):
        chunks.get()
    assert [frame for _, frame in sent] == [Ack(key, "me", Quiet.QUIET)]
    assert manager.request_status[7] == KVPoll.Failed, "a chunk of an aborted room is not posted"


@alone
def poisoned_room_is_never_acknowledged_as_quiet(_: bool) -> None:
    made = world(Role.PREFILL, True)
    key, manager = made.open(), Manager()
    sent = _acks(made)
    made.rank.rooms.heard(PEER, "tcp://127.0.0.1:9")
    chunks = sender.Chunks(Queue(chunk(7, 3)), manager, made.rank)
    chunks.get()
    manager.exceptions[7] = RuntimeError("NIXL transfer encountered ERR")
    with contextlib.suppress(Queue.Empty):
        chunks.get()
    assert [frame for _, frame in sent] == [Ack(key, "me", Quiet.POISONED)]
    assert made.rank.rooms.held(7), "the source pages of a poisoned room are given back"


@alone
def destinations_of_an_older_generation_are_forgotten(_: bool) -> None:
    made = world(Role.PREFILL, True)
    manager = Manager()
    manager.__dict__.update(resolve_kv_replica_factor=lambda infos: None, transfer_infos={7: {"gone": None}})
    made.open()
    info = SimpleNamespace(room=7, agent_name="here", required_dst_info_num=1, decode_prefix_len=None)
    bootstrap._destination(manager, made.rank, info, Trailer(PEER, 1))
    assert manager.transfer_infos == {7: {"here": info}}


@alone
def abort_while_a_destination_is_taken_in_is_not_undone(_: bool) -> None:
    made = world(Role.PREFILL, True)
    key, manager = made.open(), Manager()
    manager.__dict__.update(local_ip="127.0.0.1", rank_port=5, resolve_kv_replica_factor=lambda infos: made.abort(key))
    bootstrap._bound(manager)
    info = SimpleNamespace(room=7, agent_name="here", required_dst_info_num=1, decode_prefix_len=None)
    bootstrap._destination(manager, made.rank, info, Trailer(PEER, 1))
    assert made.states(key)[-1] is RoomState.ABORTED
    assert manager.request_status == {7: KVPoll.Failed}


@alone
def nothing_is_kept_of_a_fenced_peer(_: bool) -> None:
    for role in (Role.PREFILL, Role.DECODE):
        made = world(role, True)
        key, endpoint = made.open(peers=(PEER, "other")), "tcp://127.0.0.1:9"
        if role is Role.PREFILL:
            made.rank.rooms.heard(PEER, endpoint)
        else:
            made.rank.rooms.expose(made.rank.rooms.find(7), [endpoint, "tcp://127.0.0.1:10"], {"full": (5,)})
        made.rank.outbox.send(endpoint, [b"frame"])
        made.rank._on_frame(Fenced(PEER))
        made.rank.rooms.tick()
        made.rank.agent.peer_abort(key, PEER, AbortSource.CLIENT, "gone")
        kept: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        made.rank.outbox.call(lambda kept=kept, made=made: kept.put(list(made.rank.outbox._sockets)))
        assert endpoint not in kept.get(timeout=60)
        assert PEER not in made.rank.rooms._endpoints


@alone
def destination_of_an_unknown_room_is_answered_with_an_ack(_: bool) -> None:
    made = world(Role.PREFILL, True)
    sent = _acks(made)
    manager = _bootstrap(made, True, [_destination(99)])
    assert not manager.transfer_infos
    assert [frame.outcome for _, frame in sent] == [Quiet.QUIET]


# ---- rooms -------------------------------------------------------------------------------------------------


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


def _request(manager: Manager) -> Any:
    """A request of room 7 at a prefill rank."""
    waiting = object.__new__(conn.NixlKVSender)
    waiting.__dict__.update(kv_mgr=manager, bootstrap_room=7, conclude_state=None)
    return SimpleNamespace(bootstrap_room=7, rid="request", disagg_kv_sender=waiting, pending_bootstrap=False)


@alone
def aborted_chunked_request_leaves_nothing_behind(_: bool) -> None:
    made = world(Role.PREFILL, True)
    made.open()
    manager = Manager()
    manager.__dict__.update(failure_lock=threading.Lock(), failure_records=manager.failures)
    manager.transfer_infos[7] = {}
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
    manager = Manager()
    manager.__dict__.update(failure_lock=threading.Lock(), failure_records=manager.failures)
    manager.update_status(7, KVPoll.WaitingForInput)
    manager.transfer_infos[7] = {}
    request = _request(manager)
    scheduler = SimpleNamespace(waiting_queue=[request])
    order = AbortReq(rid="request")

    def drop(_: Any, order: Any) -> None:
        scheduler.waiting_queue.clear()

    rooms_prefill.abort_request(drop, scheduler, order)
    assert not manager.request_status, "the room's status stays for ever"
    assert not manager.transfer_infos


def _transfer_queue(made: World, status: int, written: int = 7) -> Any:
    """SGLang's queue of a decode rank with room 7 in it."""
    queue = object.__new__(decode.DecodeTransferQueue)
    manager = object.__new__(conn.NixlKVManager)
    manager.__dict__.update(enable_deferred_decode_kv_release=True, _deferred_abort_ack_tracker={})
    receiver = SimpleNamespace(
        poll=lambda: status,
        clear=lambda: None,
        failure_exception=lambda: None,
        kv_mgr=manager,
        abort_notified=True,
        bootstrap_infos=[None],
    )
    request = SimpleNamespace(
        bootstrap_room=7, bootstrap_host="host", rid="request", return_logprob=False, finished_reason=None
    )
    request.finished = lambda: False
    item = decode.DecodeRequest(req=request, kv_receiver=receiver, metadata_buffer_index=0)
    scheduler = SimpleNamespace(
        enable_decode_hicache=False,
        enable_hisparse=False,
        server_args=SimpleNamespace(disaggregation_transfer_backend="nixl"),
        output_streamer=SimpleNamespace(stream_output=lambda *args: None),
        metrics_reporter=SimpleNamespace(enable_metrics=False),
    )
    queue.__dict__.update(
        queue=[item],
        gloo_group=None,
        tp_rank=0,
        metadata_buffers=SimpleNamespace(
            bootstrap_room=torch.full((1, 8), written, dtype=torch.int64), clear_slot=lambda slot: None
        ),
        enable_host_receive=False,
        enable_deferred_kv_release=True,
        deferred_kv_release_timeout=-1.0,  # a time-out that has always passed
        _deferred_releases=[],
        req_to_metadata_buffer_idx_allocator=SimpleNamespace(free=made.host.done.append),
        scheduler=scheduler,
        tree_cache=None,
        enable_staging=False,
        _clean_hicache_prefetch_resources=lambda item: None,
        _commit_transfer_to_req=lambda item: made.host.done.append("commit"),
    )
    decode.release_kv_cache = lambda *args, **kwargs: made.host.done.append("released")
    return queue


def _turn(queue: Any) -> None:
    """What a turn of the decode loop does with its transfers."""
    queue.pop_transferred()
    if hasattr(queue, "resolve_deferred_releases"):
        queue.resolve_deferred_releases()


def _exposed(made: World) -> RoomKey:
    key = made.open()
    room = made.rank.rooms.find(7)
    assert room is not None
    assert made.rank.rooms.expose(room, ["tcp://127.0.0.1:9"], {"full": (5, 6)})
    return key


@check
def failed_room_keeps_its_pages_and_slot_until_the_writer_acknowledged(hooked: bool) -> None:
    made = world(Role.DECODE, hooked)
    key = _exposed(made)
    queue = _transfer_queue(made, KVPoll.Failed)
    _turn(queue)
    assert made.host.done == [], made.host.done
    assert made.rank.rooms.held_pages() == 2
    made.rank.agent.peer_ack(RoomKey(7, 0), PEER, Quiet.QUIET)
    _turn(queue)
    assert made.host.done == [], "an ack of an older generation gave the pages back"
    assert made.rank.counters["late_acks"] == 1
    made.rank.agent.peer_ack(key, PEER, Quiet.QUIET)
    _turn(queue)
    assert made.host.done == ["released", 0], made.host.done


@alone
def own_acknowledgement_of_sglang_counts(_: bool) -> None:
    made = world(Role.DECODE, True)
    _exposed(made)
    queue = _transfer_queue(made, KVPoll.Failed)
    manager = queue.queue[0].kv_receiver.kv_mgr
    manager._deferred_abort_generation = 4
    generation = manager.register_deferred_abort_room(7)
    _turn(queue)
    manager.note_abort_ack(7, 0, generation - 1)
    _turn_held(queue)
    assert made.host.done == [], "an acknowledgement of an older generation gave the pages back"
    manager.note_abort_ack(7, 0, generation)
    _turn_held(queue)
    assert made.host.done == ["released", 0], made.host.done


def _turn_held(queue: Any) -> None:
    queue.resolve_deferred_releases()


@check
def failed_room_waits_for_every_writer(hooked: bool) -> None:
    made = world(Role.DECODE, hooked)
    key = made.open(peers=("a", "b"))
    made.rank.agent.apply(key, lambda half: half.expose())
    queue = _transfer_queue(made, KVPoll.Failed)
    made.rank.agent.peer_ack(key, "a", Quiet.QUIET)
    _turn(queue)
    assert made.host.done == [], made.host.done
    made.rank.agent.peer_ack(key, "b", Quiet.QUIET)
    _turn(queue)
    assert made.host.done == ["released", 0]


@check
def foreign_metadata_is_a_verdict_before_the_commit(hooked: bool) -> None:
    made = world(Role.DECODE, hooked)
    _exposed(made)
    queue = _transfer_queue(made, KVPoll.Success, written=8)
    _turn(queue)
    assert made.host.done == [], made.host.done
    assert made.rank.counters["metadata_mismatches"] == 1


@check
def writers_are_told_where_each_space_lands(hooked: bool) -> None:
    made = world(Role.DECODE, hooked)
    key = made.open()
    manager = Manager()
    manager.__dict__.update(enable_staging=False, transfer_statuses={7: SimpleNamespace(expects_state=False)})
    receiver = object.__new__(conn.NixlKVReceiver)
    receiver.__dict__.update(kv_mgr=manager, bootstrap_room=7, bootstrap_addr="host:1", bootstrap_infos=[])
    pages = [np.array(numbers, dtype=np.int32) for numbers in ([5, 6], [8, 9], [2])]
    receiver.send_metadata(pages[0], 3, pages[1:], decode_prefix_len=0)
    room = made.rank.rooms.find(7)
    assert room is not None
    assert room.destination == LANDING
    assert room.exposed
    made.abort(key)
    assert receiver.send_metadata(pages[0], 3, pages[1:], decode_prefix_len=0) is None
    assert manager.request_status[7] == KVPoll.Failed, "an aborted room is not exposed again"


@alone
def good_room_is_committed(_: bool) -> None:
    made = world(Role.DECODE, True)
    key = _exposed(made)
    queue = _transfer_queue(made, KVPoll.Success)
    _turn(queue)
    assert made.host.done == ["commit", 0], made.host.done
    assert made.states(key)[-1] is RoomState.VERIFIED


@check
def every_rank_enters_the_handshake_reduction(hooked: bool) -> None:
    made = world(Role.DECODE, hooked)
    entered: list[int] = []
    stock = decode.poll_and_all_reduce
    decode.poll_and_all_reduce = lambda pollers, group: entered.append(1) or [KVPoll.WaitingForInput] * len(pollers)
    waiting = SimpleNamespace(
        waiting_for_input=True,
        kv_receiver=SimpleNamespace(conclude_state=None),
        req=SimpleNamespace(rid="r", time_stats=SimpleNamespace(set_bootstrap_done_time=lambda: None)),
    )
    queue = object.__new__(decode.DecodePreallocQueue)
    queue.__dict__.update(queue=[waiting], gloo_group=None, pp_size=1)
    try:
        queue._update_handshake_waiters()
    finally:
        decode.poll_and_all_reduce = stock
    assert entered, "the reduction was left out"
    assert waiting.waiting_for_input
    assert made.rank is not None


def _receiver() -> Any:
    """SGLang's receiver of a single rank."""
    receiver = object.__new__(request_receiver.SchedulerRequestReceiver)
    alone = SimpleNamespace(tp_size=1, attn_tp_size=1, attn_cp_size=1, enable_dp_attention=False, attn_dp_enabled=False)
    for name in ("ps", "server_args"):
        if name in request_receiver.SchedulerRequestReceiver.__slots__:
            object.__setattr__(receiver, name, alone)
    request_receiver.get_parallel = lambda: alone
    request_receiver.get_exec = lambda: alone
    return receiver


@check
def aborts_of_the_link_are_applied_where_every_rank_takes_part(hooked: bool) -> None:
    made = world(Role.DECODE, hooked)
    key = _exposed(made)
    receiver = _receiver()
    request = SimpleNamespace(bootstrap_room=7, rid="the request")
    assert receiver._broadcast_reqs_across_ranks([request]) == [request]
    made.abort(key)
    agreed = receiver._broadcast_reqs_across_ranks([])
    assert [item.rid for item in agreed if isinstance(item, AbortReq)] == ["the request"]
    assert receiver._broadcast_reqs_across_ranks([]) == [], "it is aborted once"


@check
def fresh_room_finds_no_cached_prefix(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    opening = OpenRoom(RoomKey(7, 2), "request", None, "other", (PEER,), {"ack": 10.0}, "off", fresh=True)
    made.rank.agent.handle(opening)
    receiver = _receiver()
    request = SimpleNamespace(bootstrap_room=7, rid="the request", extra_key=None)
    receiver._broadcast_reqs_across_ranks([request])
    assert request.extra_key == "dsv4ctl-7.2"


# ---- digests ---------------------------------------------------------------------------------------------------


#: Pages of a decode rank that a room of two pages lands in: of the prefix, of the window, of the request's states.
LANDING = {"full": (5, 6), "swa": (8, 9), "state": (2,)}
#: Buffers by space: two layers of ratio 4 and one of ratio 128, of c4, index-K and c128; four of the window and two of
#: each state at its end; one of c128's states.
COUNTS = {"full": 5, "swa": 8, "state": 1}
COMPARED = sum(len(pages) * COUNTS[space] for space, pages in LANDING.items())


def _buffers(made: World) -> list[tuple[tuple[str, str, int], torch.Tensor]]:
    """((space, pool, layer), buffer [pages, bytes]) of everything that a room is sent by."""
    return [
        ((space, name, layer), buffer.view(torch.uint8))
        for space, group in made.rank.pools.groups.items()
        for name, (layers, found) in group.items()
        for layer, buffer in zip(layers, found, strict=True)
    ]


class _Pair:
    """A prompt of two pages, cached on the host of a prefill rank, sent to a decode rank during its load."""

    def __init__(self, *off: str, land_first: bool = False, verdict: str | None = None) -> None:
        torch.manual_seed(5)
        prefill = World(Role.PREFILL, off, "read")
        prefill.compute(10, 11)
        for host, device in enumerate((10, 11)):
            prefill.back_up(device, host)
        prefill.compute(1, 2)  # the pages that the load will get hold something else
        pages = prefill.load_back()
        assert pages == (1, 2)
        prefill.controller.start_loading()
        if land_first:
            prefill.device.run()
        sent = self._send(prefill, pages)
        self.prefill = prefill
        self.decode = World(Role.DECODE, () if verdict is None else (verdict,), "read")
        self.decode.rank.launch = prefill.rank.launch
        key = self.decode.open(peers=("me",))
        room = self.decode.rank.rooms.find(7)
        assert room is not None
        self.decode.rank.rooms.expose(room, ["tcp://127.0.0.1:9"], LANDING)
        self._arrive(sent)
        self.queue = _transfer_queue(self.decode, KVPoll.Success)
        self.key = key

    def _send(self, prefill: World, pages: tuple[int, ...]) -> list[Any]:
        """What NIXL reads at the moment of the post, and the digests that follow."""
        prefill.open()
        prefill.rank.rooms.heard(PEER, "tcp://127.0.0.1:9")
        frames = _acks(prefill)
        prefill.rank.outbox.call = lambda function: function()
        queue = Queue()
        chunks = sender.Chunks(queue, Manager(), prefill.rank)
        queue.put(chunk(7, *pages, last=True))
        chunks.get()
        read = {"full": list(pages), "swa": list(pages), "state": [1]}
        self.read = {place: buffer[read[place[0]]].clone() for place, buffer in _buffers(prefill)}
        prefill.device.run()
        return [frame for _, frame in frames if isinstance(frame, peers.Digests)]

    def _arrive(self, frames: list[Any]) -> None:
        for place, buffer in _buffers(self.decode):
            buffer[list(LANDING[place[0]])] = self.read[place]
        assert len(frames) == 1
        self.decode.rank.rooms.told_digests(frames[0])


def _check_again(made: World) -> None:
    """The check after the load, whose kernels ran here when they were launched and not in the order of streams."""
    (check,) = made.rank.copies._checks
    read = iter(check._read)
    spaces = ["full", "swa"][: len(check._read) // 2]
    expected = [Expected(space, *pair) for space, pair in zip(spaces, zip(read, read, strict=True), strict=True)]
    made.rank.copies._checks[:] = [fetch(made.rank.digests.differences(expected))]
    made.rank.step()


@alone
def right_bytes_pass_the_check_from_seal_to_commit(_: bool) -> None:
    pair = _Pair(land_first=True)
    _turn(pair.queue)
    assert pair.decode.host.done == ["commit", 0], pair.decode.host.done
    assert pair.decode.rank.counters["digests_compared"] == COMPARED
    assert pair.decode.rank.counters["digest_mismatches"] == 0
    _check_again(pair.prefill)
    assert pair.prefill.rank.counters["load_mismatches"] == 0


@alone
def digests_that_are_no_numbers_are_refused_where_they_arrive(_: bool) -> None:
    """The scheduler's own thread, which compares them, is not the one that hears of them."""
    made = world(Role.DECODE, True)
    key = made.open()
    frame = msgspec.msgpack.encode(peers.Digests(key, PEER, {"full": 1}, b"123"))
    try:
        bootstrap.from_prefill(made.rank, [MARK, frame])
    except ValueError:
        assert not made.rank.rooms.find(7).told
    else:
        raise AssertionError("three bytes are taken for the digests of a page")


@alone
def stale_bytes_of_an_early_send_are_a_verdict(_: bool) -> None:
    pair = _Pair("sender_ticket")
    _turn(pair.queue)
    assert pair.decode.host.done == [], pair.decode.host.done
    assert pair.decode.rank.counters["digest_mismatches"] == 2 * COUNTS["full"]
    assert pair.decode.states(pair.key)[-1] is not RoomState.VERIFIED
    pair.decode.rank.agent.peer_ack(pair.key, "me", Quiet.QUIET)
    _turn(pair.queue)
    assert pair.decode.host.done == ["released", 0], pair.decode.host.done


@check
def state_that_did_not_arrive_is_a_verdict(hooked: bool) -> None:
    for space, name in (("swa", "swa_kv"), ("swa", "c4_state"), ("swa", "index_state"), ("state", "c128_state")):
        pair = _Pair(land_first=True)
        buffer = next(buffer for place, buffer in _buffers(pair.decode) if place[:2] == (space, name))
        buffer[LANDING[space][-1], 7] ^= 1
        if not hooked:
            rank._Process.rank = None
        _turn(pair.queue)
        assert pair.decode.host.done == [], (name, pair.decode.host.done)
        assert pair.decode.rank.counters["digest_mismatches"] == 1


@alone
def rooms_that_arrive_together_have_each_its_own_digests(_: bool) -> None:
    made = World(Role.DECODE, (), "read")
    made.compute(3, 4, 5)
    rooms = [{"full": (3, 4), "swa": (5,), "state": (1,)}, {"full": (5,), "swa": (4, 3)}, {"full": (4,)}]
    together = [found.get().tolist() for found in made.rank.digests.landed(rooms)]
    assert together == [made.rank.digests.landed([room])[0].get().tolist() for room in rooms]
    assert [len(values) for values in together] == [2 * 5 + 8 + 1, 5 + 2 * 8, 5]


@alone
def window_that_a_writer_did_not_send_is_a_verdict(_: bool) -> None:
    pair = _Pair(land_first=True)
    room = pair.decode.rank.rooms.find(7)
    assert room is not None
    room.destination["swa"] = (8, 9, 10)
    room.found = None
    _turn(pair.queue)
    assert pair.decode.host.done == [], pair.decode.host.done
    assert pair.decode.rank.counters["digest_mismatches"] == 1


@alone
def everything_that_a_room_is_sent_by_has_digests(_: bool) -> None:
    made = World(Role.PREFILL, (), "read")
    pool, groups = made.kvcache, made.rank.pools.groups
    own = getattr(pool, "get_c128_state_buf_infos", None) or pool.get_request_state_buf_infos
    registered = {"full": pool.get_contiguous_buf_infos(), "swa": pool.get_state_buf_infos(), "state": own()}
    for space, (addresses, _, item_bytes) in registered.items():
        buffers = [buffer for _, found in groups[space].values() for buffer in found]
        assert [(buffer.data_ptr(), buffer[0].nbytes) for buffer in buffers] == [
            *zip(addresses, item_bytes, strict=True)
        ]
        assert len(buffers) == COUNTS[space]
    args = SimpleNamespace()
    utils.setup_state_kv_args(args, pool)
    pages = {"swa": (3, 4), "state": (1,)}
    assert geometry.state_pages(args.state_types, [[3, 4], [1]]) == pages
    sent = [count * len(pages[space]) for space, count in zip(pages, map(sum, args.state_item_lens), strict=True)]
    assert sum(made.rank.pools.bytes_of(pages).values()) == sum(sent)


@check
def room_knows_its_bytes_by_pool(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    key, queue = made.open(), Queue()
    chunks = sender.Chunks(queue, Manager(), made.rank) if hooked else queue
    queue.put(chunk(7, 3))
    queue.put(chunk(7, 4, 5, last=True))
    chunks.get()
    with contextlib.suppress(Queue.Empty):
        chunks.get()
        chunks.get()
    reports = [frame.detail for frame in made.frames if isinstance(frame, RoomReport) and frame.key == key]
    told = {name: size for detail in reports for name, size in detail.get("bytes_by_pool", {}).items()}
    pool = made.kvcache
    item = {name: pool.get_contiguous_buf_infos()[2][at] for name, at in (("c4_kv", 0), ("index_k", 2), ("c128_kv", 4))}
    assert [told.get(name) for name in item] == [3 * 2 * item["c4_kv"], 3 * 2 * item["index_k"], 3 * item["c128_kv"]]
    assert set(told) == {*item, "swa_kv", "c4_state", "index_state", "c128_state"}
    assert told["swa_kv"] == 2 * LAYERS * pool.get_state_buf_infos()[2][0], "the window goes with the last chunk"


@alone
def chunk_of_sglang_says_all_that_is_sent_for_it(_: bool) -> None:
    made = World(Role.PREFILL, (), "read")
    made.compute(3, 4)
    made.open()
    room, fast = made.rank.rooms.find(7), FastQueue()
    manager = object.__new__(conn.NixlKVManager)
    manager.__dict__.update(
        disaggregation_mode=utils.DisaggregationMode.PREFILL,
        enable_staging=False,
        transfer_queues=[fast],
        transfer_infos={7: {"agent": SimpleNamespace(dst_port=0)}},
        kv_args=SimpleNamespace(state_types=STATE_TYPES),
    )
    chunks = sender.Chunks(fast, manager, made.rank)
    more = {"chunk_id": 0} if "chunk_id" in inspect.signature(manager.add_transfer_request).parameters else {}
    full, *states = (np.array(pages, dtype=np.int32) for pages in ([3, 4], [4], [1]))
    manager.add_transfer_request(7, full, slice(0, 2), True, aux_index=0, state_indices=states, **more)
    assert chunks.get().room == 7
    assert room is not None
    assert room.source == {"full": (3, 4), "swa": (4,), "state": (1,)}
    assert room.sealed is not None
    assert room.sealed.get().tolist() == made.rank.digests.landed([room.source])[0].get().tolist()


@alone
def verdict_off_counts_and_goes_on(_: bool) -> None:
    pair = _Pair("sender_ticket", verdict="verdict")
    _turn(pair.queue)
    assert pair.decode.host.done == ["commit", 0], pair.decode.host.done
    assert pair.decode.rank.counters["digest_mismatches"] == 2 * COUNTS["full"]


@alone
def commit_waits_for_the_digests(_: bool) -> None:
    pair = _Pair(land_first=True)
    room = pair.decode.rank.rooms.find(7)
    assert room is not None
    told, room.told = room.told, {}
    _turn(pair.queue)
    assert pair.decode.host.done == [], "committed before the digests came"
    room.told = told
    _turn(pair.queue)
    assert pair.decode.host.done == ["commit", 0], pair.decode.host.done


@alone
def wrong_bytes_after_a_load_fail_what_is_being_computed(_: bool) -> None:
    made = World(Role.SINGLE, (), "read")
    made.compute(10, 11)
    for host, device in enumerate((10, 11)):
        made.back_up(device, host)
    next(iter(made.host._bytes.values()))[0, 3] ^= 1
    key = made.open(peers=())
    made.rank.rooms.forward_begin(7)
    made.load_back()
    made.controller.start_loading()
    made.device.run()
    _check_again(made)
    assert made.rank.counters["load_mismatches"] == 1
    assert RoomState.ABORTING in made.states(key)


@alone
def digests_are_noted_behind_the_forward(_: bool) -> None:
    made = World(Role.SINGLE, (), "read")
    made.compute(10, 11)
    streams: list[Any] = []
    digests = made.rank.digests
    for name in ("backed_up", "loaded"):
        noted = getattr(digests, name)
        setattr(digests, name, lambda *given, noted=noted: streams.append(made.device.current) or noted(*given))
    for host, device in enumerate((10, 11)):
        made.back_up(device, host)
    made.load_back()
    made.controller.start_loading()
    assert streams == [made.scheduler.forward_stream] * 3


def _cached() -> World:
    """A rank with two pages on its host."""
    made = World(Role.SINGLE, (), "read")
    made.compute(10, 11)
    for host, device in enumerate((10, 11)):
        made.back_up(device, host)
    return made


@alone
def check_of_a_load_compares_with_what_was_noted_for_it(_: bool) -> None:
    made = _cached()
    pages = made.load_back()
    made.controller.start_loading()
    made.device.run()
    made.rank.digests.spaces["full"].sealed[:, list(pages)] = 0  # their next owner's
    _check_again(made)
    assert made.rank.counters["load_mismatches"] == 0


def _window_load(made: World, device_page: int) -> None:
    """Page 7 of the window, backed up to host page 3, is loaded into another page."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import CacheOperation

    def operation(page: int) -> Any:
        window = PoolTransfer(name=PoolName.SWA, host_indices=tokens(3), device_indices=tokens(page))
        return CacheOperation(tokens(), tokens(), 1, pool_transfers=[window])

    for page, queued, start in (
        (7, made.controller.write_queue, made.controller.start_writing),
        (device_page, made.controller.load_queue, made.controller.start_loading),
    ):
        queued.append(operation(page))
        start()
        made.device.run()


@alone
def window_that_a_load_did_not_fill_is_seen(_: bool) -> None:
    for page, differences in ((7, 0), (9, COUNTS["swa"])):
        made = World(Role.SINGLE, (), "read")
        made.compute(7, 9)
        _window_load(made, page)
        (check,) = made.rank.copies._checks
        expected = Expected("swa", *check._read)
        made.rank.copies._checks[:] = [fetch(made.rank.digests.differences([expected]))]
        made.rank.step()
        assert made.rank.counters["load_mismatches"] == differences


@alone
def page_that_a_decoded_token_fills_is_sealed(_: bool) -> None:
    made = World(Role.SINGLE, (), "read")
    made.scheduler.tp_worker = worker = object()
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: False, is_decode=lambda: True),
        out_cache_loc=torch.tensor([PAGE * 4 - 1, PAGE * 6 + 10]),
        seq_lens_cpu=torch.tensor([2 * PAGE, PAGE + 11]),
    )
    life.forward(lambda *args: None, worker, batch)
    sealed = made.rank.digests.spaces["full"].sealed[0]
    assert [page for page in range(16) if sealed[page]] == [3]


@alone
def without_overlap_digests_are_noted_where_forwards_run(_: bool) -> None:
    made = World(Role.SINGLE, (), "read")
    made.scheduler.enable_overlap = False
    streams: list[Any] = []
    noted = made.rank.digests.backed_up
    made.rank.digests.backed_up = lambda *given: streams.append(made.device.current) or noted(*given)
    made.back_up(10, 0)
    assert streams == [made.device.streams[0]]


@alone
def loaded_pages_stay_locked_until_they_were_compared(_: bool) -> None:
    made = _cached()
    given_back: list[bool] = []
    differences = made.rank.digests.differences

    def compare(*args: Any) -> torch.Tensor:
        made.device.current.put(lambda: given_back.append(made.controller.ack_load_queue[-1].finish_event.query()))
        return differences(*args)

    made.rank.digests.differences = compare
    made.load_back()
    made.controller.start_loading()
    made.device.run()
    assert given_back == [False]
    assert made.controller.ack_load_queue[-1].finish_event.query()


@alone
def what_a_check_reads_lives_until_the_stream_of_the_load_has_read_it(_: bool) -> None:
    made = _cached()
    pages = made.load_back()
    made.controller.start_loading()
    (check,) = made.rank.copies._checks
    noted = made.rank.digests.spaces["full"].sealed[:, list(pages)]
    assert [read.tolist() for read in check._read] == [list(pages), noted.tolist()]


@alone
def pages_of_a_forward_begin_at_page_boundaries(_: bool) -> None:
    made = World(Role.SINGLE, (), "read")
    # One request goes on inside page 3 and into page 4, the next begins page 9 and ends inside it.
    locations = torch.cat([tokens(3)[40:], tokens(4)[:10], tokens(9)[:20]])
    assert made.rank.digests is not None
    made.rank.digests.seal(locations, [40, 0], [PAGE - 40 + 10, 20], torch.tensor([1, 2]))
    written = {
        space: [page for page in range(found.sealed.shape[1]) if found.sealed[0, page]]
        for space, found in made.rank.digests.spaces.items()
    }
    assert written == {"full": [3, 4, 9], "swa": [3, 4, 9], "state": [1, 2]}, written


@alone
def ranks_exchange_with_those_of_equal_parts(_: bool) -> None:
    assert [rank.own_peers(r, 2, ("a", "b")) for r in range(2)] == [("a",), ("b",)]
    assert [rank.own_peers(r, 2, ("a", "b", "c", "d")) for r in range(2)] == [("a", "b"), ("c", "d")]
    assert [rank.own_peers(r, 4, ("a", "b")) for r in range(4)] == [("a",), ("a",), ("b",), ("b",)]
    assert rank.own_peers(0, 1, ()) == ()


# ---- in place ------------------------------------------------------------------------------------------------


@alone
def speculation_ends_the_process(_: bool) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    scheduler = SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE"))
    with contextlib.suppress(SystemExit):
        life.attach(lambda _: None, scheduler)
        raise AssertionError("a rank with a draft model is attached")


@alone
def a_missing_hook_is_named(_: bool) -> None:
    target = "sglang.srt.managers.scheduler.Scheduler.run_batch"
    present = sglang_scheduler.Scheduler.run_batch
    try:
        sglang_scheduler.Scheduler.run_batch = present.__wrapped__
        assert verify.problems(FUNCTIONS, sys.modules) == [f"{target} is not hooked"]
        sglang_scheduler.Scheduler.run_batch = present
        sglang_scheduler.Scheduler.another = present.__wrapped__
        assert "also called another" in verify.problems(FUNCTIONS, sys.modules)[0]
        del sglang_scheduler.Scheduler.another
        kept = type("Kept", (sglang_scheduler.Scheduler,), {"run_batch": lambda self: None})
        assert "overridden by" in verify.problems(FUNCTIONS, sys.modules)[0]
        del kept
        decode.stale = utils._apply_metadata_gate.__wrapped__
        assert any("imported by sglang.srt.disaggregation.decode" in p for p in verify.problems(FUNCTIONS, sys.modules))
    finally:
        sglang_scheduler.Scheduler.run_batch = present
        if hasattr(decode, "stale"):
            del decode.stale


FUNCTIONS: dict[str, Any] = {}


def main(release: str) -> None:
    hooks = hooks_of(release)
    FUNCTIONS.update(install.register(install.resolve(hooks)))
    HookRegistry.apply_hooks()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    outcomes: dict[str, Any] = {"problems": verify.problems(FUNCTIONS, sys.modules), "hooks": len(hooks), "checks": {}}
    placed = {hook.function for hook in hooks}
    for name, function in CHECKS.items():
        if NEEDS.get(name, hooks[0].function) not in placed:
            continue
        with_hooks = _outcome(function, True)
        without = None if name in ALONE else _outcome(function, False)
        outcomes["checks"][name] = {"with": with_hooks, "without": without}
    print(json.dumps(outcomes, default=repr))


def _outcome(function: Callable[[bool], None], hooked: bool) -> str:
    try:
        function(hooked)
    except AssertionError:
        return f"fails: {traceback.format_exc(limit=-2)}"
    except Exception:  # noqa: BLE001 - reported
        return f"error: {traceback.format_exc()}"
    return "holds"


if __name__ == "__main__":
    main(sys.argv[1])
