# mypy: allow-untyped-defs, allow-incomplete-defs
"""Page digests in Triton of pages of several spaces at once: rows of one launch say where each lies and goes."""

from __future__ import annotations

import struct
from collections import deque

import numpy as np
import torch
import triton
import triton.language as tl

from dsv4ctl.kernels.buffers import Moves, Places, SpaceBuffers, check_tokens
from dsv4ctl.kernels.digest_triton import digest_of

_BLOCK, _WARPS = 4096, 16  # a request's own page of SGLang has 65,536 words
_AT_ONCE = 16  # pages of a list that one row names
_NEAR = 4  # rows that a kernel reads where they are written: up to 32 pages of one of a room's spaces, and 16 of two
_SLOTS = 8  # calls that may be under way at once
_STAGED = 8192  # numbers, 64 KiB: what the driver copies aside at once
_NO_TOKEN = 1 << 62  # of no page
_MEMORY = 65_536  # digests that are handed out of one piece: to ask for pinned memory takes longer than to use it


class _Kernel:
    """A kernel of addresses alone, of memory that is aligned as PyTorch aligns it: compiled once for each device.

    It is launched by its handle, on a stream that need not be entered: that takes half the time of Triton's own way.
    """

    def __init__(self, kernel, *constants, warps):
        self._kernel = kernel
        self._constants = constants
        self._warps = warps
        self._compiled = {}

    def __call__(self, grid, *tensors, stream=None):
        """On the current stream, or on `stream`."""
        device = tensors[0].device
        compiled = self._compiled.get(device)
        if compiled is None:  # on a CPU always
            with torch.cuda.stream(stream):
                self._compiled[device] = self._kernel[grid](*tensors, *self._constants, num_warps=self._warps)
        else:
            handle = (torch.cuda.current_stream(device) if stream is None else stream).cuda_stream
            compiled[grid](*[tensor.data_ptr() for tensor in tensors], *self._constants, stream=handle)


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


_digest_lists = _Kernel(_digest_lists_kernel, _BLOCK, warps=_WARPS)


class _Slot:
    """What the device reads, and writes to, until `there`."""

    def __init__(self, gpu):
        self.rows = torch.zeros(_NEAR * (_LIST + _AT_ONCE), dtype=torch.int64, pin_memory=gpu)
        self.bytes = self.rows.numpy().data.cast("B")
        self.copied = None  #: rows, if there are more
        self.memory = None
        self.there = torch.cuda.Event() if gpu else None


class PartsTriton:
    """`buffers.digest_parts_torch`, on `stream` (on a CPU None), into pinned host memory.

    Few rows are read where they are written, in pinned memory. Beyond `_SLOTS` a call waits for the device.
    """

    def __init__(self, spaces, stream):
        self._spaces = spaces
        self._stream = stream
        self._most = max(spaces.counts)
        self._memory, self._address, self._used = np.empty(0, dtype=np.uint64), 0, 0
        self._slots = deque(_Slot(stream is not None) for _ in range(_SLOTS))
        if stream is not None:
            torch.cuda.synchronize(spaces.device)
        self._begin(self._slots[0].rows, 1, 1)  # compiles: a row of no page
        if (there := self._slots[0].there) is not None:
            there.record(stream)

    def __call__(self, parts):
        """Digests of at least one part, and the event after which they are there, None if they are already."""
        counts, firsts = self._spaces.counts, self._spaces.firsts
        memory, place = self._room_for(sum(counts[space] * len(pages) for space, pages in parts))
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
        self._slots.rotate(-1)
        slot = self._slots[-1]
        if slot.there is not None and not slot.there.query():
            slot.there.synchronize()
        slot.memory, slot.copied = memory, None
        if number > _NEAR:
            with torch.cuda.stream(self._stream):
                slot.copied = _on_device([*rows, *listed], self._spaces.device)
            self._begin(slot.copied, longest, number)
        elif number:
            struct.pack_into(f"={len(rows) + len(listed)}q", slot.bytes, 0, *rows, *listed)
            self._begin(slot.rows, longest, number)
        if slot.there is not None:
            slot.there.record(self._stream)
        return memory, slot.there

    def _begin(self, rows, longest, number):
        grid = longest, self._most, number
        _digest_lists(grid, self._spaces.table, self._spaces.multipliers, rows, stream=self._stream)

    def _room_for(self, size):
        """So much memory, and its address."""
        if self._used + size > len(self._memory):
            pinned = self._stream is not None
            piece = torch.empty(max(size, _MEMORY), dtype=torch.int64, pin_memory=pinned)
            # A slice of this takes a tenth of the time of one of that, and keeps it alive.
            self._memory, self._address, self._used = piece.numpy().view(np.uint64), piece.data_ptr(), 0
        begin, self._used = self._used, self._used + size
        return self._memory[begin : self._used], self._address + 8 * begin


