# mypy: allow-untyped-defs, allow-incomplete-defs
"""Page digests in Triton of pages of several spaces at once: rows of one launch say where each lies and goes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4ctl.kernels.digest_triton import digest_of
from dsv4ctl.kernels.launch_triton import Kernel, Memory, Rows
from dsv4ctl.kernels.moves_triton import move, rows_of, token_of, told

_BLOCK, _WARPS = 4096, 16  # a request's own page of SGLang has 65,536 words
_AT_ONCE = 16  # pages of a list that one row names


@triton.jit
def _digest_page(table_ptr, odd_ptr, buffer, page, place, block: tl.constexpr):
    words = tl.load(table_ptr + buffer * 2 + 1)
    digest = digest_of(tl.load(table_ptr + buffer * 2) + page * words * 8, words, odd_ptr, block)
    tl.store(place.to(tl.pointer_type(tl.int64)), digest)


# Up to `_AT_ONCE` pages of a list a row: first buffer of their space, how many it has, where in `rows` their numbers
# begin, how many, where digests of the first buffer go, bytes from there to those of the next.
_LIST = 6
LIST = tl.constexpr(_LIST)


@triton.jit
def _digest_lists_kernel(table_ptr, odd_ptr, rows_ptr, block: tl.constexpr):
    at, buffer, row = tl.program_id(0), tl.program_id(1), rows_ptr + tl.program_id(2) * LIST
    if (buffer < tl.load(row + 1)) & (at < tl.load(row + 3)):
        page = tl.load(rows_ptr + tl.load(row + 2) + at)
        place = tl.load(row + 4) + buffer * tl.load(row + 5) + at * 8
        _digest_page(table_ptr, odd_ptr, tl.load(row) + buffer, page, place, block)


_digest_lists = Kernel(_digest_lists_kernel, _BLOCK, warps=_WARPS)


class PartsTriton:
    """`buffers.digest_parts_torch`, in one launch on `stream` (on a CPU None), into pinned host memory."""

    def __init__(self, spaces, stream):
        self._spaces = spaces
        self._most = max(spaces.counts)
        self._rows = Rows(spaces.device, stream)
        self._memory = Memory(stream is not None)
        if stream is not None:
            torch.cuda.synchronize(spaces.device)
        self._begin([0] * _LIST, 1, 1)  # compiles: a row of no page
        self._rows.begun()

    def __call__(self, parts):
        """Digests of at least one part, and the event after which they are there, None if they are already."""
        counts, firsts = self._spaces.counts, self._spaces.firsts
        memory, place = self._memory.take(sum(counts[space] * len(pages) for space, pages in parts))
        number = sum(-(-len(pages) // _AT_ONCE) for _, pages in parts)
        rows, listed, longest = list[int](), list[int](), 0
        for space, pages in parts:
            buffers, size = counts[space], len(pages)
            for at in range(0, size, _AT_ONCE):
                each = pages[at : at + _AT_ONCE]
                begin = number * _LIST + len(listed)
                rows += (firsts[space], buffers, begin, len(each), place + 8 * at, 8 * size)
                listed += each
                longest = max(longest, len(each))
            place += 8 * buffers * size
        self._begin([*rows, *listed], longest, number, memory)
        return memory, self._rows.begun()

    def _begin(self, numbers, longest, number, *kept):
        rows = self._rows.put(numbers, *kept)
        if number:
            of = self._spaces
            grid = longest, self._most, number
            _digest_lists(grid, of.device, self._rows.stream, of.table, of.multipliers, rows)


# A page a row: first buffer of its space, how many it has, what is `told` of the page, tokens of a page, what its
# number must be below, where the digest of page 0 would go, bytes from there to that of the next buffer.
_TOKEN = 7
TOKEN = tl.constexpr(_TOKEN)


@triton.jit
def _digest_tokens_kernel(table_ptr, odd_ptr, rows_ptr, block: tl.constexpr):
    row, buffer = rows_ptr + tl.program_id(0) * TOKEN, tl.program_id(1)
    if buffer < tl.load(row + 1):
        token = token_of(tl.load(row + 2))
        page = token // tl.load(row + 3)
        if (token >= 0) & (page < tl.load(row + 4)):
            place = tl.load(row + 5) + buffer * tl.load(row + 6) + page * 8
            _digest_page(table_ptr, odd_ptr, tl.load(row) + buffer, page, place, block)


_digest_tokens = Kernel(_digest_tokens_kernel, _BLOCK, warps=_WARPS)


class SealTriton:
    """`buffers.seal_torch`, in a launch for each of both, on the current stream."""

    def __init__(self, spaces):
        self._spaces = spaces
        self._most = max(spaces.counts)
        self._rows = Rows(spaces.device)
        # Compiles: a row of no page.
        self._begin(self._rows.put([0] * _TOKEN), 1)
        self._rows.begun()

    def __call__(self, moves, places):
        numbers, moved = rows_of(moves)
        behind = len(numbers)
        numbers += self._rows_of(places)
        if not numbers:
            return
        rows = self._rows.put(numbers, moves, places)
        most = max((source.rows for source, *_ in moves), default=0)
        move(self._spaces.device, self._rows.stream, rows, moved, most)
        self._begin(rows[behind:], (len(numbers) - behind) // _TOKEN)
        self._rows.begun()

    def _rows_of(self, places):
        rows = list[int]()
        for space, tokens, page_tokens, out in places:
            buffers = self._spaces.firsts[space], self._spaces.counts[space]
            place = page_tokens, out.columns, out.address, out.row_bytes
            for page in told(tokens, out.device):
                rows += (*buffers, page, *place)
        return rows

    def _begin(self, rows, number):
        if number:
            of = self._spaces
            _digest_tokens((number, self._most, 1), of.device, self._rows.stream, of.table, of.multipliers, rows)
