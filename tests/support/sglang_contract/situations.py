"""Ranks as checks of several modules begin with them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.managers.scheduler_components import request_receiver as receiver

from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.engine_adapters.sglang import peers, rank
from sglang_world import World

#: Pages of a decode rank that a room of two pages lands in: of the prefix, of the window, of the request's states.
LANDING = {"full": (5, 6), "swa": (8, 9), "state": (2,)}
#: Buffers by space: two layers of ratio 4 and one of ratio 128, of c4, index-K and c128; four of the window and two of
#: each state at its end; one of c128's states.
COUNTS = {"full": 5, "swa": 8, "state": 1}


def world(role: Role, hooked: bool, *off: str) -> World:
    made = World(role, off)
    if not hooked:
        rank._Process.rank = None
    return made


def something_to_read() -> int:
    """A file that there is always something to read of."""
    return os.eventfd(1)


def loading(made: World) -> tuple[int, ...]:
    """Pages of a load that is on the device and has not begun to run."""
    for page in (0, 1):
        made.back_up(7, page)
    pages = made.load_back()
    made.controller.start_loading()
    return pages


def acks(made: World) -> list[Any]:
    sent: list[Any] = []
    made.rank.outbox.send = lambda endpoint, parts: sent.append((endpoint, peers.decode(parts)))
    return sent


def exposed(made: World) -> RoomKey:
    key = made.open()
    room = made.rank.rooms.find(7)
    assert room is not None
    assert made.rank.rooms.expose(room, ["tcp://127.0.0.1:9"], {"full": (5, 6)})
    return key


def prealloc_queue(waiting: bool, group: Any = None) -> Any:
    """SGLang's queue of a decode rank with one request whose handshake is over (`waiting` for its input), or is not."""
    request = SimpleNamespace(
        waiting_for_input=waiting,
        kv_receiver=SimpleNamespace(conclude_state=None, poll=lambda: KVPoll.WaitingForInput),
        req=SimpleNamespace(rid="r", time_stats=SimpleNamespace(set_bootstrap_done_time=lambda: None)),
    )
    queue = object.__new__(decode.DecodePreallocQueue)
    queue.__dict__.update(queue=[request], gloo_group=group, pp_size=1)
    return queue


def request_receiver(**parallel: Any) -> Any:
    """SGLang's receiver of requests; `parallel`: `tp_size` and, of more than one rank, their `tp_group`."""
    shape = SimpleNamespace(
        attn_tp_size=1, attn_cp_size=1, enable_dp_attention=False, attn_dp_enabled=False, **parallel
    )
    found = object.__new__(receiver.SchedulerRequestReceiver)
    given = {"ps": shape, "server_args": shape}
    if "tp_group" in parallel:
        given |= {"tp_group": shape.tp_group, "tp_cpu_group": shape.tp_group.cpu_group}
    for name in given.keys() & {*receiver.SchedulerRequestReceiver.__slots__}:
        object.__setattr__(found, name, given[name])
    receiver.get_parallel = receiver.get_exec = lambda: shape
    return found


def transfer_queue(made: World, status: int, written: int = 7) -> Any:
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


def turn(queue: Any) -> None:
    """What a turn of the decode loop does with its transfers."""
    queue.pop_transferred()
    if hasattr(queue, "resolve_deferred_releases"):
        queue.resolve_deferred_releases()


def check_again(made: World) -> None:
    """The check after the load, whose kernels ran here when they were launched and not in the order of streams."""
    (check,) = made.rank.copies._checks
    made.rank.copies._checks[:] = [made.rank.digests.compare(check.noted)]
    made.rank.step()
