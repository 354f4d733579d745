"""Admission: may one more room start, by rooms and by page-rounded transfer bytes in flight."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec


class PoolCost(msgspec.Struct, frozen=True):
    """What one page of a pool costs to transfer. `page_bytes` is for all layers of the pool."""

    span: Literal["full", "window", "point", "none"]
    page_bytes: int


def room_bytes(tokens: int, pools: Iterable[PoolCost], *, page_tokens: int, window_tokens: int) -> int:
    """Bytes a prompt of `tokens` tokens moves from prefill to decode; pages move whole.

    `full`: every page of the prompt; `window`: the pages the last `window_tokens` tokens touch; `point`: one
    page, the state at the end; `none`: nothing, it is recomputed.
    """
    pages = math.ceil(tokens / page_tokens)
    pages_of = {
        "full": pages,
        "window": pages - max(tokens - window_tokens, 0) // page_tokens,
        "point": min(pages, 1),
        "none": 0,
    }
    return sum(pages_of[pool.span] * pool.page_bytes for pool in pools)


class InFlight(msgspec.Struct, frozen=True):
    """What is under way. `room_seconds`: recent mean life of a room, 0 while none has ended."""

    rooms: int
    bytes: int
    room_seconds: float = 0.0


class Refused(msgspec.Struct, frozen=True):
    """`retry_after`: whole seconds, or None if the room can never be admitted."""

    reason: str
    retry_after: int | None


class Admission(Protocol):
    def decide(self, in_flight: InFlight, room_bytes: int) -> Refused | None:
        """None admits the room."""
        ...


class Bytes:
    """At most `max_rooms` rooms and `max_bytes` page-rounded bytes in flight.

    Retry-after by Little's law: what is in flight leaves at (in flight / mean life), so `missing` of it have
    left after missing * mean life / in flight; at least 1 s, at most `RETRY_CAP`.
    """

    RETRY_CAP = 30

    def __init__(self, *, max_rooms: int, max_bytes: int) -> None:
        if max_rooms < 1 or max_bytes < 1:
            raise ValueError(f"max_rooms {max_rooms}, max_bytes {max_bytes}: at least 1 of each expected")
        self._max_rooms = max_rooms
        self._max_bytes = max_bytes

    def decide(self, in_flight: InFlight, room_bytes: int) -> Refused | None:
        if room_bytes > self._max_bytes:
            return Refused(f"the room moves {room_bytes} bytes, limit {self._max_bytes}", None)
        waits: list[float] = []
        reasons: list[str] = []
        for what, used, more, limit in (
            ("rooms", in_flight.rooms, 1, self._max_rooms),
            ("bytes", in_flight.bytes, room_bytes, self._max_bytes),
        ):
            missing = used + more - limit
            if missing > 0:
                waits.append(missing * in_flight.room_seconds / used)
                reasons.append(f"{used} {what} in flight, limit {limit}")
        if not waits:
            return None
        return Refused("; ".join(reasons), min(max(math.ceil(max(waits)), 1), self.RETRY_CAP))


class Factory(Protocol):
    def __call__(self, *, max_rooms: int, max_bytes: int) -> Admission: ...


POLICIES: dict[str, Factory] = {"bytes": Bytes}
