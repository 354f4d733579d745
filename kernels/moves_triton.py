# mypy: allow-untyped-defs, allow-incomplete-defs
"""Numbers of pages from one place to another in Triton: rows of one launch say from where, and to where."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4ctl.kernels.buffers import Firsts, check_numbers
from dsv4ctl.kernels.launch_triton import Kernel, Memory, Rows

_NO_TOKEN = 1 << 62  # of no page

# A page a row: how many buffers its space has, tokens of a page, and of both sides where the number of page 0 would be,
# bytes from there to that of the next buffer, how many pages there are, and where the page's first token lies, or the
# complement of that token. Of 16 B times n, so that rows of another kind may follow.
_MOVE = 10
MOVE = tl.constexpr(_MOVE)
_BLOCK = 32


@triton.jit
def _token_at(where):
    token = ~where
    if where >= 0:
        token = tl.load(where.to(tl.pointer_type(tl.int64)))
    return token


@triton.jit
def _move_kernel(rows_ptr, block: tl.constexpr):
    row, buffer = rows_ptr + tl.program_id(0) * MOVE, tl.program_id(1) * block + tl.arange(0, block)
    source_token, target_token = _token_at(tl.load(row + 5)), _token_at(tl.load(row + 9))
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
        for token, target_token in zip(_told(source_tokens, source), _told(target_tokens, target), strict=True):
            rows += (*begin, token, *end, target_token)
    return rows, len(rows) // _MOVE


def _told(tokens, table):
    """As rows have them."""
    if isinstance(tokens, Firsts):
        check_numbers(tokens.tokens, table.numbers.device)
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

    def columns(self, reads):
        memory, place = self._memory.take(sum(table.rows * len(columns) for table, columns in reads))
        rows, most = list[int](), 0
        for table, columns in reads:
            size = len(columns)
            begin, end = (table.rows, 1, table.address, table.row_bytes, table.columns), (place, 8 * size, size)
            for at, column in enumerate(columns):
                rows += (*begin, ~column, *end, ~at)
            place += 8 * table.rows * size
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
