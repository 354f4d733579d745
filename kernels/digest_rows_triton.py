# mypy: allow-untyped-defs, allow-incomplete-defs
"""Page digests in Triton of pages of several spaces at once: rows of one launch say where each lies and goes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4ctl.kernels.digest_triton import digest_of
from dsv4ctl.kernels.launch_triton import Kernel, Memory, Rows
from dsv4ctl.kernels.moves_triton import MoveRows, side, token_of, told

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
        stream, rows = self._rows.put(numbers, *kept)
        if number:
            of = self._spaces
            _digest_lists((longest, self._most, number), of.device, stream, of.table, of.multipliers, rows)


# Some pages of a space a row: its first buffer, how many it has, tokens of a page, what a page's number must be below,
# where the digest of page 0 would go, bytes from there to that of the next buffer, where in `rows` it is `told` which
# pages these are, and how many.
_SEAL = 8
SEAL = tl.constexpr(_SEAL)


@triton.jit
def _seal_kernel(table_ptr, odd_ptr, rows_ptr, block: tl.constexpr):
    at, buffer, row = tl.program_id(0), tl.program_id(1), rows_ptr + tl.program_id(2) * SEAL
    if (buffer < tl.load(row + 1)) & (at < tl.load(row + 7)):
        token = token_of(tl.load(rows_ptr + tl.load(row + 6) + at))
        page = token // tl.load(row + 2)
        if (token >= 0) & (page < tl.load(row + 3)):
            place = tl.load(row + 4) + buffer * tl.load(row + 5) + page * 8
            _digest_page(table_ptr, odd_ptr, tl.load(row) + buffer, page, place, block)


_seal = Kernel(_seal_kernel, _BLOCK, warps=_WARPS)


class SealTriton:
    """`buffers.seal_torch`, in a launch for each of both, on the current stream."""

    def __init__(self, spaces):
        self._spaces = spaces
        self._most = max(spaces.counts)
        self._rows = Rows(spaces.device)
        compiled = MoveRows(1)
        compiled.add(0, 1, (0, 0, 0), [~0], (0, 0, 0))  # a page of nothing
        self._begin(compiled, [0] * _SEAL, 1, 1)

    def __call__(self, moves, places):
        moved = MoveRows(len(moves))
        for source, tokens, target, others, page_tokens in moves:
            froms, tos = told(tokens, source.device), told(others, target.device)
            if len(froms) != len(tos):
                raise ValueError(f"digests of {len(froms)} pages to {len(tos)}")
            moved.add(source.rows, page_tokens, side(source), froms, side(target), tos)
        rows, listed, longest = list[int](), list[int](), 0
        for space, tokens, page_tokens, out in places:
            pages = told(tokens, out.device)
            rows += (self._spaces.firsts[space], self._spaces.counts[space], page_tokens, out.columns)
            rows += (out.address, out.row_bytes, len(places) * _SEAL + len(listed), len(pages))
            listed += pages
            longest = max(longest, len(pages))
        if longest or moved.longest:
            self._begin(moved, [*rows, *listed], longest, len(places), moves, places)

    def _begin(self, moved, sealed, longest, number, *kept):
        behind = len(moved.numbers) + len(moved.numbers) % 2  # at 16 B, as kernels expect it
        stream, rows = self._rows.put([*moved.numbers, *[0] * (behind - len(moved.numbers)), *sealed], *kept)
        moved.launch(self._spaces.device, stream, rows)
        if longest:
            of = self._spaces
            _seal((longest, self._most, number), of.device, stream, of.table, of.multipliers, rows[behind:])
        self._rows.begun()
