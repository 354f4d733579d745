"""Rooms on a prefill rank: what failed gives its source pages back only when its writer is quiet on every rank."""

from __future__ import annotations

import time
from typing import Any

from sglang.srt.disaggregation.base import KVPoll

from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.controlplane.tickets.types import Guard
from dsv4ctl.engine_adapters.sglang import rank
from dsv4ctl.engine_adapters.sglang.hooks.agreement import any_rank


def created(_: Any, sender: Any, *args: Any, **kwargs: Any) -> None:
    here = rank.here()
    sender.dsv4ctl_since = time.monotonic()
    if here is not None and not here.rooms.live(sender.bootstrap_room):
        sender.kv_mgr.record_failure(sender.bootstrap_room, "the room is aborted, or was not opened here")
        sender.kv_mgr.update_status(sender.bootstrap_room, KVPoll.Failed)


def poll(stock: Any, sender: Any) -> Any:
    status = stock(sender)
    here = rank.here()
    if status != KVPoll.Bootstrapping or here is None:
        return status
    waited = time.monotonic() - sender.dsv4ctl_since
    if waited < sender.kv_mgr.bootstrap_timeout:
        return status
    reason = f"no decode rank told where to write within {waited:.0f} s"
    here.rooms.fail(sender.bootstrap_room, reason, AbortSource.DEADLINE)
    sender.kv_mgr.record_failure(sender.bootstrap_room, reason)
    sender.kv_mgr.update_status(sender.bootstrap_room, KVPoll.Failed)
    return KVPoll.Failed


def agree(stock: Any, pollers: Any, cp_group: Any, tp_group: Any) -> list[int]:
    polls: list[int] = stock(pollers, cp_group, tp_group)
    here = rank.here()
    if here is None or KVPoll.Failed not in polls:
        return polls
    holds = [
        status == KVPoll.Failed and _holds(here, getattr(poller, "bootstrap_room", None))
        for status, poller in zip(polls, pollers, strict=True)
    ]
    held = any_rank(holds, tp_group, cp_group)
    return [_waiting(poller) if hold else status for status, hold, poller in zip(polls, held, pollers, strict=True)]


def _waiting(sender: Any) -> int:
    """What stock waits with. Before `init` (a prefill that did not wait for its bootstrap) it knows no transfer."""
    return int(KVPoll.Bootstrapping if sender.aux_index is None else KVPoll.Transferring)


def chunked_abort(stock: Any, scheduler: Any) -> Any:
    here = rank.here()
    request = scheduler._pending_chunked_abort_req
    if here is None or request is None or scheduler.chunked_req is not request:
        return stock(scheduler)
    groups = scheduler.attn_tp_cpu_group, scheduler.attn_cp_cpu_group
    if any_rank([_holds(here, request.bootstrap_room)], *groups)[0]:
        return None  # the next turn looks again
    answer = stock(scheduler)
    if here.role is Role.PREFILL:
        _forget(request)
    return answer


def abort_request(stock: Any, scheduler: Any, order: Any) -> Any:
    """A waiting request that stock drops leaves its room behind in the transfer manager: nobody asks for it again."""
    here = rank.here()
    if here is None or here.role is not Role.PREFILL:
        return stock(scheduler, order)
    before = list(scheduler.waiting_queue)
    answer = stock(scheduler, order)
    kept = {id(request) for request in scheduler.waiting_queue}
    for request in before:
        sender = getattr(request, "disagg_kv_sender", None)
        if id(request) not in kept and sender is not None:
            here.rooms.fail(request.bootstrap_room, "aborted while it waited")
            _forget(request)
    return answer


def _forget(request: Any) -> None:
    """What SGLang's transfer manager remembers of a request that nobody will ask it for again."""
    sender = request.disagg_kv_sender
    sender.clear()
    with sender.kv_mgr.failure_lock:
        sender.kv_mgr.failure_records.pop(request.bootstrap_room, None)


def _holds(here: rank.Rank, room: int | None) -> bool:
    """Aborts a room that failed here or elsewhere; whether a write of it may still be in flight.

    The guard is asked here and not before the reduction: it is turned off on one rank after the other.
    """
    if room is None or not here.gate.guarded(Guard.QUIESCE):
        return False
    here.rooms.fail(room, "the transfer failed")
    return here.rooms.held(room)
