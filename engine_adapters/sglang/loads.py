"""HiCache copies of one rank as its ledger sees them: from the moment pages are promised to the event that lands them.

A copy reads pages of one side and fills pages of the other: a load host -> device, a backup device -> host. The
ledger is told in host time; the device's own order is made by streams that wait for `events` (the hooks do that).
No call waits for the device, nor for page numbers that are on their way to the host.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.ledger import LedgerError
from dsv4ctl.controlplane.tickets.ticket import Load, Ticket
from dsv4ctl.controlplane.tickets.types import HOST, Consumer, LoadKind


class Event(Protocol):
    """A device event, or what stands for one."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Check(Protocol):
    def ready(self) -> bool: ...

    def get(self) -> Any:
        """[differences]"""


class PageNumbers:
    """Page numbers of token indices, read without stopping the stream that computes them."""

    def __init__(self, indices: torch.Tensor, page_tokens: int) -> None:
        pages = indices[::page_tokens] // page_tokens
        self._event: Event | None = None
        if pages.device.type == "cuda":
            host = torch.empty(pages.shape, dtype=pages.dtype, pin_memory=True)
            host.copy_(pages, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
            pages = host
        self._pages = pages

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def get(self) -> tuple[int, ...]:
        if self._event is not None:
            self._event.synchronize()
        return tuple(self._pages.tolist())


@dataclass(eq=False)
class Copy:
    """One copy. `events[i]` fires when layer i is in place; empty: not launched yet. Spaces are device spaces."""

    kind: LoadKind
    device: Mapping[str, PageNumbers]
    host: Mapping[str, PageNumbers]
    operation: Any = None  #: SGLang's own record of it
    events: Sequence[Event] = ()
    load: Load | None = None
    ticket: Ticket | None = None
    leased: bool = False

    @property
    def finish(self) -> Event | None:
        return self.events[-1] if self.events else None

    @property
    def known(self) -> bool:
        return all(pages.ready() for pages in (*self.device.values(), *self.host.values()))


class Copies:
    """`pending` may be read by any thread without the lock: what it misses was promised after it was read."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._lock = threading.RLock()
        self.pending: tuple[Copy, ...] = ()
        self._checks: list[Check] = []
        self.counters = {"loads": 0, "backups": 0}

    def promised(self, copies: Sequence[Copy]) -> None:
        """Pages that a copy will fill can be found from here on."""
        with self._lock:
            self.pending += tuple(copies)
            for copy in copies:
                self.counters["loads" if copy.kind is LoadKind.HICACHE else "backups"] += 1

    def launched(self, copies: Sequence[Copy], events: Sequence[Event], check: Check | None = None) -> None:
        """`check`: how many page digests of all these copies differ, known once they are in place."""
        with self._lock:
            for copy in copies:
                copy.events = tuple(events)
            if check is not None:
                self._checks.append(check)

    def unlaunched(self) -> list[Copy]:
        """Loads that were promised and are not on the device yet."""
        return [copy for copy in self.pending if not copy.events and copy.kind is LoadKind.HICACHE]

    def waits(self, kind: LoadKind) -> list[Event]:
        """The events after which every launched copy of this kind is in place."""
        return [copy.events[-1] for copy in self.pending if copy.kind is kind and copy.events]

    def settle(self) -> None:
        """Tells the ledger what is known by now. Cheap: a few event queries while copies are pending."""
        if self.pending:
            with self._lock:
                # In order: what an older copy held must be given back before a younger one takes it.
                self.pending = tuple(copy for copy in self.pending if not self._ended(copy))

    def checked(self) -> int:
        """Page digests that were found to differ after loads, since the last call."""
        wrong = 0
        while self._checks and self._checks[0].ready():
            wrong += int(self._checks.pop(0).get()[0])
        return wrong

    def unleased(self) -> list[Copy]:
        """Loads that are promised and not in the ledger yet: a ticket requested now would not join them.

        Backups fill no device page: nobody need wait for them.
        """
        return [copy for copy in self.pending if copy.kind is LoadKind.HICACHE and not copy.leased]

    @property
    def untracked(self) -> bool:
        """A load is pending that the ledger refused: which pages it fills, nobody knows."""
        return any(copy.kind is LoadKind.HICACHE and copy.leased and copy.load is None for copy in self.pending)

    def _ended(self, copy: Copy) -> bool:
        if not copy.leased:
            if not copy.known:
                return False
            self._lease(copy)
        self._land(copy)
        return self._over(copy)

    def _lease(self, copy: Copy) -> None:
        copy.leased = True
        device = [self._gate.extent(space, pages.get()) for space, pages in copy.device.items()]
        host = [self._gate.extent(HOST + space, pages.get()) for space, pages in copy.host.items()]
        loads = copy.kind is LoadKind.HICACHE
        reads, fills = (host, device) if loads else (device, host)
        consumer = Consumer.LOAD if loads else Consumer.BACKUP
        try:
            copy.ticket = self._gate.request(consumer, reads)
            copy.load = self._gate.open_load(copy.kind, fills)
        except LedgerError:  # counted by the ledger as `refused`
            return

    def _land(self, copy: Copy) -> None:
        if copy.load is None:
            return
        landed = copy.load.landed
        each = len(copy.events) == self._gate.layers
        while copy.events and landed < self._gate.layers and copy.events[landed if each else -1].query():
            landed = landed + 1 if each else self._gate.layers
        if landed > copy.load.landed:
            self._gate.layer_landed(copy.load, landed)

    def _over(self, copy: Copy) -> bool:
        if copy.finish is None or not copy.finish.query():
            return False
        if copy.load is not None:
            self._gate.layer_landed(copy.load, self._gate.layers)
            self._gate.end_load(copy.load)
        if copy.ticket is not None:
            self._gate.leave(copy.ticket)
        return True
