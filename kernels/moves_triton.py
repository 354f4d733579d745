# mypy: allow-untyped-defs, allow-incomplete-defs
"""Numbers of pages from one place to another in Triton: rows of one launch say from where, and to where."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4ctl.kernels.buffers import check_tokens
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


def move(device, rows, number, buffers, stream=None):
    """Launches the first `number` of these rows, of spaces with at most so many buffers."""
    if number:
        _move((number, triton.cdiv(buffers, _BLOCK), 1), device, rows, stream=stream)


def rows_of(moves):
    """Rows of `buffers.Moves`, one after another, and how many."""
    rows = list[int]()
    for source, source_tokens, target, target_tokens, page_tokens in moves:
        begin, end = _side(source), _side(target)
        size = source.shape[0], page_tokens
        pages = zip(_tokens(source_tokens, source.device), _tokens(target_tokens, target.device), strict=True)
        for token, target_token in pages:
            rows += (*size, *begin, token, *end, target_token)
    return rows, len(rows) // _MOVE


def _side(numbers):
    return numbers.data_ptr(), 8 * numbers.stride(0), numbers.shape[1]


def _tokens(tokens, device):
    """As rows have them."""
    check_tokens(tokens)
    if tokens.device == device:
        step = 8 * tokens.stride(0)
        return range(tokens.data_ptr(), tokens.data_ptr() + step * len(tokens), step)
    return [~token if token >= 0 else ~_NO_TOKEN for token in tokens.tolist()]


class ReaderTriton:
    """`buffers.read_torch`, in one launch on `stream` (None: the current one), into pinned host memory."""

    def __init__(self, device, stream=None):
        self._device = device
        self._stream = stream
        self._rows = Rows(device, stream)
        self._memory = Memory(device.type == "cuda")
        # Compiles: a row of no page.
        move(device, self._rows.put((0, 1, 0, 0, 0, ~0, 0, 0, 0, ~0)), 1, 1, stream)
        self._rows.begun()

    def __call__(self, reads):
        """The numbers, and the event after which they are there, None if they are already."""
        memory, place = self._memory.take(sum(numbers.shape[0] * len(columns) for numbers, columns in reads))
        rows, buffers, kept = list[int](), 0, [memory]
        for numbers, columns in reads:
            count, size = numbers.shape[0], len(columns)
            begin, end = (count, 1, *_side(numbers)), (place, 8 * size, size)
            for at, column in enumerate(columns):
                rows += (*begin, ~column, *end, ~at)
            place += 8 * count * size
            buffers = max(buffers, count)
            kept.append(numbers)
        move(self._device, self._rows.put(rows, *kept), len(rows) // _MOVE, buffers, self._stream)
        return memory, self._rows.begun()
