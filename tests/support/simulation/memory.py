"""What the bytes of a rank's pages are, whatever its ledger believes; and the writes on their way to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.controlplane.tickets.ticket import Ticket

#: Told of what must not be: an invariant and what happened.
Violated = Callable[[str, str], None]


class Bytes(NamedTuple):
    """A page's content: which page of whose prompt, and whether a bit fell over on its way."""

    key: RoomKey
    logical: int
    flipped: bool = False


@dataclass(eq=False)
class Memory:
    name: str
    violated: Violated
    pages: int
    owners: list[RoomKey | None] = field(default_factory=list)
    content: list[Bytes | None] = field(default_factory=list)
    incoming: list[Write] = field(default_factory=list)
    outgoing: list[Write] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.owners, self.content = [None] * self.pages, [None] * self.pages

    def take(self, key: RoomKey, pages: Iterable[int]) -> None:
        """The ledger gave these pages to a room."""
        for page in pages:
            for write in self.incoming:
                if write.target == page and write.writer.reaped_at is None:
                    self.violated("S3", f"{self.name}: page {page} goes to room {key}, and {write} is on its way")
            for write in self.outgoing:
                if write.source == page and write.reader.reaped_at is None:
                    self.violated("S2", f"{self.name}: page {page} goes to room {key}, and {write} still reads it")
            self.owners[page], self.content[page] = key, None

    def give_back(self, key: RoomKey, pages: Iterable[int]) -> None:
        """The ledger calls these pages free."""
        for page in pages:
            if self.owners[page] == key:
                self.owners[page] = None

    def read(self, key: RoomKey, page: int, logical: int) -> Bytes:
        found = self.content[page]
        if found is None or found[:2] != (key, logical):
            self.violated("S1", f"{self.name}: page {logical} of room {key} is read, and page {page} holds {found}")
            return Bytes(key, logical, flipped=True)
        return found


@dataclass(eq=False)
class Write:
    """A posted write of one page. `unknown`: its writer is told of an error, and the bytes land all the same."""

    key: RoomKey
    logical: int
    writer: Any  #: a Rank
    reader: Any
    source: int
    target: int
    ticket: Ticket
    manifest: tuple[Bytes, ...] | None
    doubt_seconds: float  #: how long its writer waits for word before it calls the outcome unknown
    unknown: bool = False
    flips: bool = False

    def __str__(self) -> str:
        return f"the write of page {self.logical} of room {self.key} by {self.writer.name}"

    def land(self) -> bool:
        """The bytes arrive, unless either process is gone. Whether they did."""
        source, target = self.writer.memory, self.reader.memory
        source.outgoing.remove(self)
        target.incoming.remove(self)
        if self.writer.reaped_at is not None or self.reader.reaped_at is not None:
            return False
        content = source.read(self.key, self.source, self.logical)
        if target.owners[self.target] != self.key:
            owner = target.owners[self.target]
            target.violated("S3", f"{target.name}: {self} lands in page {self.target}, which is of {owner or 'nobody'}")
            return False
        target.content[self.target] = content._replace(flipped=content.flipped or self.flips)
        return True
