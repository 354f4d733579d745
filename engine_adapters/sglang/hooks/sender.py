"""The sender of a prefill rank: nothing is handed to NIXL but under a granted ticket of the pages it reads."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

from dsv4ctl.controlplane.rooms.writer import Writer
from dsv4ctl.controlplane.tickets.ledger import LedgerError, Ticket
from dsv4ctl.controlplane.tickets.types import Consumer, Guard
from dsv4ctl.engine_adapters.sglang import rank
from dsv4ctl.engine_adapters.sglang.geometry import state_pages
from dsv4ctl.engine_adapters.sglang.rooms import Room

#: A load that has not landed by then has failed.
_LANDING_SECONDS = 30.0
#: Between two looks at a load's event: a load takes milliseconds.
_LOOK_SECONDS = 0.0002


def send_kv_chunk(stock: Any, scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    here = rank.here()
    if here is None or request.bootstrap_host == FAKE_BOOTSTRAP_HOST:
        return stock(scheduler, request, *args, **kwargs)
    room = request.bootstrap_room
    if not here.rooms.live(room):
        manager = scheduler.disagg_prefill_bootstrap_queue.kv_manager
        manager.record_failure(room, "the room is aborted, or was not opened here")
        manager.update_status(room, KVPoll.Failed)
        return None
    running = getattr(request.disagg_kv_sender, "_early_send_wait_event", None)
    found = here.rooms.find(room)
    if running is not None and found is not None:
        found.waits.append(running)
    return stock(scheduler, request, *args, **kwargs)


def transfer_worker(stock: Any, manager: Any, queue: Any, *args: Any, **kwargs: Any) -> Any:
    here = rank.here()
    if here is None:
        raise RuntimeError("a transfer worker runs before its scheduler was attached")
    try:
        return stock(manager, Chunks(queue, manager, here), *args, **kwargs)
    except Exception:  # stock lives through what a chunk raises, not through what its queue does
        here.died("transfer", traceback.format_exc())
        raise


@dataclass(eq=False)
class _Posted:
    chunk: Any
    room: Room
    ticket: Ticket


class Chunks:
    """What one transfer worker takes its chunks from: each only once its pages may be read, and its room lives.

    The worker asks for the next chunk when all writes of the one before have ended, well or not.
    """

    def __init__(self, queue: Any, manager: Any, here: rank.Rank) -> None:
        self._queue = queue
        self._put, queue.put = queue.put, self.put
        self._manager = manager
        self._here = here
        self._last: _Posted | None = None

    def put(self, chunk: Any) -> None:
        """On the scheduler's thread. A chunk is of the generation that lives when SGLang queues it."""
        room = self._here.rooms.find(chunk.room)
        chunk.dsv4ctl_key = None if room is None else room.key
        if room is not None:
            pages = self._pages(chunk)
            self._here.rooms.queued(room, pages, self._here.pools.bytes_of(pages))
            if chunk.is_last_chunk and self._here.digests is not None:
                room.sealed = self._here.digests.sealed(room.source)
        self._put(chunk)

    def _pages(self, chunk: Any) -> dict[str, tuple[int, ...]]:
        """What is read for this chunk, by space."""
        states = state_pages(self._manager.kv_args.state_types, chunk.state_indices)
        return {"full": tuple(map(int, chunk.prefill_kv_indices)), **states}

    def get(self) -> Any:
        if self._last is not None:
            self._ended(self._last)
            self._last = None
        while self._last is None:
            self._last = self._begin(self._queue.get())
        return self._last.chunk

    def _begin(self, chunk: Any) -> _Posted | None:
        room = self._here.rooms.find(chunk.room)
        if room is not None and room.key != chunk.dsv4ctl_key:
            return None  # of a room that ended while the chunk was queued; its number lives again
        if room is None or room.dropped:
            self._manager.update_status(chunk.room, KVPoll.Failed)
            return None
        ticket = self._granted(room, chunk)
        if ticket is None:
            self._here.rooms.fail(chunk.room, "pages to send did not land")
            return None
        gate = self._here.gate
        if not self._here.rooms.apply(room, Writer.post):
            gate.leave(ticket)
            return None
        gate.post(ticket)
        if chunk.is_last_chunk:
            self._here.rooms.apply(room, Writer.sent_all)
            self._here.rooms.tell_digests(room)
        return _Posted(chunk, room, ticket)

    def _granted(self, room: Room, chunk: Any) -> Ticket | None:
        """A ticket of the chunk's pages, once they may be read; None if that does not happen."""
        copies, gate = self._here.copies, self._here.gate
        copies.lease_loads()
        try:
            extents = [gate.extent(space, pages) for space, pages in self._pages(chunk).items() if space != "state"]
            ticket = gate.request(Consumer.SENDER, extents, room=room.key)
        except LedgerError:
            return None
        if not gate.guarded(Guard.SENDER) or self._may_read(room, ticket):
            return ticket
        self._here.counters["early_sends_held"] += 1
        deadline = time.monotonic() + _LANDING_SECONDS
        while not self._may_read(room, ticket):
            copies.settle()
            if (not ticket.loads and ticket.readable < gate.layers) or room.dropped or time.monotonic() > deadline:
                gate.leave(ticket)
                return None
            time.sleep(_LOOK_SECONDS)
        return ticket

    def _may_read(self, room: Room, ticket: Ticket) -> bool:
        """Its loads have landed, and so have the forwards that SGLang says may still write these pages."""
        written = all(event.query() for event in tuple(room.waits))
        return written and ticket.readable == self._here.gate.layers and not self._here.copies.untracked

    def _ended(self, posted: _Posted) -> None:
        """The writes of a chunk ended. After an error nobody knows how: the room is poisoned."""
        self._here.gate.complete(posted.ticket)
        self._here.gate.leave(posted.ticket)
        self._here.rooms.apply(posted.room, lambda half: half.written(not self._poisoned(posted.chunk.room)))

    def _poisoned(self, room: int) -> bool:
        """A release that waits for every write even after an error says of which it does not know how they ended."""
        unsettled = getattr(self._manager, "_deferred_ack_poisoned_rooms", None)
        return room in (self._manager.exceptions if unsettled is None else unsettled)
