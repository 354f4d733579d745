"""The sender of a prefill rank: nothing is handed to NIXL but under a granted ticket of the pages it reads."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

from dsv4ctl.controlplane.rooms.writer import Writer
from dsv4ctl.controlplane.tickets.ledger import LedgerError
from dsv4ctl.controlplane.tickets.ticket import Ticket
from dsv4ctl.controlplane.tickets.types import Consumer, Guard
from dsv4ctl.engine_adapters.sglang import rank
from dsv4ctl.engine_adapters.sglang.geometry import state_pages
from dsv4ctl.engine_adapters.sglang.loads import Copy
from dsv4ctl.engine_adapters.sglang.rooms import Room

#: A load that has not landed by then has failed.
_LANDING_SECONDS = 30.0
#: Between two looks at what is waited for: a load takes milliseconds, and a look takes the scheduler's interpreter.
_LOOK_SECONDS = 0.001


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
class _Held:
    """A chunk that is not posted yet. Its ticket is requested once every load promised before is in the ledger."""

    chunk: Any
    room: Room
    unleased: list[Copy]
    deadline: float
    ticket: Ticket | None = None
    counted: bool = False


class _Lost(Exception):
    """The chunk is never posted."""


class Chunks:
    """What one transfer worker takes its chunks from: each only once its pages may be read, and its room lives.

    The worker asks for the next chunk when all writes of the one before have ended, well or not. A chunk that waits
    keeps those of its own room waiting, and no other's.
    """

    def __init__(self, queue: Any, manager: Any, here: rank.Rank) -> None:
        self._queue = queue
        self._put, queue.put = queue.put, self.put
        self._manager = manager
        self._here = here
        self._held: list[_Held] = []
        self._last: _Held | None = None
        self._puts = self._gets = 0  #: each counted by one thread

    def put(self, chunk: Any) -> None:
        """On the scheduler's thread."""
        self.queued(chunk)
        self._put(chunk)
        self._puts += 1

    def queued(self, chunk: Any) -> None:
        """SGLang queues a chunk now: it is of the generation that lives."""
        room = self._here.rooms.find(chunk.room)
        chunk.dsv4ctl_key = None if room is None else room.key
        if room is not None:
            pages = self._pages(chunk)
            self._here.rooms.queued(room, pages, self._here.pools.bytes_of(pages))
            if chunk.is_last_chunk and self._here.digests is not None:
                room.sealed = self._here.digests.sealed(room.source)
                self._here.rooms.tell_digests(room)

    def _pages(self, chunk: Any) -> dict[str, tuple[int, ...]]:
        """What is read for this chunk, by space."""
        states = state_pages(self._manager.kv_args.state_types, chunk.state_indices)
        return {"full": tuple(map(int, chunk.prefill_kv_indices)), **states}

    def get(self) -> Any:
        if self._last is not None:
            self._ended(self._last)
            self._last = None
        while self._last is None:
            while not self._held or self._puts > self._gets:  # blocks only while nothing is held
                self._hold(self._queue.get())
            self._last = self._first_granted()
            if self._last is None and self._held:
                time.sleep(_LOOK_SECONDS)
        return self._last.chunk

    def _hold(self, chunk: Any) -> None:
        self._gets += 1
        room = self._here.rooms.find(chunk.room)
        if room is not None and room.key != chunk.dsv4ctl_key:
            return  # of a room that ended while the chunk was queued; its number lives again
        if room is None or room.dropped:
            self._manager.update_status(chunk.room, KVPoll.Failed)
            return
        deadline = time.monotonic() + _LANDING_SECONDS
        self._held.append(_Held(chunk, room, self._here.copies.unleased(), deadline))

    def _first_granted(self) -> _Held | None:
        """The first held chunk that may be posted, and is from here on."""
        self._here.copies.settle()
        waiting: set[int] = set()
        for held in list(self._held):
            if held.chunk.room in waiting:
                continue
            try:
                granted = self._granted(held)
            except _Lost:
                self._held.remove(held)
                self._lose(held)
                continue
            if granted:
                self._held.remove(held)
                if self._post(held):
                    return held
            else:
                waiting.add(held.chunk.room)
        return None

    def _lose(self, held: _Held) -> None:
        if held.ticket is not None:
            self._here.gate.leave(held.ticket)
        if self._here.rooms.find(held.chunk.room) is held.room:  # and not the next one of this number
            self._here.rooms.fail(held.chunk.room, "pages to send did not land")

    def _post(self, held: _Held) -> bool:
        assert held.ticket is not None
        if not self._here.rooms.apply(held.room, Writer.post):
            self._here.gate.leave(held.ticket)
            return False
        try:
            self._here.gate.post(held.ticket)
        except LedgerError:  # aborted since the room allowed it: nothing is written
            self._here.gate.leave(held.ticket)
            self._here.rooms.apply(held.room, lambda half: half.written(True))
            return False
        if held.chunk.is_last_chunk:
            self._here.rooms.apply(held.room, Writer.sent_all)
        return True

    def _granted(self, held: _Held) -> bool:
        """Whether the chunk's pages may be read now. Raises _Lost if they never will."""
        gate = self._here.gate
        guarded = gate.guarded(Guard.SENDER)
        if held.room.dropped:
            raise _Lost
        if held.ticket is None and not (guarded and any(not copy.leased for copy in held.unleased)):
            held.ticket = self._request(held)
        ticket = held.ticket
        if ticket is not None and (not guarded or self._may_read(held.room, ticket)):
            return True
        if not held.counted:
            held.counted = True
            self._here.counters["early_sends_held"] += 1
        never = ticket is not None and not ticket.loads and ticket.readable < gate.layers
        if never or time.monotonic() > held.deadline:
            raise _Lost
        return False

    def _request(self, held: _Held) -> Ticket:
        gate = self._here.gate
        pages = self._pages(held.chunk)
        try:
            extents = [gate.extent(space, numbers) for space, numbers in pages.items() if space != "state"]
            return gate.request(Consumer.SENDER, extents, room=held.room.key)
        except LedgerError as error:
            raise _Lost from error

    def _may_read(self, room: Room, ticket: Ticket) -> bool:
        """Its loads have landed, and so have the forwards that SGLang says may still write these pages."""
        written = all(event.query() for event in tuple(room.waits))
        return written and ticket.readable == self._here.gate.layers and not self._here.copies.untracked

    def _ended(self, posted: _Held) -> None:
        """The writes of a chunk ended. After an error nobody knows how: the room is poisoned."""
        assert posted.ticket is not None
        self._here.gate.complete(posted.ticket)
        self._here.gate.leave(posted.ticket)
        self._here.rooms.apply(posted.room, lambda half: half.written(not self._poisoned(posted.chunk.room)))

    def _poisoned(self, room: int) -> bool:
        """A release that waits for every write even after an error says of which it does not know how they ended."""
        unsettled = getattr(self._manager, "_deferred_ack_poisoned_rooms", None)
        return room in (self._manager.exceptions if unsettled is None else unsettled)
