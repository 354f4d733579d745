"""Points at which every rank takes part: what the control plane wants enters a rank's step only here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.managers.io_struct import AbortReq

from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.controlplane.tickets.types import Guard
from dsv4ctl.engine_adapters.sglang import rank


def requests(stock: Any, receiver: Any, received: list[Any] | None, *args: Any) -> list[Any]:
    """In a turn of the loop that looks for requests, and SGLang may leave some out. `received` is None but on the rank
    that reads the sockets; the answer is everyone's.
    """
    here = rank.here()
    if here is None:
        return list(stock(receiver, received, *args))
    here.step()
    if received:
        here.take_in()
    if received is not None:
        for number, request in _rooms_of(received):
            here.rooms.requested(number, str(request.rid))
            room = here.rooms.find(number)
            if room is not None and room.opening.fresh:
                # A name space of its own: no cached prefix is found in it. One rank says so for all: on another the
                # room may have ended by now, and ranks that find different prefixes compute different shapes.
                request.extra_key = f"dsv4ctl-{room.key}"
        received = [*received, *(AbortReq(rid=request) for request in here.rooms.take_aborts())]
    agreed: list[Any] = stock(receiver, received, *args)
    if received is None and agreed:
        here.take_in()
    if here.role is Role.SINGLE:
        for number, _ in _rooms_of(agreed):
            here.rooms.forward_begin(number)
    return agreed


def _rooms_of(received: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    for item in received:
        members = item.batch if isinstance(getattr(item, "batch", None), list) else (item,)
        for request in members:
            room = getattr(request, "bootstrap_room", None)
            if room is not None:
                yield int(room), request


def handshake_waiters(stock: Any, prealloc_queue: Any, *args: Any) -> Any:
    """Stock leaves the reduction out while nobody waits for a handshake, unless it knows of a failure itself."""
    here = rank.here()
    queue = prealloc_queue.queue
    if queue and here is not None and here.gate.guarded(Guard.AGREEMENT) and all(r.waiting_for_input for r in queue):
        queue[0].waiting_for_input = False  # the reduction that follows sets it again
    return stock(prealloc_queue, *args)


def any_rank(flags: list[bool], *groups: Any) -> list[bool]:
    """Element by element: whether it is so on any rank. Every rank enters, with lists of one length."""
    values = torch.tensor(flags, dtype=torch.uint8)
    for group in groups:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return [bool(value) for value in values.tolist()]
