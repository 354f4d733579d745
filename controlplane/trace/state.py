"""What the detector remembers of one rank: the last accesses of each page, live tickets, open loads, its clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from dsv4ctl.controlplane.trace.format import Event, Extents, Rank
from dsv4ctl.controlplane.trace.races import Race

CHECKSUM = "checksum"
#: Frames under way, acknowledged rooms and exposed rooms, remembered at most: the oldest go first.
REMEMBERED = 100_000

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Exposure:
    """A room's pages, told to peers that may write them until each is known to be quiet."""

    __slots__ = ("event", "generations", "peers", "quiet", "reused", "room")

    def __init__(self, room: str, event: Event, generations: dict[tuple[str, int], int]) -> None:
        self.room = room
        self.event = event  #: the lease
        self.generations = generations
        self.peers: set[str] = set()  #: told, and not known to be quiet
        self.quiet: set[str] = set()  #: all their bytes are here, or they are fenced: no clock needed
        self.reused: Event | None = None  #: the first reuse while a peer could still write

    def settle(self, peer: str) -> None:
        self.peers.discard(peer)
        self.quiet.add(peer)


class Write:
    """A peer's write into a rank's pages, from the post to its completion on the peer."""

    __slots__ = ("begin", "by", "end", "target")

    def __init__(self, by: str, target: str, begin: Event) -> None:
        self.by = by  #: incarnations
        self.target = target
        self.begin = begin
        self.end: int | None = None  #: `seq` on the writer


class Load:
    """A write by this rank's loads, or (kind `transfer`) the lease under which peers write."""

    __slots__ = (
        "early", "event", "exposure", "extents", "failed", "kind", "known", "landed", "lost", "open", "pages",
        "pools", "verified", "verify",
    )  # fmt: skip

    def __init__(self, event: Event, extents: Extents, known: bool) -> None:
        self.kind = event.who
        self.event = event  #: its lease, or what was first seen of it
        self.known = known
        self.extents = extents
        self.pools = {pool for extent in extents for pool in extent.pools}
        self.verify = known and bool(event.value)  #: only `checksum` may read what is not verified
        self.landed = self.verified = 0
        self.open = True
        self.failed = False
        self.lost: Event | None = None  #: the reuse of one of its pages while it was open
        self.exposure: Exposure | None = None
        self.pages: list[Page] = []
        self.early: list[tuple[int, Race, Event]] = []  #: (layer, race, read) of reads that came before

    def readable(self, consumer: str) -> int:
        return self.verified if self.verify and consumer != CHECKSUM else self.landed

    def fills(self, pool: str) -> bool:
        """It writes that pool, or one of those that a read of `*` takes; a trace that does not say is believed to."""
        return pool == "*" or not self.pools or pool in self.pools

    def whole(self, layers: int) -> bool:
        """Its pages are filled, as far as the trace can tell."""
        if self.failed:
            return False
        return not self.known or self.readable("") >= layers

    def settle_early(self, event: Event) -> None:
        """The layers below `event.value` are in place: says so of the reads that came before."""
        if not self.early:
            return
        for layer, race, read in self.early:
            if layer < event.value and race.landed_after_ns is None:
                race.landed_after_ns = event.at_ns - read.at_ns
        self.early = [one for one in self.early if one[0] >= event.value]


class Ticket:
    """A bracket in which its consumer may read: from `request` until it is released and its posted reads ended."""

    __slots__ = ("event", "last", "left", "loads", "pages", "posted", "readable", "stale", "who")

    def __init__(self, event: Event) -> None:
        self.who = event.who
        self.event = event
        self.readable = event.value
        self.pages: list[Page] = []
        self.loads: list[Load] = []  #: those that fill its pages and had not landed when it joined
        self.last: Event | None = None  #: its latest read
        self.stale: list[Page] = []  #: went to another owner under it
        self.posted = 0
        self.left = False

    @property
    def reads(self) -> bool:
        """It has read, or may be reading."""
        return self.readable > 0 or self.last is not None


class Page:
    __slots__ = ("exposure", "generation", "load", "number", "owner", "race", "readers", "space", "unfilled", "writes")

    def __init__(self, space: str, number: int) -> None:
        self.space = space
        self.number = number
        self.generation: int | None = None  #: None: not seen yet
        self.load: Load | None = None  #: open
        self.unfilled: Load | None = None  #: it ended, and its bytes never came
        self.owner: Event | None = None  #: who got it last
        self.race: Race | None = None  #: of its allocation: the lease that follows tells for whom it was
        self.exposure: Exposure | None = None
        self.readers: dict[Ticket, None] = {}
        self.writes: list[Write] = []

    def idle(self) -> bool:
        """Nothing is remembered that a new owner could meet."""
        return self.load is None and self.exposure is None and not self.readers and not self.writes


class RankState:
    """`clock[other]`: the latest event of `other` that is ordered before this rank's present."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.clock: dict[str, int] = {}
        self.next_seq: int | None = None
        self.forget()

    def forget(self) -> None:
        """Events were lost: whatever they changed is unknown."""
        self.pages: dict[str, dict[int, Page]] = {}
        self.tickets: dict[int, Ticket] = {}
        self.loads: dict[int, Load] = {}
        self.exposures: dict[str, Exposure] = {}
        self.flights: dict[int, Write] = {}  #: of this rank, into peers
        self.acked: dict[tuple[str, str], Event] = {}  #: (room, peer): this rank said that it is quiet

    def page(self, space: str, number: int) -> Page:
        pages = self.pages.get(space)
        if pages is None:
            pages = self.pages[space] = {}
        page = pages.get(number)
        if page is None:
            page = pages[number] = Page(space, number)
        return page

    def each(self, extents: Extents) -> Iterator[tuple[int, Page]]:
        """(generation, page) of extents that name generations."""
        for extent in extents:
            for number, generation in zip(extent.pages, extent.generations, strict=True):
                yield generation, self.page(extent.space, number)


def remember(table: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Bounded: the oldest entry makes room."""
    if len(table) >= REMEMBERED:
        table.pop(next(iter(table)))
    table[key] = value
