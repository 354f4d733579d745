"""Rooms on a decode rank: pages and metadata slot are given back when every writer is quiet, not before."""

from __future__ import annotations

import math
import time
from typing import Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from dsv4ctl.controlplane.link.url import url
from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.controlplane.tickets.types import Guard
from dsv4ctl.engine_adapters.sglang import rank
from dsv4ctl.engine_adapters.sglang.digests import PageDigests
from dsv4ctl.engine_adapters.sglang.fetched import Fetched
from dsv4ctl.engine_adapters.sglang.geometry import state_pages
from dsv4ctl.engine_adapters.sglang.hooks.agreement import any_rank
from dsv4ctl.engine_adapters.sglang.peers import Digests, with_trailer
from dsv4ctl.engine_adapters.sglang.rooms import Room
from dsv4ctl.policies.integrity import Verdict

#: Digests of what landed take tens of microseconds, beside a running forward somewhat more.
_STAY_SECONDS = 0.0005


def created(_: Any, receiver: Any, *args: Any, **kwargs: Any) -> None:
    here = rank.here()
    if here is not None and not here.rooms.live(receiver.bootstrap_room):
        receiver.kv_mgr.record_failure(receiver.bootstrap_room, "the room is aborted, or was not opened here")
        receiver.kv_mgr.update_status(receiver.bootstrap_room, KVPoll.Failed)


class _Signed:
    """A socket whose frames say which incarnation sends them, and of which generation of the room."""

    def __init__(self, socket: Any, here: rank.Rank) -> None:
        self._socket = socket
        self._here = here

    def send_multipart(self, parts: list[bytes], *args: Any, **kwargs: Any) -> Any:
        room = None if parts[1] == b"None" else int(parts[1])
        return self._socket.send_multipart(with_trailer(parts, self._here.rooms.trailer(room)), *args, **kwargs)


def socket(stock: Any, receiver_class: Any, *args: Any, **kwargs: Any) -> Any:
    plain, lock = stock(receiver_class, *args, **kwargs)
    here = rank.here()
    return (plain if here is None else _Signed(plain, here)), lock


def queues(stock: Any, scheduler: Any) -> Any:
    """Once a turn, behind what all ranks agree on in it, and before it is looked at what arrived."""
    here = rank.here()
    if here is None:
        return stock(scheduler)
    here.attend()
    answer = stock(scheduler)
    here.flush()
    return answer


def expose(
    stock: Any, receiver: Any, kv_indices: Any, slot: Any, state_indices: Any = None, *args: Any, **kwargs: Any
) -> Any:
    here = rank.here()
    if here is None:
        return stock(receiver, kv_indices, slot, state_indices, *args, **kwargs)
    room = here.rooms.find(receiver.bootstrap_room)
    infos = receiver.bootstrap_infos or ()
    endpoints = [url("tcp", info["rank_ip"], info["rank_port"]) for info in infos]
    pages = {
        "full": tuple(kv_indices.tolist()),
        **state_pages(receiver.kv_mgr.kv_args.state_types, state_indices),
    }
    if room is None or not here.rooms.expose(room, endpoints, pages):
        receiver.kv_mgr.record_failure(receiver.bootstrap_room, "the room is aborted, or was not opened here")
        receiver.kv_mgr.update_status(receiver.bootstrap_room, KVPoll.Failed)
        return None
    return stock(receiver, kv_indices, slot, state_indices, *args, **kwargs)


def metadata_gate(stock: Any, polls: list[int], decode_reqs: Any, buffers: Any, *args: Any) -> Any:
    """A verdict of this rank alone: the reduction that follows makes it everyone's."""
    stock(polls, decode_reqs, buffers, *args)
    here = rank.here()
    if here is None:
        return
    arrived = [
        i
        for i, status in enumerate(polls)
        if status == KVPoll.Success and decode_reqs[i].req.bootstrap_host != FAKE_BOOTSTRAP_HOST
    ]
    if arrived:
        _compute(here, [decode_reqs[i].req.bootstrap_room for i in arrived])
    for i in arrived:
        polls[i] = _verdict(here, decode_reqs[i], buffers)


def _compute(here: rank.Rank, numbers: list[int]) -> None:
    """Starts the digests of what landed, and stays for them a moment: the next turn may be a whole forward away."""
    if here.digests is None:
        return
    known = [here.rooms.find(number) for number in numbers if here.integrity.verdict(number) is not Verdict.NONE]
    new = [room for room in known if room is not None and room.found is None]
    if not new:
        return
    founds = here.digests.landed([room.destination for room in new])
    for room, found in zip(new, founds, strict=True):
        room.found = found
    until = time.monotonic() + _STAY_SECONDS
    while not (founds[0].ready() and all(map(_told, new))) and time.monotonic() < until:
        here.attend()


def _told(room: Room) -> bool:
    return len(room.told) >= len(room.opening.peers)


