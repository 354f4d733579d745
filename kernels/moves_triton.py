# mypy: allow-untyped-defs, allow-incomplete-defs
"""Numbers of pages from one place to another in Triton: rows of one launch say from where, and to where."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4ctl.kernels.buffers import Firsts, check_numbers
from dsv4ctl.kernels.launch_triton import Kernel, Memory, Rows

_NO_TOKEN = 1 << 62  # of no page

# A page a row: how many buffers its space has, tokens of a page, and of both sides where the number of page 0 would be,
# bytes from there to that of the next buffer, how many pages there are, and what is `told` of the page. Of 16 B times
# n, so that rows of another kind may follow.
_MOVE = 10
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
    row, buffer = rows_ptr + tl.program_id(0) * MOVE, tl.program_id(1) * block + tl.arange(0, block)
    source_token, target_token = token_of(tl.load(row + 5)), token_of(tl.load(row + 9))
    source_page, target_page = source_token // tl.load(row + 1), target_token // tl.load(row + 1)
    from_page = (source_token >= 0) & (source_page < tl.load(row + 4))
    to_page = (target_token >= 0) & (target_page < tl.load(row + 8))
    if from_page & to_page:
        here = buffer < tl.load(row)
        source = tl.load(row + 2) + buffer * tl.load(row + 3) + source_page * 8
        target = tl.load(row + 6) + buffer * tl.load(row + 7) + target_page * 8
        value = tl.load(source.to(tl.pointer_type(tl.int64)), mask=here)
        tl.store(target.to(tl.pointer_type(tl.int64)), value, mask=here)


_move = Kernel(_move_kernel, _BLOCK, warps=1)


def move(device, stream, rows, number, buffers):
    """Launches the first `number` of these rows, of spaces with at most so many buffers."""
    if number:
        _move((number, triton.cdiv(buffers, _BLOCK), 1), device, stream, rows)


def rows_of(moves):
    """Rows of `buffers.Moves`, one after another, and how many."""
    rows = list[int]()
    for source, source_tokens, target, target_tokens, page_tokens in moves:
        begin = source.rows, page_tokens, source.address, source.row_bytes, source.columns
        end = target.address, target.row_bytes, target.columns
        froms, tos = told(source_tokens, source.device), told(target_tokens, target.device)
        for one, other in zip(froms, tos, strict=True):
            rows += (*begin, one, *end, other)
    return rows, len(rows) // _MOVE


def told(tokens, device):
    """Of each page where its first token lies, or the complement of that token."""
    if isinstance(tokens, Firsts):
        check_numbers(tokens.tokens, device)
        address = tokens.tokens.data_ptr()
        return [address + 8 * at for at in tokens.at]
    return [~token if token >= 0 else ~_NO_TOKEN for token in tokens]


class ReaderTriton:
    """`buffers.ReaderTorch`, in one launch on `stream` (None: the current one), into pinned host memory."""

    def __init__(self, device, stream=None):
        self._device = device
        self._rows = Rows(device, stream)
        self._memory = Memory(device.type == "cuda")
        self._begin((0, 1, 0, 0, 0, ~0, 0, 0, 0, ~0), 1)  # compiles: a row of no page
        self._rows.begun()

    def pages(self, reads):
        listed = [told(tokens, table.device) for table, tokens, _ in reads]
        memory, place = self._memory.take(
            sum(table.rows * len(pages) for (table, *_), pages in zip(reads, listed, strict=True))
        )
        rows, most = list[int](), 0
        for (table, _, page_tokens), pages in zip(reads, listed, strict=True):
            size = len(pages)
            begin = table.rows, page_tokens, table.address, table.row_bytes, table.columns
            for page in pages:
                rows += (*begin, page, place, 8 * size, 1, ~0)
                place += 8
            place += 8 * (table.rows - 1) * size
            most = max(most, table.rows)
        self._begin(rows, most, memory, reads)
        return memory, self._rows.begun()

    def tokens(self, listed):
        memory, place = self._memory.take(sum(len(at) for _, at in listed))
        rows = list[int]()
        for tokens, at in listed:
            check_numbers(tokens, self._device)
            address = tokens.data_ptr()
            for one in at:
                rows += (1, 1, address + 8 * one, 0, 1, ~0, place, 0, 1, ~0)
                place += 8
        self._begin(rows, 1, memory, listed)
        return memory, self._rows.begun()

    def _begin(self, numbers, most, *kept):
        rows = self._rows.put(numbers, *kept)
        move(self._device, self._rows.stream, rows, len(numbers) // _MOVE, most)
