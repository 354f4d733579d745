# mypy: allow-untyped-defs, allow-incomplete-defs
"""Page digests in Triton of many short lists at once: each a row, or several, of one launch."""

from __future__ import annotations

import struct
from collections import deque
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from dsv4ctl.kernels.buffers import Places, SpaceBuffers
from dsv4ctl.kernels.digest_triton import digest_of

_BLOCK, _WARPS = 4096, 16  # a request's own page of SGLang has 65,536 words


class _Row(NamedTuple):
    """Up to `_AT_ONCE` pages of a list. A digest's place is that of its page in the row, or (`at_page`) its number."""

    first: int  #: buffer of the pages' space
    buffers: int  #: of the space
    begin: int  #: where the row's pages begin in the list
    pages: int  #: how many
    place: int  #: where digests of the first buffer go
    step: int  #: bytes from there to those of the next buffer
    below: int  #: what a page's number must be


_ROW = len(_Row._fields)
ROW = tl.constexpr(_ROW)
_ANY_PAGE = 1 << 62
_AT_ONCE = 16  # pages of a row: a program begins for each, in every row, of a list that has fewer too
_ROWS = 4  # of a captured launch: a room's pages have one in each of three spaces, and up to 32 of a space two
_LAUNCHES = 8  # that may be under way at once
_MEMORY = 65_536  # digests that are handed out of one piece: to ask for pinned memory takes longer than to use it


# No size and no count is an argument: any mix of pages by the same compiled kernel.
@triton.jit(do_not_specialize_on_alignment=["pages_ptr"])
def _digest_rows(table_ptr, odd_ptr, rows_ptr, pages_ptr, block: tl.constexpr, at_page: tl.constexpr):
    at, buffer, row = tl.program_id(0), tl.program_id(1), rows_ptr + tl.program_id(2) * ROW
    if (buffer < tl.load(row + 1)) & (at < tl.load(row + 3)):
        page = tl.load(pages_ptr + tl.load(row + 2) + at)
        if (page >= 0) & (page < tl.load(row + 6)):
            entry = table_ptr + (tl.load(row) + buffer) * 2
            words = tl.load(entry + 1)
            place = tl.load(row + 4) + buffer * tl.load(row + 5) + (page if at_page else at) * 8
            digest = digest_of(tl.load(entry) + page * words * 8, words, odd_ptr, block)
            tl.store(place.to(tl.pointer_type(tl.int64)), digest)


def _by_rows(spaces, number, most, rows, pages, *, at_page):
    """`number` rows, int64 on the device, of which none has more than `most` pages."""
    _digest_rows[(most, max(spaces.counts), number)](
        spaces.table, spaces.multipliers, rows, pages, block=_BLOCK, at_page=at_page, num_warps=_WARPS
    )


class _Launch:
    """Up to `_ROWS` rows and their pages, and what digests them: captured, one room takes a host half the time.

    `there`: until then the device reads what lies here, and writes to `memory`.
    """

    def __init__(self, spaces):
        gpu = spaces.device.type == "cuda"
        self._spaces = spaces
        self._listed = torch.zeros(_ROWS * (_ROW + _AT_ONCE), dtype=torch.int64, pin_memory=gpu)
        self._bytes = self._listed.numpy().data.cast("B")
        self._on_device = torch.zeros_like(self._listed, device=spaces.device)
        self.there = torch.cuda.Event() if gpu else None
        self._begin()  # compiles
        self._begin_again = self._captured() if gpu else self._begin
        self([], [], None)  # the first time takes longer

    def _begin(self):
        self._on_device.copy_(self._listed, non_blocking=True)
        _by_rows(self._spaces, _ROWS, _AT_ONCE, self._on_device, self._on_device, at_page=False)

    def _captured(self):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")  # other threads of the process go on
        self._begin()
        graph.capture_end()
        return graph.replay

    def __call__(self, rows, pages, memory):
        """`pages`: of each row a list."""
        if self.there is not None and not self.there.query():
            self.there.synchronize()
        self.memory = memory
        listed = [number for row in rows for number in row]
        listed += [0] * (_ROWS * _ROW - len(listed))  # rows without a page
        for each in pages:
            listed += [*each, *[0] * (_AT_ONCE - len(each))]
        struct.pack_into(f"={len(listed)}q", self._bytes, 0, *listed)
        self._begin_again()
        if self.there is not None:
            self.there.record()


class PartsTriton:
    """`buffers.digest_parts_torch`, on `stream` (on a CPU None), into pinned host memory.

    One room takes the host little: launches are captured, so few lists of up to `_AT_ONCE` pages go into one. Many take
    several, and beyond `_LAUNCHES` a call waits for the device.
    """

    def __init__(self, spaces, stream):
        self._spaces = spaces
        self._stream = stream
        self._memory, self._address, self._used = np.empty(0, dtype=np.uint64), 0, 0
        if stream is not None:
            torch.cuda.synchronize(spaces.device)
        with self._on_stream():
            self._launches = deque(_Launch(spaces) for _ in range(_LAUNCHES))

    def __call__(self, parts):
        """Digests of at least one part, and the event after which they are there, None if they are already."""
        rows, lists = list[_Row](), []
        memory, place = self._room_for(sum(self._spaces.counts[space] * len(pages) for space, pages in parts))
        for space, pages in parts:
            first, buffers = self._spaces.firsts[space], self._spaces.counts[space]
            for at in range(0, len(pages), _AT_ONCE):
                lists.append(pages[at : at + _AT_ONCE])
                begin = _ROWS * _ROW + (len(rows) % _ROWS) * _AT_ONCE
                rows.append(_Row(first, buffers, begin, len(lists[-1]), place + 8 * at, 8 * len(pages), _ANY_PAGE))
            place += 8 * buffers * len(pages)
        there = None
        with self._on_stream():
            for at in range(0, len(rows), _ROWS):
                self._launches.rotate(-1)
                self._launches[-1](rows[at : at + _ROWS], lists[at : at + _ROWS], memory)
                there = self._launches[-1].there
        return memory, there

    def _on_stream(self):
        return nullcontext() if self._stream is None else self._stream

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
    rows, number = list[_Row](), 0
    for space, listed, out in places:
        first, buffers, count = spaces.firsts[space], spaces.counts[space], len(listed)
        for at in range(0, count, _AT_ONCE):
            each = min(_AT_ONCE, count - at)
            rows.append(_Row(first, buffers, number + at, each, out.data_ptr(), 8 * out.stride(0), out.shape[1]))
        number += count
    if rows:
        pages = torch.cat([pages for _, pages, _ in places])
        # Pageable memory: CUDA has read or staged it when the call returns, so it may go.
        on_device = torch.tensor(rows, dtype=torch.int64).to(spaces.device, non_blocking=True)
        _by_rows(spaces, len(rows), max(row.pages for row in rows), on_device, pages, at_page=True)
