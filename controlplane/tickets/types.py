"""The vocabulary of tickets: consumers, load kinds, guards, extents (design section 2)."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import msgspec

#: What the name of a space on the host begins with: `host.full` holds copies of pages of `full`.
HOST = "host."


class Consumer(Enum):
    """Whoever reads. Each is registered with the ledger; a read by anybody else is an event of its own."""

    ATTENTION = "attention"
    INDEXER = "indexer"
    COMPRESSOR = "compressor"
    SENDER = "sender"
    BACKUP = "backup"
    LOAD = "load"
    CHECKSUM = "checksum"

    # Members are singletons: the hash of Enum itself is a Python call, too slow for every read.
    __hash__ = object.__hash__


class LoadKind(Enum):
    """Where the bytes of an asynchronous write come from."""

    HICACHE = "hicache"  #: host -> device
    TRANSFER = "transfer"  #: peer -> device
    BACKUP = "backup"  #: device -> host
    FORWARD = "forward"  #: computed here


class TicketState(Enum):
    PENDING = "pending"  #: nothing may be read yet
    GRANTED = "granted"  #: the first `readable` layers may be read
    REVOKING = "revoking"  #: aborted or left while granted: still holds its pages
    RELEASED = "released"
    REVOKED = "revoked"  #: aborted while pending: holds nothing


class Guard(Enum):
    """What `[unsafe]` can switch off, one at a time: each is one right that somebody must hold."""

    ATTENTION = "attention_ticket"
    INDEXER = "indexer_ticket"
    COMPRESSOR = "compressor_ticket"
    SENDER = "sender_ticket"
    BACKUP = "backup_ticket"
    LOAD = "load_ticket"
    QUIESCE = "quiesce"  #: pages of an aborted room are freed only when the writer is quiet
    AGREEMENT = "rank_agreement"  #: ranks act on what all of them know
    HOLD = "copy_hold"  #: what a backup or a load copies is not reused before it is copied
    FOLD = "fold"  #: slots that a load fills are not folded away when their page is published again
    GROUPS = "whole_groups"  #: a prefix ends where a member pool does not cover its span (S7)
    VERDICT = "verdict"  #: a digest mismatch stops the room; off: it is counted and reported, and the room goes on

    __hash__ = object.__hash__  # as above

    @property
    def consumer(self) -> Consumer | None:
        """The consumer whose tickets this guard makes it wait for; None if it is no ticket."""
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


class SpaceSpec(NamedTuple):
    """A family of pools that share page numbers: `pages` of them, each holding one page of every pool."""

    pages: int
    pools: tuple[str, ...]


class Extent(msgspec.Struct, frozen=True, gc=False):
    """Pages of one space at the generations they had when the extent was made, and which pools are meant.

    A page number belongs to a space (`full`, `swa`, `state`, or a host mirror `host.full`, ...). An extent covers
    all layers; how many of them may be read is the ticket's `readable`.
    """

    space: str
    pages: tuple[int, ...]
    generations: tuple[int, ...]
    pools: frozenset[str]
