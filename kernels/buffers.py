"""Pages that lie in several buffers (one a layer, allocated apart), and what is asked of their digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from dsv4ctl.kernels import digest


class Event(Protocol):
    """What a device has done, or not yet. For any thread."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class PageBuffers:
    """Buffers [pages, page_bytes], contiguous, of one page size, on one device."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.layers = [buffer.view(torch.uint8) for buffer in buffers]
        sizes = {layer.shape[1] for layer in self.layers}
        if len(sizes) != 1:
            raise ValueError(f"pages of {sorted(sizes)} B: buffers of one page size expected")
        self.page_bytes = sizes.pop()
        digest.check_pages(2, self.page_bytes)
        self.device = self.layers[0].device
        self.addresses = [layer.data_ptr() for layer in self.layers]


class SpaceBuffers:
    """Buffers of several page spaces: a page of one lies in each of its buffers, whose page sizes may differ."""

    def __init__(self, pools: Sequence[Sequence[PageBuffers]]) -> None:
        self.pools = pools
        self.device = pools[0][0].device
        rows = [
            [(address, buffers.page_bytes // 8) for buffers in space for address in buffers.addresses]
            for space in pools
        ]
        #: int64 [buffers, 2]: where each begins, and the 64-bit words of a page.
        self.table = torch.tensor([row for space in rows for row in space], dtype=torch.int64).to(self.device)
        self.counts = [len(space) for space in rows]
        self.pages = [min(layer.shape[0] for buffers in space for layer in buffers.layers) for space in pools]
        #: Of each space its first row in the table.
        self.firsts = [sum(self.counts[:number]) for number in range(len(rows))]
        #: Of the longest page, and kept: launches on any stream read them.
        self.multipliers = digest.multipliers(max(words for space in rows for _, words in space), self.device)


#: Flat, on the host; and the event after which they are there, None if they are already.
Found = tuple[digest.Digests, Event | None]


class Firsts(NamedTuple):
    """Tokens int64 [n] on a device, and which of them begin a page."""

    tokens: torch.Tensor
    at: Sequence[int]


#: The first tokens of pages: where they lie, or what they are.
Tokens = Firsts | Sequence[int]


class Table:
    """Numbers int64 [rows, columns] whose memory stays; of a row it is contiguous. One dimension is one row."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers if numbers.dim() == 2 else numbers.view(1, -1)
        check_numbers(self.numbers)
        self.device = numbers.device
        self.address = numbers.data_ptr()
        self.rows, self.columns = self.numbers.shape
        self.row_bytes = 8 * self.numbers.stride(0)


#: Of one of the spaces pages, and tokens of a page.
Parts = Sequence[tuple[int, Tokens, int]]
#: Of one of the spaces pages, tokens of a page, and where each digest has its place: [buffers, pool pages].
Places = Sequence[tuple[int, Tokens, int, Table]]
#: Digests [buffers, pages] to take from, and the pages; the same of where they go; tokens of a page.
Moves = Sequence[tuple[Table, Tokens, Table, Tokens, int]]
#: Digests [buffers, pages], some of the pages, and tokens of a page.
Reads = Sequence[tuple[Table, Tokens, int]]


class Sealer(Protocol):
    """Of moves two to one place: either. Digests of what is no page are left out, and 0 where they are answered."""

    def seal(self, moves: Moves, places: Places) -> None:
        """Takes digests over, then puts digests of what pages are now where they have their place: a column a page."""

    def move(self, moves: Moves, reads: Reads) -> Found:
        """Takes digests over, and reads others, in any order: of each [buffers, pages], one after another."""

    def digests(self, parts: Parts) -> Found:
        """Digests of what pages are now: of each part [buffers, pages], one after another."""


class Reader(Protocol):
    """Reads numbers of a device."""

    def tokens(self, listed: Sequence[Firsts]) -> Found:
        """The tokens themselves."""


class SealerTorch:
    def __init__(self, spaces: SpaceBuffers) -> None:
        self._spaces = spaces

    def seal(self, moves: Moves, places: Places) -> None:
        _move_torch(moves)
        for space, tokens, page_tokens, out in places:
            pages, known = _pages(tokens, out, page_tokens)
            out.numbers[:, pages[known]] = _digest_space_torch(self._spaces, space, pages[known])

    def move(self, moves: Moves, reads: Reads) -> Found:
        _move_torch(moves)
        return _read_torch(reads)

    def digests(self, parts: Parts) -> Found:
        now = []
        for space, tokens, page_tokens in parts:
            table = Table(torch.zeros((self._spaces.counts[space], self._spaces.pages[space]), dtype=torch.int64))
            self.seal((), [(space, tokens, page_tokens, table)])
            now.append((table, tokens, page_tokens))
        return _read_torch(now)


def _move_torch(moves: Moves) -> None:
    for source, source_tokens, target, target_tokens, page_tokens in moves:
        froms, from_known = _pages(source_tokens, source, page_tokens)
        tos, to_known = _pages(target_tokens, target, page_tokens)
        if len(froms) != len(tos):
            raise ValueError(f"digests of {len(froms)} pages to {len(tos)}")
        known = from_known & to_known
        target.numbers[:, tos[known]] = source.numbers[:, froms[known]]


def _pages(tokens: Tokens, table: Table, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Page numbers, and which of them are pages of the table."""
    if isinstance(tokens, Firsts):
        check_numbers(tokens.tokens, table.device)
        firsts = tokens.tokens[torch.tensor(tokens.at, dtype=torch.int64)]
    else:
        firsts = torch.tensor(tokens, dtype=torch.int64)
    return firsts // page_tokens, (firsts >= 0) & (firsts < table.columns * page_tokens)


def _read_torch(reads: Reads) -> Found:
    found = []
    for table, tokens, page_tokens in reads:
        pages, known = _pages(tokens, table, page_tokens)
        found.append(torch.where(known, table.numbers[:, pages.where(known, 0)], 0) if table.columns else known * 0)
    return _joined(found)


class ReaderTorch:
    def tokens(self, listed: Sequence[Firsts]) -> Found:
        for tokens, _ in listed:
            check_numbers(tokens)
        return _joined([tokens[torch.tensor(at, dtype=torch.int64)] for tokens, at in listed])


def _joined(found: Sequence[torch.Tensor]) -> Found:
    flat = [torch.empty(0, dtype=torch.int64), *[each.reshape(-1) for each in found]]
    return torch.cat(flat).numpy().view("uint64"), None


def check_numbers(numbers: torch.Tensor, device: torch.device | None = None) -> None:
    """Raises ValueError unless they are int64, contiguous in a row and on `device`: kernels go by their addresses."""
    rows = numbers.numel() and numbers.shape[-1] > 1 and numbers.stride(-1) != 1
    if numbers.dtype is not torch.int64 or rows or device not in (None, numbers.device):
        where = "" if device is None else f" on {device}"
        raise ValueError(
            f"numbers {numbers.dtype} of strides {numbers.stride()} on {numbers.device}: "
            f"contiguous int64{where} expected"
        )


def _digest_space_torch(spaces: SpaceBuffers, space: int, pages: torch.Tensor) -> torch.Tensor:
    layers = [layer for buffers in spaces.pools[space] for layer in buffers.layers]
    digests = [digest.digest_torch(layer[pages]) for layer in layers]
    return torch.stack([torch.from_numpy(row.view("int64")) for row in digests])
