"""Routing: which prefill/decode pair serves the next room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec


class Pair(msgspec.Struct, frozen=True):
    """One candidate. On a single engine `decode` is None."""

    prefill: str
    decode: str | None
    bytes_in_flight: int = 0  #: page-rounded transfer bytes of the pair's open rooms
    rooms_in_flight: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return (self.prefill, self.decode or "")


class Routing(Protocol):
    def choose(self, pairs: Sequence[Pair]) -> Pair:
        """One of `pairs`. Raises ValueError if there is none."""
        ...


class RoundRobin:
    """The pairs in turn, in the order of their names; pairs may come and go between calls."""

    def __init__(self) -> None:
        self._last: tuple[str, str] | None = None

    def choose(self, pairs: Sequence[Pair]) -> Pair:
        ordered = sorted(_some(pairs), key=lambda pair: pair.key)
        last = self._last
        chosen = ordered[0] if last is None else next((p for p in ordered if p.key > last), ordered[0])
        self._last = chosen.key
        return chosen


class LeastBytesInFlight:
    """The pair with the fewest transfer bytes in flight; then the fewest rooms; then the first name."""

    def choose(self, pairs: Sequence[Pair]) -> Pair:
        return min(_some(pairs), key=lambda pair: (pair.bytes_in_flight, pair.rooms_in_flight, pair.key))


def _some(pairs: Sequence[Pair]) -> Sequence[Pair]:
    if not pairs:
        raise ValueError("no pair to choose from: at least one ready prefill/decode pair expected")
    return pairs


Factory = Callable[[], Routing]
POLICIES: dict[str, Factory] = {"round-robin": RoundRobin, "least-bytes-in-flight": LeastBytesInFlight}
