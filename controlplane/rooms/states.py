"""The vocabulary of rooms: keys, states, abort sources and outcomes (design sections 2, 5 and 6)."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class RoomKey(NamedTuple):
    """One generation of one room. A frame that names an older generation is refused."""

    room: int
    generation: int

    def __str__(self) -> str:
        return f"{self.room}.{self.generation}"


class RoomState(Enum):
    """Every state a room can be in, on one rank or as the control plane sees the whole room."""

    ALLOCATED = "allocated"
    BOOTSTRAPPING = "bootstrapping"
    LOADING = "loading"
    SENDING = "sending"
    LANDED = "landed"
    VERIFIED = "verified"
    DECODING = "decoding"
    CLOSED = "closed"
    ABORTING = "aborting"
    QUIESCING = "quiescing"
    ABORTED = "aborted"

    # That of Enum is a Python call, made for every state that a rank reports.
    __hash__ = object.__hash__

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


#: The order in which a room that is never aborted passes through its states.
FORWARD: tuple[RoomState, ...] = (
    RoomState.ALLOCATED,
    RoomState.BOOTSTRAPPING,
    RoomState.LOADING,
    RoomState.SENDING,
    RoomState.LANDED,
    RoomState.VERIFIED,
    RoomState.DECODING,
    RoomState.CLOSED,
)
#: The order in which an aborted room ends.
ABORT: tuple[RoomState, ...] = (RoomState.ABORTING, RoomState.QUIESCING, RoomState.ABORTED)
TERMINAL = frozenset({RoomState.CLOSED, RoomState.ABORTED})
ABORTS = frozenset(ABORT)
#: States of a room that may still become `closed`.
LIVE = frozenset(FORWARD) - TERMINAL
#: The states that may follow each: states are skipped, never repeated or undone. Every machine enters by this table.
NEXT: dict[RoomState, frozenset[RoomState]] = {
    **{state: frozenset((*FORWARD[at + 1 :], RoomState.ABORTING)) for at, state in enumerate(FORWARD)},
    **{state: frozenset(ABORT[at + 1 :]) for at, state in enumerate(ABORT)},
    RoomState.CLOSED: frozenset(),
}


class AbortSource(Enum):
    """Who asked for an abort (design section 6)."""

    CLIENT = "client"
    ADMIN = "admin"
    DEADLINE = "deadline"
    ENGINE_FAULT = "engine_fault"
    INTEGRITY = "integrity"
    DRAIN = "drain"
    RETRACTION = "retraction"  #: decode needs the pages for an older room: the next generation begins again


class Cancellable(Enum):
    """Until when an aborted prompt can be stopped, as its engine declares it: what has begun is computed to its end."""

    CHUNK = "chunk"  #: of the prompt: a forward that was launched
    PROMPT = "prompt"  #: it is computed whole, and the room is not quiet before


class Quiet(Enum):
    """What an abort-ack says of the writer."""

    QUIET = "quiet"  #: no write of the room is in flight and none will be posted
    POISONED = "poisoned"  #: writes ended without a known state: only a fence releases the room
