# mypy: allow-untyped-defs, allow-incomplete-defs
"""Page digests in Triton of pages of several spaces at once: rows of one launch say where each lies and goes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4ctl.kernels.digest_triton import digest_of
from dsv4ctl.kernels.launch_triton import Kernel, Memory, Rows
from dsv4ctl.kernels.moves_triton import MoveRows, nothing, token_of, told

_BLOCK, _WARPS = 4096, 16  # a request's own page of SGLang has 65,536 words
_AT_ONCE = 16  # pages of a list that one row names


@triton.jit
def _digest_page(table_ptr, odd_ptr, buffer, page, place, block: tl.constexpr):
    words = tl.load(table_ptr + buffer * 2 + 1)
    digest = digest_of(tl.load(table_ptr + buffer * 2) + page * words * 8, words, odd_ptr, block)
    tl.store(place.to(tl.pointer_type(tl.int64)), digest)


# Up to `_AT_ONCE` pages of a space a row: its first buffer, how many it has, tokens of a page, what a page's number has
# to be below, bytes from a digest to that of the next buffer, whether a digest has its place by its page's number or in
# turn, where that of page 0, or of the first, would go, where in `rows` it is `told` which pages these are, how many.
_DIGESTS = 9
DIGESTS = tl.constexpr(_DIGESTS)


@triton.jit
def _digest_rows_kernel(table_ptr, odd_ptr, rows_ptr, block: tl.constexpr):
    at, buffer, row = tl.program_id(0), tl.program_id(1), rows_ptr + tl.program_id(2) * DIGESTS
    if (buffer < tl.load(row + 1)) & (at < tl.load(row + 8)):
        token = token_of(tl.load(rows_ptr + tl.load(row + 7) + at))
        page = token // tl.load(row + 2)
        if (token >= 0) & (page < tl.load(row + 3)):
            which = tl.where(tl.load(row + 5) == 1, page, at.to(tl.int64))
            place = tl.load(row + 6) + buffer * tl.load(row + 4) + which * 8
            _digest_page(table_ptr, odd_ptr, tl.load(row) + buffer, page, place, block)


_digest_rows = Kernel(_digest_rows_kernel, _BLOCK, warps=_WARPS)


class SealerTriton:
    """`buffers.SealerTorch`, on `stream` (None: the current one), in one launch, or in two if it moves and seals."""

    def __init__(self, spaces, stream=None):
        self._spaces = spaces
        self._most = max(spaces.counts)
        self._rows = Rows(spaces.device, stream)
        self._now = Rows(spaces.device, stream)  #: of `digests`: on streams of loads, which may take long
        self._memory = Memory(spaces.device.type == "cuda")
        if stream is not None:  # which is not behind what made the spaces
            torch.cuda.synchronize(spaces.device)
        self._begin(nothing(), [0] * _DIGESTS, (1, 1, 1))  # compiles: a row of no page
        self._rows.begun()

    def seal(self, moves, places):
        moved = MoveRows(len(moves))
        moved.add_moves(moves)
        listed = [
            (space, page_tokens, out.columns, out.row_bytes, 1, out.address, told(tokens, out.device))
            for space, tokens, page_tokens, out in places
        ]
        sealed, grid = self._numbers(listed)
        if moved.longest or grid[2]:
            self._begin(moved, sealed, grid, moves, places)
            self._rows.begun()

    def move(self, moves, reads):
        moved = MoveRows(len(moves) + len(reads))
        moved.add_moves(moves)
        memory = moved.add_reads(reads, self._memory)
        self._begin(moved, [], (0, 0, 0), memory, moves, reads)
        return memory, self._rows.begun()

    def digests(self, parts):
        counts = self._spaces.counts
        told_parts = [(space, told(tokens, self._spaces.device), page_tokens) for space, tokens, page_tokens in parts]
        memory, address = self._memory.take(sum(counts[space] * len(pages) for space, pages, _ in told_parts))
        listed = []
        for space, pages, page_tokens in told_parts:
            size = len(pages)
            listed.append((space, page_tokens, self._spaces.pages[space], 8 * size, 0, address, pages))
            address += 8 * counts[space] * size
        numbers, grid = self._numbers(listed)
        self._launch(grid, *self._now.put(numbers, memory, parts))
        return memory, self._now.begun()

    def _numbers(self, listed):
        """The numbers of a launch, and its grid.

        Of (space, tokens of a page, below what a page's number must be, bytes from a digest to that of the next buffer,
        whether by number, address, what is told of the pages).
        """
        number = sum(-(-len(pages) // _AT_ONCE) for *_, pages in listed)
        rows, named, longest = list[int](), list[int](), 0
        begin = number * _DIGESTS
        for space, page_tokens, columns, row_bytes, by_number, address, pages in listed:
            row = self._spaces.firsts[space], self._spaces.counts[space], page_tokens, columns, row_bytes, by_number
            for at in range(0, len(pages), _AT_ONCE):
                size = min(len(pages) - at, _AT_ONCE)
                rows += (*row, address if by_number else address + 8 * at, begin + at, size)
                if size > longest:
                    longest = size
            begin += len(pages)
            named += pages
        return rows + named, (longest, self._most, number)

    def _launch(self, grid, stream, rows):
        if grid[2]:
            _digest_rows(grid, self._spaces.device, stream, self._spaces.table, self._spaces.multipliers, rows)

    def _begin(self, moved, sealed, grid, *kept):
        behind = len(moved.numbers) + len(moved.numbers) % 2  # at 16 B, as kernels expect it
        stream, rows = self._rows.put([*moved.numbers, *[0] * (behind - len(moved.numbers)), *sealed], *kept)
        moved.launch(self._spaces.device, stream, rows)
        self._launch(grid, stream, rows[behind:])
