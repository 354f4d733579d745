"""The awaitable front: `async with hold(gate, consumer, extents) as held: await held.granted()`.

Leaving the scope, by cancellation too, releases the ticket; a read that was posted keeps it until it completes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio

from dsv4ctl.controlplane.tickets.gate import Gate, TicketRevokedError, TicketTimeoutError
from dsv4ctl.controlplane.tickets.ticket import Ticket
from dsv4ctl.controlplane.tickets.types import Consumer, Extent, TicketState

_LIVE = (TicketState.PENDING, TicketState.GRANTED)


class Held:
    """A ticket inside its scope."""

    def __init__(self, gate: Gate, ticket: Ticket) -> None:
        self._gate = gate
        self._loop = asyncio.get_running_loop()
        self._event = anyio.Event()
        self.ticket = ticket
        gate.set_waker(ticket, self._wake_from_any_thread)

    async def granted(self, layers: int | None = None, deadline: float | None = None) -> None:
        """Returns once the first `layers` layers (None: all) may be read.

        `deadline` is seconds from now. Raises TicketRevokedError, TicketTimeoutError.
        """
        wanted = self._gate.layers if layers is None else layers
        with anyio.move_on_after(deadline) as scope:
            while self.ticket.readable < wanted and self.ticket.state in _LIVE:
                await self._event.wait()
        if self.ticket.readable >= wanted and self.ticket.state is TicketState.GRANTED:
            return
        if self.ticket.state in _LIVE and scope.cancelled_caught:
            raise TicketTimeoutError(f"{self.ticket.consumer.value}: not granted within {deadline:g} s")
        raise TicketRevokedError(f"{self.ticket.consumer.value} ticket is {self.ticket.state.value}")

    def post(self) -> None:
        """A read of the extents is handed to a DMA: the ticket now outlives the scope until `complete`."""
        self._gate.post(self.ticket)

    def complete(self) -> None:
        self._gate.complete(self.ticket)

    def _wake_from_any_thread(self) -> None:
        # Whoever lands a layer must not fail because a loop was closed around a scope that nobody left.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        # A fresh event before the old one fires: no change between two waits is lost.
        event, self._event = self._event, anyio.Event()
        event.set()


@asynccontextmanager
async def hold(gate: Gate, consumer: Consumer, extents: Sequence[Extent], *, room: Any = None) -> AsyncIterator[Held]:
    """Raises LedgerError if the ledger refuses the request."""
    held = Held(gate, gate.request(consumer, extents, room=room))
    try:
        yield held
    finally:
        gate.set_waker(held.ticket, None)
        gate.leave(held.ticket)