def _verdict(here: rank.Rank, decode_req: Any, buffers: Any) -> int:
    number = decode_req.req.bootstrap_room
    room = here.rooms.find(number)
    written = int(buffers.bootstrap_room[decode_req.metadata_buffer_index, 0].item())
    if written != number:
        here.counters["metadata_mismatches"] += 1
        here.rooms.fail(number, f"the metadata slot holds room {written}", AbortSource.INTEGRITY)
        return int(KVPoll.Failed)
    if room is None or room.dropped:
        return int(KVPoll.Failed)
    if not room.verified:
        # A token of SGLang's can't be held back once it decodes: `emit` has its verdict before the first read, too.
        if here.digests is not None and room.found is not None and not _compared(here, here.digests, room, room.found):
            return int(KVPoll.Transferring if here.rooms.live(number) else KVPoll.Failed)
        here.rooms.landed(room)
    return int(KVPoll.Success)


def _compared(here: rank.Rank, digests: PageDigests, room: Room, landed: Fetched) -> bool:
    """Whether what landed is what was sealed. False too while that is not known yet."""
    if not (_told(room) and landed.ready()):
        return False
    found = landed.get()
    wrong = [difference for told in room.told.values() for difference in _differences(digests, room, found, told)]
    here.counters["digests_compared"] += found.size
    if not wrong:
        return True
    here.counters["digest_mismatches"] += len(wrong)
    here.rooms.note(room, digest_mismatches=sorted({pool for pool, _, _ in wrong}))
    if not here.gate.guarded(Guard.VERDICT):
        return True
    pool, layer, page = wrong[0]
    reason = f"{len(wrong)} page digests differ from what was sealed, the first in {pool} layer {layer} page {page}"
    here.rooms.fail(room.key.room, reason, AbortSource.INTEGRITY)
    return False


def _differences(digests: PageDigests, room: Room, found: Any, told: Digests) -> list[tuple[str, int, int]]:
    """(pool, layer, logical page). A writer that sent more or less of a space than was awaited: of that space."""
    here = {space: len(pages) for space, pages in room.destination.items()}
    if told.pages == here and told.values == found.tobytes():  # nearly always, and the rest takes longer
        return []
    sealed = told.flat()
    other = [space for space in here | told.pages if here.get(space, 0) != told.pages.get(space, 0)]
    if other or sealed.size != found.size:
        return [(space, -1, told.pages.get(space, 0)) for space in other or ["size"]]
    return digests.mismatches(found, sealed, here)


def hold(stock: Any, transfer_queue: Any) -> list[int]:
    polls: list[int] = stock(transfer_queue)
    here = rank.here()
    if here is None or KVPoll.Failed not in polls:
        return polls
    holds = [
        status == KVPoll.Failed and _holds(here, decode_req.req)
        for status, decode_req in zip(polls, transfer_queue.queue, strict=True)
    ]
    held = any_rank(holds, transfer_queue.gloo_group)
    for status, stays, decode_req in zip(polls, held, transfer_queue.queue, strict=True):
        if status == KVPoll.Failed and not stays:  # what stock keeps of a room that did not arrive
            statuses = getattr(decode_req.kv_receiver.kv_mgr, "transfer_statuses", {})
            statuses.pop(decode_req.req.bootstrap_room, None)
    return [KVPoll.Transferring if stays else status for status, stays in zip(polls, held, strict=True)]


def _holds(here: rank.Rank, request: Any) -> bool:
    """Asks the guard after every rank has entered the reduction: it is turned off on one rank after the other."""
    if request.bootstrap_host == FAKE_BOOTSTRAP_HOST or not here.gate.guarded(Guard.QUIESCE):
        return False
    here.rooms.fail(request.bootstrap_room, "the transfer failed")
    return here.rooms.held(request.bootstrap_room)


def defer(stock: Any, transfer_queue: Any, decode_req: Any) -> Any:
    """SGLang moved a failed room to its deferred releases, which a time-out would end."""
    answer = stock(transfer_queue, decode_req)
    here = rank.here()
    if here is not None and _holds(here, decode_req.req):
        request, began, _, slot, acks = transfer_queue._deferred_releases[-1]
        transfer_queue._deferred_releases[-1] = (request, began, math.inf, slot, acks)
    return answer


def release_safe(stock: Any, manager: Any, room: int, required_acks: int) -> bool:
    here = rank.here()
    if here is None or not here.gate.guarded(Guard.QUIESCE):
        return bool(stock(manager, room, required_acks))
    return not here.rooms.held(room)


def abort_ack(stock: Any, manager: Any, room: int, prefill_rank: int, generation: int) -> Any:
    answer = stock(manager, room, prefill_rank, generation)
    here = rank.here()
    state = manager._deferred_abort_ack_tracker.get(room)
    if here is not None and state is not None and state.generation == generation:
        here.rooms.acknowledged(room, prefill_rank)
    return answer


def commit(stock: Any, transfer_queue: Any, decode_req: Any) -> Any:
    answer = stock(transfer_queue, decode_req)
    here = rank.here()
    if here is not None and not isinstance(decode_req.req.finished_reason, FINISH_ABORT):
        here.rooms.forward_begin(decode_req.req.bootstrap_room)
    return answer


def released(stock: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    answer = stock(request, *args, **kwargs)
    here = rank.here()
    if here is not None:
        here.rooms.left(getattr(request, "bootstrap_room", None), bool(request.finished()))
    return answer
