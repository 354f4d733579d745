# mypy: allow-untyped-defs, allow-incomplete-defs
"""Digests of pages from one place to another, and to the host, in Triton: rows of one launch say which, and where."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4ctl.kernels.buffers import Firsts, check_numbers
from dsv4ctl.kernels.launch_triton import Kernel, Memory, Rows

_NO_TOKEN = 1 << 62  # of no page

# Some pages a row: how many buffers they have, how many tokens, how many they are; of both sides where the digest of
# page 0 would be, bytes from there to that of the next buffer, how many pages there are, and where in `rows` it is
# `told` which these are: of the other side, if it is not, the first ones.
_MOVE = 11
MOVE = tl.constexpr(_MOVE)
_BLOCK = 32


@triton.jit
def token_of(told):
    token = ~told
    if told >= 0:
        token = tl.load(told.to(tl.pointer_type(tl.int64)))
    return token


@triton.jit
def _move_kernel(rows_ptr, block: tl.constexpr):
    at, row = tl.program_id(0), rows_ptr + tl.program_id(2) * MOVE
    if at < tl.load(row + 2):
        page_tokens, others = tl.load(row + 1), tl.load(row + 10)
        token = token_of(tl.load(rows_ptr + tl.load(row + 6) + at))
        other = at * page_tokens
        if others > 0:
            other = token_of(tl.load(rows_ptr + others + at))
        page, other_page = token // page_tokens, other // page_tokens
        from_page = (token >= 0) & (page < tl.load(row + 5))
        to_page = (other >= 0) & (other_page < tl.load(row + 9))
        if from_page & to_page:
            buffer = tl.program_id(1) * block + tl.arange(0, block)
            source = tl.load(row + 3) + buffer * tl.load(row + 4) + page * 8
            target = tl.load(row + 7) + buffer * tl.load(row + 8) + other_page * 8
            here = buffer < tl.load(row)
            value = tl.load(source.to(tl.pointer_type(tl.int64)), mask=here)
            tl.store(target.to(tl.pointer_type(tl.int64)), value, mask=here)


_move = Kernel(_move_kernel, _BLOCK, warps=1)


class MoveRows:
    """Rows of one launch. A side: where the digest of page 0 would be, bytes to the next buffer's, how many pages."""

    def __init__(self, number):
        self.numbers = [0] * (number * _MOVE)
        self._number = self._buffers = self.longest = 0

    def add(self, buffers, page_tokens, source, pages, target, others=()):
        """What is told of the pages of both sides; of the other one nothing: the first ones."""
        row, begin = self._number * _MOVE, len(self.numbers)
        self.numbers += pages
        self.numbers += others
        other = begin + len(pages) if others else 0
        self.numbers[row : row + _MOVE] = buffers, page_tokens, len(pages), *source, begin, *target, other
        self._number += 1
        self.longest, self._buffers = max(self.longest, len(pages)), max(self._buffers, buffers)

    def add_moves(self, moves):
        for source, tokens, target, others, page_tokens in moves:
            froms, tos = told(tokens, source.device), told(others, target.device)
            if len(froms) != len(tos):
                raise ValueError(f"digests of {len(froms)} pages to {len(tos)}")
            self.add(source.rows, page_tokens, _side(source), froms, _side(target), tos)

    def add_reads(self, reads, memory):
        """To some of the memory, which is returned."""
        listed = [(table, told(tokens, table.device), page_tokens) for table, tokens, page_tokens in reads]
        taken, address = memory.take(sum(table.rows * len(pages) for table, pages, _ in listed))
        for table, pages, page_tokens in listed:
            size = len(pages)
            self.add(table.rows, page_tokens, _side(table), pages, (address, 8 * size, size))
            address += 8 * table.rows * size
        return taken

    def launch(self, device, stream, rows):
        """`rows`: where the numbers are by now."""
        if self.longest:
            grid = self.longest, triton.cdiv(self._buffers, _BLOCK), self._number
            _move(grid, device, stream, rows)


def told(tokens, device):
    """Of each page where its first token lies, or the complement of that token."""
    if isinstance(tokens, Firsts):
        check_numbers(tokens.tokens, device)
        address = tokens.tokens.data_ptr()
        return [address + 8 * at for at in tokens.at]
    return [~token if token >= 0 else ~_NO_TOKEN for token in tokens]


def nothing():
    """A page of no buffers: to compile."""
    moves = MoveRows(1)
    moves.add(0, 1, (0, 0, 0), [~0], (0, 0, 0))
    return moves


def _side(table):
    return table.address, table.row_bytes, table.columns


class ReaderTriton:
    """`buffers.ReaderTorch`, in one launch on the current stream, into pinned host memory."""

    def __init__(self, device):
        self._device = device
        self._rows = Rows(device)
        self._memory = Memory(device.type == "cuda")
        self._launch(nothing())

    def tokens(self, listed):
        memory, place = self._memory.take(sum(len(at) for _, at in listed))
        moves = MoveRows(len(listed))
        for tokens, at in listed:
            check_numbers(tokens, self._device)
            moves.add(1, 1, (tokens.data_ptr(), 0, len(tokens)), [~one for one in at], (place, 0, len(at)))
            place += 8 * len(at)
        return memory, self._launch(moves, memory, listed)

    def _launch(self, moves, *kept):
        moves.launch(self._device, *self._rows.put(moves.numbers, *kept))
        return self._rows.begun()
