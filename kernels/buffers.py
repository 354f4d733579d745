"""Digests of pages that lie in several buffers (one a layer, allocated apart), in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dsv4ctl.kernels import digest


class PageBuffers:
    """Buffers [pages, page_bytes], contiguous, of one page size, on one device. `pointers`: where they begin, int64."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.layers = [buffer.view(torch.uint8) for buffer in buffers]
        sizes = {layer.shape[1] for layer in self.layers}
        if len(sizes) != 1:
            raise ValueError(f"pages of {sorted(sizes)} B: buffers of one page size expected")
        self.page_bytes = sizes.pop()
        digest.check_pages(2, self.page_bytes)
        self.device = self.layers[0].device
        self.addresses = [layer.data_ptr() for layer in self.layers]
        self.pointers = torch.tensor(self.addresses, dtype=torch.int64).to(self.device)


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
        #: Of each space its first row in the table.
        self.firsts = [sum(self.counts[:number]) for number in range(len(rows))]
        #: Of the longest page, and kept: launches on any stream read them.
        self.multipliers = digest.multipliers(max(words for space in rows for _, words in space), self.device)


#: Of one of the spaces pages by their numbers, which it has.
Parts = Sequence[tuple[int, Sequence[int]]]
#: Digests of at least one part, [buffers, pages] of each one after another: flat, on the host; and the event after
#: which they are there, None if they are already.
DigestParts = Callable[[Parts], tuple[digest.Digests, torch.cuda.Event | None]]
#: Of one of the spaces tokens int64 [n] on their device; which of them begin a page; tokens of a page; and where each
#: digest has its place: int64 [buffers, pool pages], rows contiguous.
Places = Sequence[tuple[int, torch.Tensor, Sequence[int], int, torch.Tensor]]
#: Digests int64 [buffers, pages], rows contiguous, to take from, and tokens int64 [n] that begin their pages; the same
#: of where they go; tokens of a page. Tokens may lie on the host.
Moves = Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]]
#: Takes digests of some pages over to others (two to one place: either), then puts digests of pages where they have
#: their place: `out[:, pages]` of each. A page without one is left out.
Seal = Callable[[Moves, Places], None]
#: Numbers int64 [n, columns], rows contiguous, and which columns to read.
Reads = Sequence[tuple[torch.Tensor, Sequence[int]]]
#: Of each [n, read columns], one after another: flat, on the host; and the event after which they are there, None if
#: they are already.
Read = Callable[[Reads], tuple[digest.Digests, torch.cuda.Event | None]]


def digest_buffers_torch(buffers: PageBuffers, pages: torch.Tensor) -> torch.Tensor:
    """Digests of `pages` int [n]: int64 [buffers, n], the bits of `digest.digest_torch`."""
    rows = [digest.digest_torch(layer[pages.long()]) for layer in buffers.layers]
    return torch.stack([torch.from_numpy(row.view("int64")) for row in rows]).to(buffers.device)


def digest_parts_torch(spaces: SpaceBuffers, parts: Parts) -> digest.Digests:
    """Digests of at least one part, [buffers, pages] of each one after another: flat."""
    found = [_digest_space_torch(spaces, space, torch.tensor(pages, dtype=torch.int64)) for space, pages in parts]
    return torch.cat([each.reshape(-1) for each in found]).numpy().view("uint64")


def seal_torch(spaces: SpaceBuffers, moves: Moves, places: Places) -> None:
    for source, source_tokens, target, target_tokens, page_tokens in moves:
        for tokens in (source_tokens, target_tokens):
            check_tokens(tokens)
        pages = [(tokens // page_tokens).to(source.device) for tokens in (source_tokens, target_tokens)]
        known = (pages[0] >= 0) & (pages[0] < source.shape[1]) & (pages[1] >= 0) & (pages[1] < target.shape[1])
        target[:, pages[1][known]] = source[:, pages[0][known]]
    for space, tokens, firsts, page_tokens, out in places:
        check_tokens(tokens, spaces.device)
        listed = tokens[torch.tensor(list(firsts), dtype=torch.int64, device=tokens.device)]
        found = listed[(listed >= 0) & (listed < out.shape[1] * page_tokens)] // page_tokens
        out[:, found] = _digest_space_torch(spaces, space, found)


def read_torch(reads: Reads) -> digest.Digests:
    found = [numbers[:, torch.tensor(columns, dtype=torch.int64)].reshape(-1) for numbers, columns in reads]
    return torch.cat([torch.empty(0, dtype=torch.int64), *found]).numpy().view("uint64")


def check_tokens(tokens: torch.Tensor, device: torch.device | None = None) -> None:
    """Raises ValueError unless they are int64 and on `device`: kernels read them by their addresses."""
    if tokens.dtype is not torch.int64 or device not in (None, tokens.device):
        where = "" if device is None else f" on {device}"
        raise ValueError(f"tokens {tokens.dtype} on {tokens.device}: int64{where} expected")


def _digest_space_torch(spaces: SpaceBuffers, space: int, pages: torch.Tensor) -> torch.Tensor:
    return torch.cat([digest_buffers_torch(buffers, pages) for buffers in spaces.pools[space]])
