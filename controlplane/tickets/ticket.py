"""Tickets and loads: what the ledger keeps of each. Only the ledger changes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dsv4ctl.controlplane.tickets.types import Consumer, Extent, LoadKind, TicketState


class Ticket(msgspec.Struct, eq=False):
    """The right of one consumer to read its extents.

    `readable` is the grant: the first so many layers may be read. `waker`, if set, is called at each change.
    """

    consumer: Consumer
    room: Any
    holds: bool  #: its pages are not reused before it ends; False: a guard is off
    extents: tuple[Extent, ...]
    loads: tuple[Load, ...]  #: open loads that fill pages of this ticket
    readable: int = 0
    state: TicketState = TicketState.PENDING
    before: Ticket | None = None  #: of the same room, live; requested later
    after: Ticket | None = None  #: requested earlier
    posted: int = 0  #: reads posted and not completed: the ticket outlives its scope until they end
    left: bool = False  #: released while reads were posted
    waker: Callable[[], None] | None = None

    @property
    def who(self) -> Consumer:
        return self.consumer

    # That of a struct shows every field, and tickets and loads lead to each other.
    __repr__ = object.__repr__


class Load(msgspec.Struct, eq=False):
    """An asynchronous write that fills pages layer by layer, and the lease under which it writes."""

    kind: LoadKind
    room: Any
    verify: bool  #: only `checksum` may read a layer before its digests matched
    extents: tuple[Extent, ...] = ()
    landed: int = 0  #: watermark: layers landed
    verified: int = 0  #: watermark: layers whose digests matched
    open: bool = True  #: the writer may still write
    failed: bool = False
    waiters: set[Ticket] = msgspec.field(default_factory=set)

    @property
    def who(self) -> LoadKind:
        return self.kind

    __repr__ = object.__repr__

    def readable(self, consumer: Consumer) -> int:
        return self.verified if self.verify and consumer is not Consumer.CHECKSUM else self.landed
