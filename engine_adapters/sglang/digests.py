"""Page digests of one rank: taken when a page was computed, kept with its device and its host copy, checked at the end.

What pages have to be lies on the device and changes in stream order only: no call here waits for the device, but
`landed` does while its last eight calls are all under way. A buffer is one (pool, layer) of everything that a room is
sent by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dsv4ctl.engine_adapters.sglang.geometry import Group, Pools
from dsv4ctl.engine_adapters.sglang.loads import Event, Pages
from dsv4ctl.kernels import ops
from dsv4ctl.kernels.buffers import Firsts, Moves, PageBuffers, SpaceBuffers, Table
from dsv4ctl.kernels.digest import Digests


@dataclass(eq=False)
class Fetched:
    """Values on their way to the host."""

    _values: Digests
    _event: Event | None
    #: What the device still reads until then. The allocator gives memory back to the stream that it came from, and
    #: knows nothing of another stream that has not read it yet.
    _read: tuple[torch.Tensor, ...]

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def get(self) -> Digests:
        if self._event is not None:
            self._event.synchronize()
        return self._values

    def split(self, sizes: Sequence[int]) -> list[Fetched]:
        if len(sizes) == 1:
            return [self]
        ends = np.cumsum(sizes)[:-1]
        return [Fetched(values, self._event, self._read) for values in np.split(self._values, ends)]


def fetch(values: torch.Tensor, *read: torch.Tensor) -> Fetched:
    """Starts the copy on the current stream. `read` are tensors of other streams that the values come from."""
    if values.device.type != "cuda":
        return Fetched(values.numpy().view(np.uint64), None, read)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    return Fetched(host.numpy().view(np.uint64), _recorded(), read)


def _recorded() -> Event:
    """The current stream's way so far."""
    event = torch.cuda.Event()
    event.record()
    return event


class Expected(NamedTuple):
    """What pages of one space have to be once a load is in place: int64 [n], int64 [buffers, n]."""

    space: str
    pages: torch.Tensor
    values: torch.Tensor


