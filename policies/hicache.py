"""HiCache: which sealed pages are backed up to the host, and from how many host pages on a load pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class SealedPage(msgspec.Struct, frozen=True):
    """A sealed page of one prefix. `on_host`: its host mirror exists or is being written."""

    page: int
    on_host: bool


class HiCache(Protocol):
    def back_up(self, prefix: Sequence[SealedPage], host_room: int) -> tuple[int, ...]:
        """Pages of `prefix` (first page first) to copy to the host now, at most `host_room` of them."""
        ...

    def loads(self, host_pages: int) -> bool:
        """Whether `host_pages` pages of a prefix that are on the host only are loaded; recomputed if not."""
        ...


class WriteThrough:
    """Every sealed page at once, front first: a host page is of no use without those before it."""

    def __init__(self, *, load_threshold_pages: int) -> None:
        self._threshold = load_threshold_pages

    def back_up(self, prefix: Sequence[SealedPage], host_room: int) -> tuple[int, ...]:
        missing = [sealed.page for sealed in prefix if not sealed.on_host]
        return tuple(missing[: max(host_room, 0)])

    def loads(self, host_pages: int) -> bool:
        return host_pages >= max(self._threshold, 1)


class Factory(Protocol):
    def __call__(self, *, load_threshold_pages: int) -> HiCache: ...


POLICIES: dict[str, Factory] = {"write-through": WriteThrough}
