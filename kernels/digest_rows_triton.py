# mypy: allow-untyped-defs, allow-incomplete-defs
"""Page digests in Triton of pages of several spaces at once: each is a row of one launch."""

from __future__ import annotations

import struct
from collections import deque
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from dsv4ctl.kernels.buffers import Moves, Places, SpaceBuffers
from dsv4ctl.kernels.digest_triton import digest_of

_BLOCK, _WARPS = 4096, 16  # a request's own page of SGLang has 65,536 words


class _Row(NamedTuple):
    """A page whose number is known, or (`far`) lies on the device."""

    first: int  #: buffer of the page's space
    buffers: int  #: of the space
    page: int  #: its number; far: where its first token lies, int64
    place: int  #: where the digest of its first buffer goes; far: where that of page 0 would
    step: int  #: bytes from there to that of the next buffer
    page_tokens: int = 0  #: far
    below: int = 0  #: far: what the page's number must be


_ROW = len(_Row._fields)
ROW = tl.constexpr(_ROW)
_NEAR = 16  # rows that a kernel reads where they are written: more are copied to the device first
_SLOTS = 8  # calls that may be under way at once
_MEMORY = 65_536  # digests that are handed out of one piece: to ask for pinned memory takes longer than to use it


# No size and no count is an argument: any mix of pages by the same compiled kernel.
@triton.jit
def _digest_rows(table_ptr, odd_ptr, rows_ptr, block: tl.constexpr, far: tl.constexpr):
    row, buffer = rows_ptr + tl.program_id(0) * ROW, tl.program_id(1)
    if buffer < tl.load(row + 1):
        page = tl.load(row + 2)
        place = tl.load(row + 3) + buffer * tl.load(row + 4)
        wanted = page >= 0
        if far:
            token = tl.load(page.to(tl.pointer_type(tl.int64)))
            page = token // tl.load(row + 5)
            place += page * 8
            wanted = (token >= 0) & (page < tl.load(row + 6))
        if wanted:
            entry = table_ptr + (tl.load(row) + buffer) * 2
            words = tl.load(entry + 1)
            digest = digest_of(tl.load(entry) + page * words * 8, words, odd_ptr, block)
            tl.store(place.to(tl.pointer_type(tl.int64)), digest)


def _by_rows(spaces, rows, number, *, far):
    """`rows`: on the device, or pinned. Returns the compiled kernel."""
    return _digest_rows[(number, max(spaces.counts))](
        spaces.table, spaces.multipliers, rows, block=_BLOCK, far=far, num_warps=_WARPS
    )


class _Slot:
    """What the device reads, and writes to, until `there`."""

    def __init__(self, gpu):
        self.rows = torch.zeros(_NEAR * _ROW, dtype=torch.int64, pin_memory=gpu)
        self.bytes = self.rows.numpy().data.cast("B")
        self.copied = None  #: rows, if there are more
        self.memory = None
        self.there = torch.cuda.Event() if gpu else None


class PartsTriton:
    """`buffers.digest_parts_torch`, on `stream` (on a CPU None), into pinned host memory.

    One room takes the host little: the kernel is launched on the stream by its handle, which need not be entered, and
    reads what it is to do where that was written. Beyond `_SLOTS` a call waits for the device.
    """

    def __init__(self, spaces, stream):
        self._spaces = spaces
        self._stream = stream
        self._memory, self._address, self._used = np.empty(0, dtype=np.uint64), 0, 0
        self._slots = deque(_Slot(stream is not None) for _ in range(_SLOTS))
        if stream is not None:
            torch.cuda.synchronize(spaces.device)
            with torch.cuda.stream(stream):
                self._kernel = _by_rows(spaces, self._slots[0].rows, 1, far=False)
            self._constant = spaces.table.data_ptr(), spaces.multipliers.data_ptr()

    def __call__(self, parts):
        """Digests of at least one part, and the event after which they are there, None if they are already."""
        rows = list[_Row]()
        memory, place = self._room_for(sum(self._spaces.counts[space] * len(pages) for space, pages in parts))
        for space, pages in parts:
            first, buffers = self._spaces.firsts[space], self._spaces.counts[space]
            rows += [_Row(first, buffers, page, place + 8 * at, 8 * len(pages)) for at, page in enumerate(pages)]
            place += 8 * buffers * len(pages)
        self._slots.rotate(-1)
        slot = self._slots[-1]
        if slot.there is not None and not slot.there.query():
            slot.there.synchronize()
        slot.memory, slot.copied = memory, None
        if rows:
            self._begin(slot, rows)
        return memory, slot.there

    def _begin(self, slot, rows):
        if len(rows) <= _NEAR:
            struct.pack_into(f"={len(rows) * _ROW}q", slot.bytes, 0, *_flat(rows))
        else:
            with torch.cuda.stream(self._stream):  # does nothing for None
                slot.copied = _on_device(rows, self._spaces.device)
        there = slot.rows if slot.copied is None else slot.copied
        if self._stream is None:
            _by_rows(self._spaces, there, len(rows), far=False)
            return
        grid = len(rows), max(self._spaces.counts), 1
        self._kernel[grid](*self._constant, there.data_ptr(), _BLOCK, False, stream=self._stream.cuda_stream)
        slot.there.record(self._stream)

    def _room_for(self, size):
        """So much memory, and its address."""
        if self._used + size > len(self._memory):
            pinned = self._stream is not None
            piece = torch.empty(max(size, _MEMORY), dtype=torch.int64, pin_memory=pinned)
            # A slice of this takes a tenth of the time of one of that, and keeps it alive.
            self._memory, self._address, self._used = piece.numpy().view(np.uint64), piece.data_ptr(), 0
        begin, self._used = self._used, self._used + size
        return self._memory[begin : self._used], self._address + 8 * begin