class _Space:
    """The buffers of one space. In `sealed` row b, column p is what buffer b of page p has to be; `on_host`: the same
    on the host.
    """

    def __init__(self, group: Group, pages: int, host_pages: int, page_tokens: int) -> None:
        self.names = [(pool, layer) for pool, (layers, _) in group.items() for layer in layers]
        self.pools = [PageBuffers(buffers) for _, buffers in group.values()]
        self.device = self.pools[0].device
        self.page_tokens = page_tokens
        self.sealed, self.on_host = (
            Table(torch.zeros((len(self.names), number), dtype=torch.int64, device=self.device))
            for number in (pages, host_pages)
        )

    def compute(self, pages: torch.Tensor) -> torch.Tensor:
        """What the pages are now: int64 [buffers, n]."""
        return torch.cat([ops.digest_buffers(pool, pages) for pool in self.pools])

    def numbers(self, firsts: Sequence[Firsts | Sequence[int]]) -> torch.Tensor:
        """Page numbers, on the device, of the first tokens of pages, wherever those are. Read by the current stream."""
        tokens = torch.cat([_read_here(each, self.page_tokens) for each in firsts])
        return (tokens // self.page_tokens).to(self.device, non_blocking=True)


class PageDigests:
    """`host_pages`: of each space that has any."""

    def __init__(self, pools: Pools, host_pages: Mapping[str, int]) -> None:
        self._page_tokens = {"full": pools.page_tokens, "swa": pools.window_page_tokens, "state": 1}
        self._to_window = pools.to_window
        self.spaces = {
            space: _Space(group, pools.pages(space), host_pages.get(space, 0), self._page_tokens[space])
            for space, group in pools.groups.items()
            if group
        }
        self._buffers = SpaceBuffers([space.pools for space in self.spaces.values()])
        self._numbers = {space: number for number, space in enumerate(self.spaces)}  #: in `_buffers`
        self._device = self._buffers.device
        self._beside = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._backups: list[Pages] = []  #: whose digests are not noted yet
        self._digest_parts = ops.digest_parts(self._buffers, self._beside)
        self._seal = ops.seal(self._buffers)
        self._reader = ops.reader(self._device, self._beside)
        self._compile()

    def _compile(self) -> None:
        """Now, not under a request."""
        page = torch.zeros(1, dtype=torch.int64, device=self._device)
        for space in self.spaces.values():
            if space.on_host.columns:  # only a load is compared with what it has to be
                space.compute(page)

    def landed(self, rooms: Sequence[Mapping[str, Sequence[int]]]) -> list[Fetched]:
        """Starts to compute what landed in the pages of some rooms, all at once: a peer wrote them, no stream here."""
        parts = [[(number, pages.get(name, ())) for name, number in self._numbers.items()] for pages in rooms]
        sizes = [sum(self._buffers.counts[number] * len(pages) for number, pages in room) for room in parts]
        values, there = self._digest_parts([part for room in parts for part in room])
        return Fetched(values, there, ()).split(sizes)

    def sealed(self, pages: Mapping[str, Sequence[int]]) -> Fetched:
        """Starts to read what these pages were when they were sealed: the forward that wrote them has ended.

        [buffers, pages] of each space one after another, flat. Beside the forward that runs now, not behind it.
        """
        columns = [(space.sealed, pages.get(name, ())) for name, space in self.spaces.items()]
        values, there = self._reader.columns(columns)
        return Fetched(values, there, ())

    def seal(
        self, locations: torch.Tensor, prefixes: Sequence[int], lengths: Sequence[int], slots: torch.Tensor | None
    ) -> None:
        """A forward wrote `lengths[i]` tokens of request i behind `prefixes[i]`; `locations` of all, one after another.

        `slots`: each request's own page, if it has one. A page is sealed anew with every part of it.
        """
        firsts = _firsts(prefixes, lengths, self._page_tokens["full"])
        # A token that has left its window by now has none, or is in SGLang's page 0, which nobody reads.
        written: list[tuple[str, torch.Tensor, Sequence[int]]] = [
            ("full", locations, firsts),
            ("swa", self._to_window(locations), firsts),
        ]
        if slots is not None:
            written.append(("state", slots, range(len(slots))))
        places = [
            (self._numbers[name], Firsts(tokens.to(torch.int64), at), space.page_tokens, space.sealed)
            for name, tokens, at in written
            if (space := self.spaces.get(name)) is not None
        ]
        self._seal(self._note_backups(), places)

    def backed_up(self, copies: Iterable[Pages]) -> None:
        """What these pages of the device are, their pages of the host will be: noted with the next seal or load."""
        self._backups += copies

    def _note_backups(self) -> Moves:
        """To be done on the stream of the forwards, before what is sealed changes. What fills a page again is last."""
        backups, self._backups = self._backups, []
        if _fill_apart(backups):
            return self._moves(backups)
        for backup in backups[:-1]:
            self._seal(self._moves([backup]), ())
        return self._moves(backups[-1:])

    def _moves(self, backups: Sequence[Pages]) -> Moves:
        return [
            (space.sealed, device, space.on_host, host, space.page_tokens)
            for backup in backups
            for name, (device, host) in backup.firsts.items()
            if (space := self.spaces.get(name)) is not None
        ]

    def loaded(self, copies: Sequence[Pages]) -> list[Expected]:
        """What the pages will have to be once these loads are in place, copies. On the stream of the forwards."""
        self._seal(self._note_backups(), ())
        expected = []
        for name, (device, host) in self._joined(copies).items():
            space = self.spaces[name]
            values = space.on_host.numbers[:, host]
            space.sealed.numbers[:, device] = values
            expected.append(Expected(name, device, values))
        return expected

    def _joined(self, copies: Sequence[Pages]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Page numbers of all of them on the device, (device, host) by space."""
        return {
            name: (space.numbers([device for device, _ in found]), space.numbers([host for _, host in found]))
            for name, space in self.spaces.items()
            if (found := [copy.firsts[name] for copy in copies if name in copy.firsts])
        }

    def differences(self, expected: Sequence[Expected]) -> torch.Tensor:
        """How many of the pages' buffers are not as expected: int64 [1]."""
        counts = [(self.spaces[space].compute(pages) != values).sum() for space, pages, values in expected]
        return torch.stack(counts).sum().reshape(1)

    def mismatches(self, found: Digests, sealed: Digests, pages: Mapping[str, int]) -> list[tuple[str, int, int]]:
        """(pool, layer, logical page) of every difference; `pages`: how many of each space."""
        wrong = np.flatnonzero(found != sealed)
        if not wrong.size:  # to list the places would take longer than to compare
            return []
        places = [
            (pool, layer, page)
            for name, space in self.spaces.items()
            for pool, layer in space.names
            for page in range(pages.get(name, 0))
        ]
        return [places[at] for at in wrong]


def _read_here(firsts: Firsts | Sequence[int], page_tokens: int) -> torch.Tensor:
    """First tokens of a copy's pages, read by the current stream, which need not be that of the memory."""
    if not isinstance(firsts, Firsts):
        return torch.tensor(firsts, dtype=torch.int64)
    if firsts.tokens.is_cuda:
        firsts.tokens.record_stream(torch.cuda.current_stream(firsts.tokens.device))
    return firsts.tokens[::page_tokens]


def _fill_apart(backups: Sequence[Pages]) -> bool:
    """Whether no host page is known to be filled twice: of two values for one place, the device keeps either."""
    for space in {name for copy in backups for name in copy.firsts} if len(backups) > 1 else ():
        firsts = list[int]()
        for copy in backups:
            if space in copy.firsts:
                host = copy.firsts[space][1]
                if isinstance(host, Firsts):
                    return False
                firsts += host
        if len(set(firsts)) < len(firsts):
            return False
    return True


def _firsts(prefixes: Sequence[int], lengths: Sequence[int], page_tokens: int) -> list[int]:
    """Of each page that got tokens, where its first new one stands among all."""
    found, at = [], 0
    for prefix, length in zip(prefixes, lengths, strict=True):
        to_boundary = -prefix % page_tokens
        if to_boundary and length:
            found.append(at)
        found += range(at + to_boundary, at + length, page_tokens)
        at += length
    return found
