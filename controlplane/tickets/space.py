"""The pages of one space: whose they are, what they hold, who reads and who writes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from dsv4ctl.controlplane.tickets.ticket import Load
from dsv4ctl.controlplane.tickets.types import HOST, SpaceSpec

#: A page is free, owned, retiring (freed, but somebody may still touch it) or quarantined.
FREE, OWNED, RETIRING, QUARANTINED = range(4)
NONE: frozenset[str] = frozenset()


class Space:
    """Lists by page number. `state` is of bytes: a rank counts its hundred thousand pages a few times a second."""

    __slots__ = (
        "filled",
        "filling",
        "free",
        "generation",
        "load",
        "name",
        "on_host",
        "pools",
        "readers",
        "ready",
        "state",
    )

    def __init__(self, name: str, spec: SpaceSpec) -> None:
        self.name = name
        self.on_host = name.startswith(HOST)
        self.pools = frozenset(spec.pools)
        self.generation = [0] * spec.pages
        self.state = bytearray(spec.pages)
        self.readers = [0] * spec.pages
        self.ready: list[int | None] = [None] * spec.pages  #: the generation of an owned page that is filled whole
        self.filled = [NONE] * spec.pages  #: pools whose bytes are complete; none under a load
        self.filling = [NONE] * spec.pages  #: pools that the page's load writes
        self.load: list[Load | None] = [None] * spec.pages
        self.free = deque(range(spec.pages))

    def counts(self) -> dict[str, int]:
        """Pages by state, and leased pages (under an open load)."""
        free, retiring, quarantined = len(self.free), self.state.count(RETIRING), self.state.count(QUARANTINED)
        return {
            "free": free,
            "owned": len(self.state) - free - retiring - quarantined,
            "retiring": retiring,
            "quarantined": quarantined,
            "leased": len(self.load) - self.load.count(None),
        }

    def quiet(self, page: int) -> bool:
        return not self.readers[page] and self.load[page] is None

    def covers(self, pools: frozenset[str], asked: frozenset[str]) -> bool:
        """S7: a group is used whole or not at all."""
        return asked <= pools

    def take(self) -> int:
        page = self.free.popleft()
        self.state[page] = OWNED
        self.generation[page] += 1
        self.filled[page] = NONE
        return page

    def give_back(self, page: int) -> int:
        """1 if the page is free from here, 0 if somebody still touches it."""
        self.state[page] = RETIRING
        self.ready[page] = None
        return self.retire(page)

    def retire(self, page: int) -> int:
        """1 if the page was given back and nobody touches it any more: it is free from here."""
        if self.state[page] < RETIRING or not self.quiet(page):
            return 0
        self.state[page] = FREE
        self.free.append(page)
        return 1

    def lease(self, page: int, load: Load, pools: frozenset[str]) -> None:
        """The load writes these pools of the page, too."""
        if self.load[page] is not load:
            self.load[page] = load
            self.generation[page] += 1
            self.filled[page] = self.filling[page] = NONE
            self.ready[page] = None
        filling = self.filling[page] | pools
        self.filling[page] = self.pools if filling == self.pools else filling  # whole pages are told by identity

    def end_lease(self, page: int, whole: bool) -> None:
        """Nobody writes the page any more; `whole`: what was to be written is there."""
        self.load[page] = None
        if whole:
            self.filled[page] = self.filling[page]
            if self.filled[page] is self.pools and self.state[page] == OWNED:
                self.ready[page] = self.generation[page]
        self.retire(page)

    def leave(self, pages: Iterable[int]) -> None:
        """Each has one reader less."""
        for page in pages:
            self.readers[page] -= 1
            self.retire(page)