def digest_into_triton(spaces: SpaceBuffers, places: Places) -> None:
    """`buffers.digest_into_torch`, in one launch that no host waits for."""
    rows = list[_Row]()
    for space, tokens, firsts, page_tokens, out in places:
        first, buffers = spaces.firsts[space], spaces.counts[space]
        where, step, below = tokens.data_ptr(), 8 * out.stride(0), out.shape[1]
        rows += [_Row(first, buffers, where + 8 * at, out.data_ptr(), step, page_tokens, below) for at in firsts]
    if rows:
        _by_rows(spaces, _on_device(rows, spaces.device), len(rows), far=True)


def _on_device(rows, device):
    # Pageable memory: CUDA has read or staged it when the call returns, so it may go.
    return torch.tensor(_flat(rows), dtype=torch.int64).to(device, non_blocking=True)


def _flat(rows):
    return [number for row in rows for number in row]


class _Move(NamedTuple):
    """A page's digests on their way. Each side: where the first of page 0 is, bytes from there to the next buffer's,
    and where the page's first token lies, int64, or the complement of that token."""

    buffers: int
    page_tokens: int
    source: int
    source_step: int
    source_token: int
    target: int
    target_step: int
    target_token: int


MOVE = tl.constexpr(len(_Move._fields))


@triton.jit
def _page_at(where, page_tokens):
    token = ~where
    if where >= 0:
        token = tl.load(where.to(tl.pointer_type(tl.int64)))
    return token // page_tokens


@triton.jit
def _move_rows(rows_ptr, block: tl.constexpr):
    row, buffer = rows_ptr + tl.program_id(0) * MOVE, tl.arange(0, block)
    here, page_tokens = buffer < tl.load(row), tl.load(row + 1)
    source = tl.load(row + 2) + buffer * tl.load(row + 3) + _page_at(tl.load(row + 4), page_tokens) * 8
    target = tl.load(row + 5) + buffer * tl.load(row + 6) + _page_at(tl.load(row + 7), page_tokens) * 8
    value = tl.load(source.to(tl.pointer_type(tl.int64)), mask=here)
    tl.store(target.to(tl.pointer_type(tl.int64)), value, mask=here)


def move_digests_triton(moves: Moves) -> None:
    """`buffers.move_digests_torch`, in one launch that no host waits for."""
    rows = list[_Move]()
    for source, source_tokens, target, target_tokens, page_tokens in moves:
        sides = (
            (each.data_ptr(), 8 * each.stride(0), _tokens(tokens, each.device))
            for each, tokens in ((source, source_tokens), (target, target_tokens))
        )
        (begin, step, froms), (target_begin, target_step, tos) = sides
        rows += [
            _Move(source.shape[0], page_tokens, begin, step, token, target_begin, target_step, target_token)
            for token, target_token in zip(froms, tos, strict=True)
        ]
    if rows:
        block = triton.next_power_of_2(max(row.buffers for row in rows))
        _move_rows[(len(rows),)](_on_device(rows, moves[0][0].device), block=block)


def _tokens(tokens, device):
    """As `_Move` has them."""
    if tokens.device == device:
        return range(tokens.data_ptr(), tokens.data_ptr() + 8 * len(tokens), 8)
    return [~token for token in tokens.tolist()]
