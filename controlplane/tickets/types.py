"""The vocabulary of tickets: consumers, load kinds, guards, extents (design section 2)."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Consumer(Enum):
    """Whoever reads. Each is registered with the ledger; a read by anybody else is an event of its own."""

    ATTENTION = "attention"
    INDEXER = "indexer"
    COMPRESSOR = "compressor"
    SENDER = "sender"
    BACKUP = "backup"
    LOAD = "load"
    CHECKSUM = "checksum"


class LoadKind(Enum):
    """Where the bytes of an asynchronous write come from."""

    HICACHE = "hicache"  #: host -> device
    TRANSFER = "transfer"  #: peer -> device
    BACKUP = "backup"  #: device -> host
    FORWARD = "forward"  #: computed here


class Guard(Enum):
    """What `[unsafe]` can switch off, one at a time: each is one right that somebody must hold."""

    ATTENTION = "attention_ticket"
    INDEXER = "indexer_ticket"
    COMPRESSOR = "compressor_ticket"
    SENDER = "sender_ticket"
    BACKUP = "backup_ticket"
    LOAD = "load_ticket"
    QUIESCE = "quiesce"

    @property
    def consumer(self) -> Consumer | None:
        """The consumer whose tickets this guard makes it wait for; None for `quiesce`."""
        return _GUARDED.get(self)


_GUARDED = {
    Guard.ATTENTION: Consumer.ATTENTION,
    Guard.INDEXER: Consumer.INDEXER,
    Guard.COMPRESSOR: Consumer.COMPRESSOR,
    Guard.SENDER: Consumer.SENDER,
    Guard.BACKUP: Consumer.BACKUP,
    Guard.LOAD: Consumer.LOAD,
}

#: Every guard that is a ticket: the rows "tickets off" of the incident table.
TICKET_GUARDS: tuple[Guard, ...] = tuple(_GUARDED)


class Extent(NamedTuple):
    """Pages of one space, and which of the space's pools are meant, over all layers of those pools.

    A page number belongs to a space (`full`, `swa`, `state`, or their host mirrors `host.full`, ...):
    the pools of one space share page numbers, generations and owners.
    """

    space: str
    pages: tuple[int, ...]
    pools: frozenset[str]