# A page a row: first buffer of its space, how many it has, where its first token lies (int64), tokens of a page, what
# its number must be below, where the digest of page 0 would go, bytes from there to that of the next buffer.
_TOKEN = 7
TOKEN = tl.constexpr(_TOKEN)


@triton.jit
def _digest_tokens_kernel(table_ptr, odd_ptr, rows_ptr, block: tl.constexpr):
    row, buffer = rows_ptr + tl.program_id(0) * TOKEN, tl.program_id(1)
    if buffer < tl.load(row + 1):
        token = tl.load(tl.load(row + 2).to(tl.pointer_type(tl.int64)))
        page = token // tl.load(row + 3)
        if (token >= 0) & (page < tl.load(row + 4)):
            place = tl.load(row + 5) + buffer * tl.load(row + 6) + page * 8
            _digest_page(table_ptr, odd_ptr, tl.load(row) + buffer, page, place, block)


_digest_tokens = _Kernel(_digest_tokens_kernel, _BLOCK, warps=_WARPS)


def digest_into_triton(spaces: SpaceBuffers, places: Places) -> None:
    """`buffers.digest_into_torch`, in one launch that no host waits for."""
    rows = list[int]()
    for space, tokens, firsts, page_tokens, out in places:
        check_tokens(tokens, spaces.device)
        buffers, where = (spaces.firsts[space], spaces.counts[space]), tokens.data_ptr()
        place = page_tokens, out.shape[1], out.data_ptr(), 8 * out.stride(0)
        for at in firsts:
            rows += (*buffers, where + 8 * at, *place)
    if rows:
        grid = len(rows) // _TOKEN, max(spaces.counts), 1
        _digest_tokens(grid, spaces.table, spaces.multipliers, _on_device(rows, spaces.device))


# A page a row: how many buffers its space has, tokens of a page, and of both sides where the digest of page 0 would be,
# bytes from there to that of the next buffer, how many pages there are, and where the page's first token lies, or the
# complement of that token.
_MOVE = 10
MOVE = tl.constexpr(_MOVE)


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


_MOVE_BLOCK = 32
_move = _Kernel(_move_kernel, _MOVE_BLOCK, warps=1)


def move_digests_triton(moves: Moves) -> None:
    """`buffers.move_digests_torch`, in one launch that no host waits for."""
    rows, most = list[int](), 0
    for source, source_tokens, target, target_tokens, page_tokens in moves:
        size = source.shape[0], page_tokens
        sides = [
            ((each.data_ptr(), 8 * each.stride(0), each.shape[1]), _tokens(tokens, each.device))
            for each, tokens in ((source, source_tokens), (target, target_tokens))
        ]
        (begin, froms), (end, tos) = sides
        for token, target_token in zip(froms, tos, strict=True):
            rows += (*size, *begin, token, *end, target_token)
        most = max(most, source.shape[0])
    if rows:
        _move((len(rows) // _MOVE, triton.cdiv(most, _MOVE_BLOCK), 1), _on_device(rows, moves[0][0].device))


def _tokens(tokens, device):
    """As rows of moves have them."""
    check_tokens(tokens)
    if tokens.device == device:
        return range(tokens.data_ptr(), tokens.data_ptr() + 8 * len(tokens), 8)
    return [~token if token >= 0 else ~_NO_TOKEN for token in tokens.tolist()]


def _on_device(numbers, device):
    """CUDA has read or staged pageable memory when the call returns, so it may go. But for more it may wait for the
    stream: pinned memory is kept by its allocator until it was read."""
    pinned = device.type == "cuda" and len(numbers) > _STAGED
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=True)
