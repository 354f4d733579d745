"""The ledger as the threads of one rank use it: locked, traced, and with waiting (stream-ordered front).

Only the standard library and msgspec are needed here: this runs inside the engine's own process.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dsv4ctl.controlplane.tickets.ledger import Ledger, LedgerError
from dsv4ctl.controlplane.tickets.ticket import Load, Ticket
from dsv4ctl.controlplane.tickets.types import Consumer, Extent, Guard, LoadKind, SpaceSpec, TicketState
from dsv4ctl.controlplane.trace.ring import Ring

#: Of a ticket that holds nothing any more.
ENDED = (TicketState.RELEASED, TicketState.REVOKED)
#: Whoever copies between device and host.
COPIERS = frozenset({Consumer.BACKUP, Consumer.LOAD})


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
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self.trace = trace
        self._consumers: dict[Consumer, str] = {}
        self._off: frozenset[Guard] = frozenset()
        self._open_consumers: frozenset[Consumer] = frozenset()
        self._copies_held = True
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
        with self._lock:
            self._off = frozenset(off)
            self._open_consumers = frozenset(c for c in (guard.consumer for guard in self._off) if c)
            self._copies_held = Guard.HOLD not in self._off
            self._changed.notify_all()

    def guarded(self, *guards: Guard) -> bool:
        """None of them is off."""
        return self._off.isdisjoint(guards)

    # ---- pages ---------------------------------------------------------------------------------------
    # What the ledger refuses is no event: a call is traced once it succeeded.

    def allocate(self, wants: Mapping[str, int]) -> dict[str, tuple[int, ...]] | None:
        with self._lock:
            taken = self._ledger.allocate(wants)
            if taken is not None:
                self.trace.record("allocate", None, "", tuple(taken.items()))
            return taken

    def extent(self, space: str, pages: Iterable[int], pools: Iterable[str] | None = None) -> Extent:
        with self._lock:
            return self._ledger.extent(space, pages, pools)

    def free(self, space: str, pages: Iterable[int], *, guarded: bool = True) -> int:
        """See `Ledger.free`: reusable only once every reader and writer is done."""
        with self._lock:
            pages = tuple(pages)
            if not guarded and (loading := self._ledger.loading(space, pages)):
                self.violations["pages given away under a load"] += loading
            reusable = self._ledger.free(space, pages, guarded=guarded)
            self.trace.record("free", None, "", ((space, pages),), reusable)
            return reusable

    def spaces(self) -> tuple[str, ...]:
        return self._ledger.spaces()

    def room_in(self, space: str) -> tuple[int, int]:
        """Pages that are free, and pages that were freed but are still touched by somebody."""
        with self._lock:
            return self._ledger.available(space), self._ledger.retiring(space)

    # ---- writers -------------------------------------------------------------------------------------

    def open_load(self, kind: LoadKind, extents: Sequence[Extent], *, room: Any = None, verify: bool = False) -> Load:
        with self._lock:
            load = self._ledger.open_load(kind, extents, room=room, verify=verify)
            self._record("lease", load, load.verify)
            return load

    def layer_landed(self, load: Load, layers: int) -> None:
        with self._lock:
            changed = self._ledger.layer_landed(load, layers)
            self._record("landed", load, layers)
            self._wake(changed)

    def layer_verified(self, load: Load, layers: int) -> None:
        with self._lock:
            changed = self._ledger.layer_verified(load, layers)
            self._record("verified", load, layers)
            self._wake(changed)

    def seal(self, load: Load, space: str, pages: Sequence[int]) -> None:
        with self._lock:
            self._ledger.seal(load, space, pages)
            self.trace.record_of("seal", load, ((space, tuple(pages)),))

    def fail_load(self, load: Load, why: str) -> None:
        with self._lock:
            changed = self._ledger.fail_load(load)
            self._record("failed", load, why)
            self._wake(changed)

    def end_load(self, load: Load) -> None:
        with self._lock:
            changed = self._ledger.end_load(load)
            self._record("ended", load)
            self._wake(changed)

    def quarantine(self, load: Load) -> None:
        with self._lock:
            changed = self._ledger.quarantine(load)
            self._record("quarantine", load)
            self._wake(changed)

    # ---- readers -------------------------------------------------------------------------------------
    # `request`, `release` and `read` are nearly all that a rank asks, and `with` takes CPython 3.11 twice as long as
    # acquiring and releasing the lock by name. A function that an attribute holds is called the slow way, unless it is
    # first made a local name.

    def request(self, consumer: Consumer, extents: Sequence[Extent], *, room: Any = None) -> Ticket:
        """A ticket, granted or pending. Raises LedgerError for a consumer that is not registered."""
        self._lock.acquire()
        try:
            if consumer not in self._consumers:
                self.trace.record("unregistered", room, consumer, tuple(extents))
                self.violations[f"{consumer.value} reads without being registered"] += 1
                raise LedgerError(f"consumer {consumer.value} is not registered on this rank")
            ticket = self._ledger.request(consumer, extents, room, self._copies_held or consumer not in COPIERS)
            record = self.trace.record_of
            record("request", ticket, ticket.extents, ticket.readable)
            return ticket
        finally:
            self._lock.release()

    def extend(self, ticket: Ticket, extents: Sequence[Extent]) -> None:
        with self._lock:
            self._ledger.extend(ticket, extents)
            self._record_ticket("extend", ticket, tuple(extents))

    def trim(self, ticket: Ticket, space: str, pages: Iterable[int]) -> None:
        with self._lock:
            pages = tuple(pages)
            self._ledger.trim(ticket, space, pages)
            self._record_ticket("trim", ticket, ((space, pages),))

    def release(self, ticket: Ticket) -> None:
        """Raises LedgerError if the ticket was released before, or revoked while it was pending."""
        self._lock.acquire()
        try:
            self._ledger.release(ticket)
            record = self.trace.record_of
            record("release", ticket, ticket.extents, ticket.readable)
        finally:
            self._lock.release()

    def leave(self, ticket: Ticket) -> None:
        """Releases the ticket unless it ended already: another thread may revoke it at any moment."""
        with self._lock:
            if ticket.state not in ENDED:
                self._ledger.release(ticket)
                self._record_ticket("release", ticket, ticket.extents)

    def post(self, ticket: Ticket) -> None:
        """A read is handed to a DMA. With the consumer's guard off it may be posted before it is granted."""
        with self._lock:
            self._ledger.post(ticket, guarded=ticket.consumer not in self._open_consumers)
            self._record_ticket("post", ticket, ticket.extents)
            self._record_read(ticket, "*", self.layers - 1)

    def complete(self, ticket: Ticket) -> None:
        with self._lock:
            self._ledger.complete(ticket)
            self._record_ticket("complete", ticket, ticket.extents)

    def read(self, ticket: Ticket, pool: str, layer: int, deadline: float | None = None) -> None:
        """Called right before bytes of `layer` are read: returns once the grant covers it.

        `deadline` is seconds from now, None: no limit of its own (the load's producer has one). Raises
        TicketRevokedError (also for a ticket that was released), TicketTimeoutError. With the guard off it only
        records what the read violated.
        """
        self._lock.acquire()
        try:
            if ticket.readable <= layer:
                self._wait(ticket, layer + 1, deadline)
            self._record_read(ticket, pool, layer)
        finally:
            self._lock.release()

    def landing(self, ticket: Ticket, kind: LoadKind, space: str) -> dict[int, int]:
        """Pages of `space` that loads of `kind` have yet to fill for the ticket, and their generations.

        For a reader that waits for them on the device. None with the ticket's guard off: nothing is waited for.
        """
        with self._lock:
            if ticket.consumer in self._open_consumers:
                return {}
            loads = [x for x in ticket.loads if x.kind is kind and x.readable(ticket.consumer) < self.layers]
            extents = [extent for load in loads for extent in load.extents if extent.space == space]
            return {p: g for extent in extents for p, g in zip(extent.pages, extent.generations, strict=True)}

    def revoke(self, room: Any) -> None:
        with self._lock:
            changed = self._ledger.revoke(room)
            self.trace.record("revoke", room, "")
            self._wake(changed)

    # ---- reports -------------------------------------------------------------------------------------

    def counts(self) -> dict[str, dict[str, int]]:
        with self._lock:
            return self._ledger.counts()

    def totals(self) -> dict[str, int]:
        """Live tickets by state, open loads, refused calls, violations."""
        with self._lock:
            live = self._ledger.live()
            return {
                "tickets": len(live),
                "pending": sum(ticket.state is TicketState.PENDING for ticket in live),
                "revoking": sum(ticket.state is TicketState.REVOKING for ticket in live),
                "loads": len(self._ledger.loads),
                "refused": self._ledger.refused,
                "violations": sum(self.violations.values()),
            }

    def live(self) -> list[dict[str, Any]]:
        """Every live ticket, as plain data."""
        with self._lock:
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
        with self._lock:
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

    def _record(self, kind: str, load: Load, note: object = "") -> None:
        self.trace.record_of(kind, load, load.extents, note)

    def _record_ticket(self, kind: str, ticket: Ticket, extents: tuple[Any, ...]) -> None:
        self.trace.record_of(kind, ticket, extents, ticket.readable)

    def _record_read(self, ticket: Ticket, pool: str, layer: int) -> None:
        self.trace.record_of("read", ticket, (pool, layer, ticket.extents), ticket.readable)
        if ticket.readable <= layer:
            missing = {load.kind.value for load in ticket.loads if load.readable(ticket.consumer) <= layer}
            kinds = "/".join(sorted(missing)) or "its load"
            self.violations[f"{ticket.consumer.value} read {pool} before {kinds} landed"] += 1
        if not ticket.holds and ticket.state not in ENDED and self._ledger.stale(ticket):
            self.violations[f"{ticket.consumer.value} read {pool} after its pages were reused"] += 1

    def _wake(self, changed: list[Ticket]) -> None:
        if changed:
            for ticket in changed:
                kind = "grant" if ticket.state is TicketState.GRANTED else ticket.state.value
                self._record_ticket(kind, ticket, ticket.extents)
                if ticket.waker is not None:
                    ticket.waker()
            self._changed.notify_all()
