"""HiCache copies of one rank as its ledger sees them: from the moment pages are promised to the event that lands them.

A copy reads pages of one side and fills pages of the other: a load host -> device, a backup device -> host. The
ledger is told in host time; the device's own order is made by streams that wait for `events` (the hooks do that).
No call waits for the device, nor for page numbers that are on their way to the host.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch

from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.ledger import LedgerError
from dsv4ctl.controlplane.tickets.ticket import Load, Ticket
from dsv4ctl.controlplane.tickets.types import HOST, Consumer, LoadKind
from dsv4ctl.engine_adapters.sglang.fetched import Fetched
from dsv4ctl.kernels.buffers import Event, Firsts, Reader


class Check(Protocol):
    def ready(self) -> bool: ...

    def differences(self) -> int: ...


class Pages:
    """The pages of one copy, by space: those on the device, and those on the host.

    `sides`: of each space token indices that begin with a page, int64 on the device, and on the host. `reader` begins
    to read those of the device, without stopping the stream that computes them.
    """

    def __init__(
        self, sides: Mapping[str, tuple[torch.Tensor, torch.Tensor]], page_tokens: Mapping[str, int], reader: Reader
    ) -> None:
        self._page_tokens = page_tokens
        #: Device and host, by space.
        self.firsts = {
            space: (
                Firsts(device.to(torch.int64).contiguous(), range(0, len(device), page_tokens[space])),
                list[int](host[:: page_tokens[space]].tolist()),
            )
            for space, (device, host) in sides.items()
        }
        self._fetched = Fetched(*reader.tokens([device for device, _ in self.firsts.values()]))

    def ready(self) -> bool:
        return self._fetched.ready()

    def get(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Page numbers (device, host) by space. Waits for them."""
        fetched = iter(self._fetched.get().tolist())
        return {
            space: (self._numbers(space, islice(fetched, len(device.at))), self._numbers(space, host))
            for space, (device, host) in self.firsts.items()
        }

    def _numbers(self, space: str, firsts: Iterable[int]) -> tuple[int, ...]:
        return tuple(first // self._page_tokens[space] for first in firsts)


@dataclass(eq=False)
class Copy:
    """One copy. `events[i]` fires when layer i is in place; empty: not launched yet. Spaces are device spaces."""

    kind: LoadKind
    pages: Pages
    operation: Any = None  #: SGLang's own record of it
    events: Sequence[Event] = ()
    load: Load | None = None
    ticket: Ticket | None = None
    leased: bool = False

    @property
    def finish(self) -> Event | None:
        return self.events[-1] if self.events else None


class Copies:
    """`pending`, and the loads of it, may be read by any thread without the lock: what is missing there was promised
    after it was read.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._lock = threading.RLock()
        self.pending = self.loads = tuple[Copy, ...]()
        self._checks: list[Check] = []
        self.counters = {"loads": 0, "backups": 0}

    def promised(self, copies: Sequence[Copy]) -> None:
        """Pages that a copy will fill can be found from here on."""
        with self._lock:
            self._keep((*self.pending, *copies))
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
        return [copy for copy in self.loads if not copy.events]

    def waits(self, kind: LoadKind) -> list[Event]:
        """The events after which every launched copy of this kind is in place."""
        return [copy.events[-1] for copy in self.pending if copy.kind is kind and copy.events]

    def settle(self) -> None:
        """Tells the ledger what is known by now. Cheap: a few event queries while copies are pending."""
        if self.pending:
            with self._lock:
                # In order: what an older copy held must be given back before a younger one takes it.
                self._keep(tuple(copy for copy in self.pending if not self._ended(copy)))

    def _keep(self, pending: tuple[Copy, ...]) -> None:
        self.pending = pending
        self.loads = tuple(copy for copy in pending if copy.kind is LoadKind.HICACHE)

    def checked(self) -> int:
        """Page digests that were found to differ after loads, since the last call."""
        wrong = 0
        while self._checks and self._checks[0].ready():
            wrong += self._checks.pop(0).differences()
        return wrong

    def unleased(self) -> list[Copy]:
        """Loads that are promised and not in the ledger yet: a ticket requested now would not join them.

        Backups fill no device page: nobody need wait for them.
        """
        return [copy for copy in self.loads if not copy.leased]

    @property
    def untracked(self) -> bool:
        """A load is pending that the ledger refused: which pages it fills, nobody knows."""
        return any(copy.leased and copy.load is None for copy in self.loads)

    def _ended(self, copy: Copy) -> bool:
        if not copy.leased:
            if not copy.pages.ready():
                return False
            self._lease(copy)
        self._land(copy)
        return self._over(copy)

    def _lease(self, copy: Copy) -> None:
        copy.leased = True
        pages = copy.pages.get()
        device = [self._gate.extent(space, numbers) for space, (numbers, _) in pages.items()]
        host = [self._gate.extent(HOST + space, numbers) for space, (_, numbers) in pages.items()]
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
