"""Page digests of one rank: taken when a page was computed, kept with its device and its host copy, checked at the end.

What pages have to be lies on the device and changes in stream order only: no call here waits for the device. A buffer
is one (pool, layer) of everything that a room is sent by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dsv4ctl.engine_adapters.sglang.fetched import Fetched
from dsv4ctl.engine_adapters.sglang.geometry import Group, Pools
from dsv4ctl.engine_adapters.sglang.loads import Pages
from dsv4ctl.kernels import ops
from dsv4ctl.kernels.buffers import Firsts, Moves, PageBuffers, SpaceBuffers, Table, Tokens
from dsv4ctl.kernels.digest import Digests


class Noted(NamedTuple):
    """Loads that are about to begin: their pages on the device, and what these will have to be then."""

    pages: Sequence[tuple[_Space, Tokens]]
    expected: Fetched


@dataclass(eq=False)
class Check:
    """What the pages of loads are once those are in place."""

    noted: Noted
    found: Fetched

    def ready(self) -> bool:
        return self.noted.expected.ready() and self.found.ready()

    def differences(self) -> int:
        """How many buffers of pages are not what they have to be."""
        return int((self.noted.expected.get() != self.found.get()).sum())


class _Space:
    """The buffers of one space. In `sealed` row b, column p is what buffer b of page p has to be; `on_host`: the same
    on the host.
    """

    def __init__(self, number: int, group: Group, pages: int, host_pages: int, page_tokens: int) -> None:
        self.number = number  #: among the spaces that have buffers
        self.names = [(pool, layer) for pool, (layers, _) in group.items() for layer in layers]
        self.pools = [PageBuffers(buffers) for _, buffers in group.values()]
        self.device = self.pools[0].device
        self.page_tokens = page_tokens
        self.sealed, self.on_host = (
            Table(torch.zeros((len(self.names), number), dtype=torch.int64, device=self.device))
            for number in (pages, host_pages)
        )


class PageDigests:
    """`host_pages`: of each space that has any."""

    def __init__(self, pools: Pools, host_pages: Mapping[str, int]) -> None:
        self._page_tokens = {"full": pools.page_tokens, "swa": pools.window_page_tokens, "state": 1}
        self._to_window = pools.to_window
        groups = {space: group for space, group in pools.groups.items() if group}
        self.spaces = {
            space: _Space(number, group, pools.pages(space), host_pages.get(space, 0), self._page_tokens[space])
            for number, (space, group) in enumerate(groups.items())
        }
        self._buffers = SpaceBuffers([space.pools for space in self.spaces.values()])
        beside = torch.cuda.Stream(self._buffers.device) if self._buffers.device.type == "cuda" else None
        self._backups: list[Pages] = []  #: whose digests are not noted yet
        self._sealer = ops.sealer(self._buffers)
        self._beside = ops.sealer(self._buffers, beside)  #: the forward that runs

    def landed(self, rooms: Sequence[Mapping[str, Sequence[int]]]) -> list[Fetched]:
        """Starts to compute what landed in the pages of some rooms, all at once: a peer wrote them, no stream here."""
        parts = [[(space.number, pages.get(name, ()), 1) for name, space in self.spaces.items()] for pages in rooms]
        sizes = [sum(self._buffers.counts[number] * len(pages) for number, pages, _ in room) for room in parts]
        values, there = self._beside.digests([part for room in parts for part in room])
        return Fetched(values, there).split(sizes)

    def sealed(self, pages: Mapping[str, Sequence[int]]) -> Fetched:
        """Starts to read what these pages were when they were sealed: the forward that wrote them has ended.

        [buffers, pages] of each space one after another, flat. Beside the forward that runs now, not behind it.
        """
        reads = [(space.sealed, pages.get(name, ()), 1) for name, space in self.spaces.items()]
        return Fetched(*self._beside.move((), reads))

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
            (space.number, Firsts(tokens.to(torch.int64).contiguous(), at), space.page_tokens, space.sealed)
            for name, tokens, at in written
            if (space := self.spaces.get(name)) is not None
        ]
        self._sealer.seal(self._note_backups(), places)

    def backed_up(self, copies: Iterable[Pages]) -> None:
        """What these pages of the device are, their pages of the host will be: noted with the next seal or load."""
        self._backups += copies

    def _note_backups(self) -> Moves:
        """To be done on the stream of the forwards, before what is sealed changes. What fills a page again is last."""
        backups, self._backups = self._backups, []
        if _fill_apart(backups):
            return self._moves(backups)
        for backup in backups[:-1]:
            self._sealer.seal(self._moves([backup]), ())
        return self._moves(backups[-1:])

    def _moves(self, backups: Sequence[Pages]) -> Moves:
        return [
            (space.sealed, device, space.on_host, host, space.page_tokens)
            for backup in backups
            for name, (device, host) in backup.firsts.items()
            if (space := self.spaces.get(name)) is not None
        ]

    def loaded(self, copies: Sequence[Pages]) -> Noted | None:
        """What the pages will have to be once these loads are in place, copies. On the stream of the forwards."""
        self._sealer.seal(self._note_backups(), ())
        loads = [
            (space, *sides)
            for name, space in self.spaces.items()
            for copy in copies
            if (sides := copy.firsts.get(name)) is not None
        ]
        if not loads:
            return None
        moves = [(space.on_host, host, space.sealed, device, space.page_tokens) for space, device, host in loads]
        reads = [(space.on_host, host, space.page_tokens) for space, _, host in loads]
        return Noted([(space, device) for space, device, _ in loads], Fetched(*self._sealer.move(moves, reads)))

    def compare(self, noted: Noted) -> Check:
        """Starts to compute what the pages are now. On the stream of the load."""
        pages = [(space.number, device, space.page_tokens) for space, device in noted.pages]
        return Check(noted, Fetched(*self._sealer.digests(pages)))

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


def _fill_apart(backups: Sequence[Pages]) -> bool:
    """Whether no host page is known to be filled twice: of two values for one place, the device keeps either."""
    for space in {name for copy in backups for name in copy.firsts} if len(backups) > 1 else ():
        filled = [first for copy in backups if space in copy.firsts for first in copy.firsts[space][1]]
        if len(set(filled)) < len(filled):
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
