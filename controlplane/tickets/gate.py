"""The ledger as the threads of one rank use it: locked, traced, and with waiting (stream-ordered front).

Only the standard library is needed here: this runs inside the engine's own process.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dsv4ctl.controlplane.tickets.ledger import Ledger, LedgerError, Load, Ticket
from dsv4ctl.controlplane.tickets.types import Consumer, Extent, Guard, LoadKind, SpaceSpec, TicketState
from dsv4ctl.controlplane.trace.ring import Ring


class TicketRevokedError(Exception):
    """The ticket's room was aborted, or its bytes will not arrive."""


class TicketTimeoutError(Exception):
    """The bytes did not land by the deadline."""


class Gate:
    """One ledger behind one lock. `wait` blocks a thread; `hold.hold` is the awaitable way in.

    `off` are the guards switched off: their consumers still take tickets, but do not wait for the grant, so that
    the trace shows which read came too early.
    """

    def __init__(self, spaces: Mapping[str, SpaceSpec], layers: int, trace: Ring) -> None:
        self._ledger = Ledger(spaces, layers)
        self._changed = threading.Condition()
        self.trace = trace
        self._consumers: dict[Consumer, str] = {}
        self._off: frozenset[Guard] = frozenset()
        self._open_consumers: frozenset[Consumer] = frozenset()
        self.layers = layers
        self.violations: Counter[str] = Counter()  #: edges violated, e.g. "indexer read index_k before hicache landed"

    # ---- registry and guards -------------------------------------------------------------------------

    def register(self, consumer: Consumer, where: str) -> None:
        """Names a consumer of this rank, and where in the engine it reads."""
        self._consumers[consumer] = where

    @property
    def consumers(self) -> Mapping[Consumer, str]:
        return self._consumers

    def set_guards_off(self, off: Iterable[Guard]) -> None:
        with self._changed:
            self._off = frozenset(off)
            self._open_consumers = frozenset(c for c in (guard.consumer for guard in self._off) if c)
            self._changed.notify_all()

    def guarded(self, guard: Guard) -> bool:
        return guard not in self._off

    # ---- pages ---------------------------------------------------------------------------------------

    def allocate(self, wants: Mapping[str, int]) -> dict[str, tuple[int, ...]] | None:
        with self._changed:
            return self._ledger.allocate(wants)

    def extent(self, space: str, pages: Iterable[int], pools: Iterable[str] | None = None) -> Extent:
        with self._changed:
            return self._ledger.extent(space, pages, pools)

    def free(self, space: str, pages: Iterable[int]) -> int:
        """See `Ledger.free`: reusable only once every reader and writer is done."""
        with self._changed:
            pages = tuple(pages)
            self.trace.record("free", None, "", (space, pages))
            return self._ledger.free(space, pages)

    def available(self, space: str) -> int:
        with self._changed:
            return self._ledger.available(space)

    # ---- writers -------------------------------------------------------------------------------------

    def open_load(
        self, kind: LoadKind, extents: Sequence[Extent], *, room: Any = None, verify: bool = False
    ) -> Load:
        with self._changed:
            load = self._ledger.open_load(kind, extents, room=room, verify=verify)
            self.trace.record("lease", room, kind.value, load.extents)
            return load

    def layer_landed(self, load: Load, layers: int) -> None:
        with self._changed:
            self.trace.record("landed", load.room, load.kind.value, load.extents, str(layers))
            self._wake(self._ledger.layer_landed(load, layers))

    def layer_verified(self, load: Load, layers: int) -> None:
        with self._changed:
            self.trace.record("verified", load.room, load.kind.value, load.extents, str(layers))
            self._wake(self._ledger.layer_verified(load, layers))

    def seal(self, load: Load, space: str, pages: Sequence[int]) -> None:
        with self._changed:
            self.trace.record("seal", load.room, load.kind.value, (space, tuple(pages)))
            self._ledger.seal(load, space, pages)

    def fail_load(self, load: Load, why: str) -> None:
        with self._changed:
            self.trace.record("failed", load.room, load.kind.value, load.extents, why)
            self._wake(self._ledger.fail_load(load))

    def end_load(self, load: Load) -> None:
        with self._changed:
            self.trace.record("ended", load.room, load.kind.value, load.extents)
            self._wake(self._ledger.end_load(load))

    def quarantine(self, load: Load) -> None:
        with self._changed:
            self.trace.record("quarantine", load.room, load.kind.value, load.extents)
            self._ledger.quarantine(load)

    # ---- readers -------------------------------------------------------------------------------------

    def request(self, consumer: Consumer, extents: Sequence[Extent], *, room: Any = None) -> Ticket:
        """A ticket, granted or pending. Raises LedgerError for a consumer that is not registered."""
        with self._changed:
            if consumer not in self._consumers:
                self.trace.record("unregistered", room, consumer.value, tuple(extents))
                self.violations[f"{consumer.value} reads without being registered"] += 1
                raise LedgerError(f"consumer {consumer.value} is not registered on this rank")
            ticket = self._ledger.request(consumer, extents, room=room)
            self.trace.record("request", room, consumer.value, ticket.extents, str(ticket.readable))
            return ticket

    def extend(self, ticket: Ticket, extents: Sequence[Extent]) -> None:
        with self._changed:
            self._ledger.extend(ticket, extents)

    def trim(self, ticket: Ticket, space: str, pages: Iterable[int]) -> None:
        with self._changed:
            self._ledger.trim(ticket, space, pages)

    def release(self, ticket: Ticket) -> None:
        with self._changed:
            self.trace.record("release", ticket.room, ticket.consumer.value, ticket.extents)
            self._ledger.release(ticket)

    def post(self, ticket: Ticket) -> None:
        """A read is handed to a DMA. With the consumer's guard off it may be posted before it is granted."""
        with self._changed:
            granted = ticket.state is TicketState.GRANTED and ticket.readable == self.layers
            self._record_read(ticket, "*", self.layers - 1)
            if granted or ticket.consumer not in self._open_consumers:
                self._ledger.post(ticket)
            else:
                ticket.posted += 1

    def complete(self, ticket: Ticket) -> None:
        with self._changed:
            self._ledger.complete(ticket)

    def read(self, ticket: Ticket, pool: str, layer: int, deadline: float | None = None) -> None:
        """Called right before bytes of `layer` are read: returns once the grant covers it.

        `deadline` is seconds from now, None: no limit of its own (the load's producer has one). Raises
        TicketRevokedError, TicketTimeoutError. With the guard off it only records what the read violated.
        """
        with self._changed:
            if ticket.consumer not in self._open_consumers:
                self._wait(ticket, layer + 1, deadline)
            self._record_read(ticket, pool, layer)

    def revoke(self, room: Any) -> None:
        with self._changed:
            self.trace.record("revoke", room, "")
            self._wake(self._ledger.revoke(room))

    # ---- reports -------------------------------------------------------------------------------------

    def counts(self) -> dict[str, dict[str, int]]:
        with self._changed:
            return self._ledger.counts()

    def totals(self) -> dict[str, int]:
        """Live tickets by state, open loads, refused calls, violations."""
        with self._changed:
            live = self._ledger.live()
            return {
                "tickets": self._ledger.tickets,
                "pending": sum(ticket.state is TicketState.PENDING for ticket in live),
                "revoking": sum(ticket.state is TicketState.REVOKING for ticket in live),
                "loads": len(self._ledger.loads),
                "refused": self._ledger.refused,
                "violations": sum(self.violations.values()),
            }

    def live(self) -> list[dict[str, Any]]:
        """Every live ticket of a room or a load, as plain data."""
        with self._changed:
            return [
                {
                    "consumer": ticket.consumer.value,
                    "room": None if ticket.room is None else str(ticket.room),
                    "state": ticket.state.value,
                    "readable": ticket.readable,
                    "layers": self.layers,
                    "posted": ticket.posted,
                    "pages": {e.space: list(e.pages) for e in ticket.extents},
                }
                for ticket in self._ledger.live()
            ]

    def set_waker(self, ticket: Ticket, waker: Callable[[], None] | None) -> None:
        """`waker` is called, under the lock and from any thread, whenever the ticket changes. It must not block."""
        with self._changed:
            ticket.waker = waker

    # ---- inside --------------------------------------------------------------------------------------

    def _wait(self, ticket: Ticket, layers: int, deadline: float | None) -> None:
        def settled() -> bool:
            return (
                ticket.readable >= layers
                or ticket.state not in (TicketState.PENDING, TicketState.GRANTED)
                or ticket.consumer in self._open_consumers
            )

        if not self._changed.wait_for(settled, deadline):
            raise TicketTimeoutError(f"{ticket.consumer.value}: layer {layers - 1} did not land in {deadline:g} s")
        if ticket.readable < layers and ticket.consumer not in self._open_consumers:
            raise TicketRevokedError(f"{ticket.consumer.value} ticket of room {ticket.room} is {ticket.state.value}")

    def _record_read(self, ticket: Ticket, pool: str, layer: int) -> None:
        early = ticket.readable <= layer
        self.trace.record("read", ticket.room, ticket.consumer.value, (pool, layer), "early" if early else "")
        if early:
            kinds = "/".join(sorted({load.kind.value for load in ticket.loads or ()})) or "its load"
            self.violations[f"{ticket.consumer.value} read {pool} before {kinds} landed"] += 1

    def _wake(self, changed: list[Ticket]) -> None:
        if changed:
            for ticket in changed:
                if ticket.waker is not None:
                    ticket.waker()
            self._changed.notify_all()
