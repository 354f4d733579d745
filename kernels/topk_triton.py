# mypy: allow-untyped-defs, allow-incomplete-defs
"""Exact top-k in Triton by a sampled threshold: one pass over the logits, then a selection among a few thousand.

1. Each program takes a part of a row. A strided sample of the row gives it a threshold that somewhat more than k of
   the row's logits should reach (all programs of a row find the same one); it lists those of its part, in order.
2. Per row: if between k and `capacity` logits were listed, the k-th largest of them is found two bits at a time, from
   the highest bit in which they differ until exactly k reach it; otherwise (ties, a sample that misled) it is found bit
   by bit over the whole row: slower, and as exact.
Floats become unsigned integers of the same order; NaN is 0, which is never selected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsv4ctl.kernels import index_k
from dsv4ctl.kernels.device import multiprocessors


@dataclass(frozen=True)
class Shape:
    """Launch shape: warps of a program that lists, words of 32 logits it takes a turn, such programs a multiprocessor,
    logits that are worth a program, candidates a warp of the selection."""

    warps: int = 16
    lines: int = 512
    programs: int = 1
    part: int = 1 << 14
    candidates: int = 512


SHAPE = Shape()  # measured best on an H200 (docs/kernels.md)
WIDTH = tl.constexpr(1024)  #: words of bits that become indices in a turn
LOWEST = tl.constexpr(0x007FFFFF)  #: -inf


@triton.jit
def _ordered(x):
    """fp32 -> uint32 of the same order, at least 1; -0.0 as 0.0; NaN as 0."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    turned = tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)
    return tl.where(x == x, turned, 0)


@triton.jit
def _threshold(values, k, most, bits, valid, lines: tl.constexpr):
    """(t, n): the n of uint32 `values` that are >= t > 0, n >= k, by two bits of t a turn until n <= most.

    No turn is left when t is the largest with n >= k. valid: how many values are not 0 (t = 1 if k or fewer are);
    bits: all of them are below 2^bits. Counts of `lines` values (a thread's own) take a byte each, then 20 bits.
    """
    size: tl.constexpr = values.shape[0]
    found = tl.full([], 1, tl.uint32)
    one = tl.full([], 1, tl.uint32)
    count = valid
    left = bits
    while (left > 0) & (count > most):
        left = tl.maximum(left - 2, 0)
        step = one << left.to(tl.uint32)
        ones = (values >= found + step).to(tl.int32)
        ones += tl.where(values >= found + 2 * step, 1 << 8, 0)
        ones += tl.where(values >= found + 3 * step, 1 << 16, 0)
        ones = tl.sum(tl.reshape(ones, (lines, size // lines)), axis=0)
        wide = (ones & 0xFF).to(tl.int64) | ((ones >> 8) & 0xFF).to(tl.int64) << 20 | (ones >> 16).to(tl.int64) << 40
        counts = tl.sum(wide, axis=0)
        first = (counts & 0xFFFFF).to(tl.int32)
        second = ((counts >> 20) & 0xFFFFF).to(tl.int32)
        third = (counts >> 40).to(tl.int32)
        reached = (first >= k).to(tl.int32) + (second >= k).to(tl.int32) + (third >= k).to(tl.int32)
        found += reached.to(tl.uint32) * step
        count = tl.where(reached == 3, third, tl.where(reached == 2, second, tl.where(reached == 1, first, count)))
    return found, count


@triton.jit
def _ones(x):
    """Set bits of each int32."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _list(bits, listed, first, end, capacity: tl.constexpr):
    """Write the indices of the set bits of words first..end-1, ascending; how many there are."""
    count = tl.full([], 0, tl.int32)
    for start in range(first, end, WIDTH):
        word = start + tl.arange(0, WIDTH)
        left = tl.load(bits + word, mask=word < end, other=0)
        ones = _ones(left)
        place = count + tl.cumsum(ones, axis=0) - ones
        for _ in range(tl.max(ones, axis=0)):
            lowest = left & -left
            power = lowest.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
            tl.store(listed + place, word * 32 + (power >> 23) - 127, mask=(left != 0) & (place < capacity))
            left ^= lowest
            place += 1
        count += tl.sum(ones, axis=0)
    return count


@triton.jit
def _tile(source, start, end, lines: tl.constexpr):
    """fp32 [lines, 32] from `start` on, NaN from `end` on; the mask, which keeps loads narrow, only where it is due."""
    at = start + tl.arange(0, lines)[:, None] * 32 + tl.arange(0, 32)[None, :]
    if start + lines * 32 <= end:  # noqa: SIM108 (one branch is taken)
        x = tl.load(source + at)
    else:
        x = tl.load(source + at, mask=at < end, other=float("nan"))
    return x


# `words`: a row of bits is not known to be aligned, or `_list` would load them in a layout that stores cannot have.
@triton.jit(do_not_specialize=["words", "parts"])
def _collect(
    logits_ptr, lengths_ptr, thresholds_ptr, bits_ptr, counts_ptr, indices_ptr, stride, words, target, parts,
    sample: tl.constexpr, capacity: tl.constexpr, lines: tl.constexpr, warps: tl.constexpr,
):  # fmt: skip
    """Of a part of a row, the logits that reach the row's threshold: how many, and the first `capacity` indices."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    if length > capacity:
        source = logits_ptr + row.to(tl.int64) * stride
        index = (tl.arange(0, sample).to(tl.int64) * length) // sample
        sampled = tl.load(source + index)
        each = tl.cdiv(tl.cdiv(length, parts), lines * 32) * (lines * 32)
        end = tl.minimum((part + 1) * each, length)
        x = _tile(source, part * each, end, lines)  # on its way while the sample is judged
        rank = tl.cdiv(target * sample, length)
        least, _ = _threshold(_ordered(sampled), rank, rank + rank // 4, 32, sample, sample // (32 * warps))
        least = tl.maximum(least, LOWEST)
        floor = tl.where(least >> 31 == 1, least & 0x7FFFFFFF, ~least).to(tl.float32, bitcast=True)
        tl.store(thresholds_ptr + row, least.to(tl.int32, bitcast=True), mask=part == 0)
        bits = bits_ptr + row.to(tl.int64) * words
        bit = tl.full([], 1, tl.int32) << tl.arange(0, 32)
        for start in range(part * each, end, lines * 32):
            following = _tile(source, start + lines * 32, end, lines)
            reached = tl.sum(tl.where(x >= floor, bit[None, :], 0), axis=1)
            word = start // 32 + tl.arange(0, lines)
            tl.store(bits + word, reached, mask=word * 32 < end)
            x = following
        tl.debug_barrier()
        listed = indices_ptr + (row * parts + part).to(tl.int64) * capacity
        count = _list(bits, listed, part * each // 32, tl.cdiv(end, 32), capacity)
        tl.store(counts_ptr + row * parts + part, count)


@triton.jit
def _emit(out, table, index, chosen, place, page_keys: tl.constexpr):
    page = tl.load(table + index // page_keys, mask=chosen, other=0)
    tl.store(out + place, page * page_keys + index % page_keys, mask=chosen)


@triton.jit
def _whole_row(source, length, out, table, k, size: tl.constexpr, page_keys: tl.constexpr):
    """Select over the row itself, a pass a bit; the number selected."""
    lane = tl.arange(0, size)
    found = tl.full([], 0, tl.uint32)
    for step in range(32):
        tried = found + (tl.full([], 1, tl.uint32) << (31 - step))
        count = tl.zeros((size,), tl.int32)
        for start in range(0, length, size):
            at = start + lane
            count += (_ordered(tl.load(source + at, mask=at < length, other=float("nan"))) >= tried).to(tl.int32)
        if tl.sum(count, axis=0) >= k:
            found = tried
    count = tl.zeros((size,), tl.int32)
    for start in range(0, length, size):
        at = start + lane
        count += (_ordered(tl.load(source + at, mask=at < length, other=float("nan"))) > found).to(tl.int32)
    above = tl.sum(count, axis=0)
    placed = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for start in range(0, length, size):
        at = start + lane
        value = _ordered(tl.load(source + at, mask=at < length, other=float("nan")))
        ties = ((value == found) & (value != 0)).to(tl.int32)
        chosen = (value > found) | ((ties == 1) & (equal + tl.cumsum(ties, axis=0) <= k - above))
        ones = chosen.to(tl.int32)
        _emit(out, table, at, chosen, placed + tl.cumsum(ones, axis=0) - 1, page_keys)
        placed += tl.sum(ones, axis=0)
        equal += tl.sum(ties, axis=0)
    return placed


# Rows of any length by one compiled kernel; and an unaligned `stride` keeps one layout from the first load to the last.
@triton.jit(do_not_specialize=["stride", "table_stride", "parts"])
def _select(
    logits_ptr, lengths_ptr, thresholds_ptr, counts_ptr, indices_ptr, table_ptr, sequence_ptr, out_ptr, stride,
    table_stride, k, parts, capacity: tl.constexpr, padded: tl.constexpr, page_keys: tl.constexpr,
    warps: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    length = tl.load(lengths_ptr + row)
    source = logits_ptr + row.to(tl.int64) * stride
    table = table_ptr + tl.load(sequence_ptr + row).to(tl.int64) * table_stride
    out = out_ptr + row.to(tl.int64) * k
    index = tl.arange(0, capacity)
    came = tl.full([], 0, tl.int32)
    if length > capacity:
        slot = index
        at = index
        for part in range(parts):
            at = tl.where(slot >= came, part * capacity + slot - came, at)
            came += tl.load(counts_ptr + row * parts + part)
        at = row.to(tl.int64) * parts * capacity + at
        index = tl.load(indices_ptr + at, mask=slot < came, other=0)
        least = tl.load(thresholds_ptr + row).to(tl.uint32, bitcast=True)
        value = _ordered(tl.load(source + index, mask=slot < came, other=float("nan")))
        value = tl.where(slot < came, value - least + 1, 0)
    else:
        value = _ordered(tl.load(source + index, mask=index < length, other=float("nan")))
        came = tl.sum((value > 0).to(tl.int32), axis=0)
    if (length > capacity) & ((came < k) | (came > capacity)):
        placed = _whole_row(source, length, out, table, k, capacity, page_keys)
    else:
        highest = tl.max(value, axis=0).to(tl.float32)
        bits = (highest.to(tl.int32, bitcast=True) >> 23) - 126
        found, count = _threshold(value, k, k, bits, came, capacity // (32 * warps))
        chosen = value >= found
        if count > k:
            ties = (value == found).to(tl.int32)
            spare = k - (count - tl.sum(ties, axis=0))
            chosen = (value > found) | ((ties == 1) & (tl.cumsum(ties, axis=0) <= spare))
        _emit(out, table, index, chosen, tl.cumsum(chosen.to(tl.int32), axis=0) - 1, page_keys)
        placed = tl.minimum(count, k)
    if placed < k:
        rest = tl.arange(0, padded)
        tl.store(out + rest, tl.full((padded,), -1, tl.int32), mask=(rest >= placed) & (rest < k))


def _aim(k: int, columns: int, capacity: int) -> tuple[int, int]:
    """(how many logits should reach the threshold, how many are sampled): 1 to 1.25 times as many do in the sample's
    proportion. So many of the sample reach it that fewer than k, or more than `capacity`, of the row do with a chance
    below 1e-5 (Poisson)."""
    target = max(k + capacity // 4, 3 * capacity // 8)
    above = 64 if capacity <= 4 * k else 24
    return target, max(2048, min(8192, triton.next_power_of_2(above * columns // target)))


def topk_slots_triton(
    logits: torch.Tensor, lengths: torch.Tensor, k: int, table: torch.Tensor, sequence: torch.Tensor, page_keys: int
) -> torch.Tensor:
    """As `topk_slots_reference`; k at most 2048, lengths and sequence int32. Graph-safe: lengths are read there."""
    if not 0 < k <= 2048:
        raise ValueError(f"k {k}: 1..2048")
    rows, columns = logits.shape
    capacity = 4096 if k <= (1024 if columns <= 1 << 17 else 512) else 8192
    warps = capacity // SHAPE.candidates
    out = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    thresholds = counts = indices = out
    stride, parts = logits.stride(0), 1
    if columns > capacity:
        parts = max(1, min(multiprocessors(logits.device) * SHAPE.programs // max(rows, 1), columns // SHAPE.part))
        words = -(-columns // 32)
        target, sample = _aim(k, columns, capacity)
        thresholds, counts, indices, bits = (
            torch.empty(shape, dtype=torch.int32, device=logits.device)
            for shape in ((rows,), (rows, parts), (rows, parts, capacity), (rows, words))
        )
        _collect[(rows, parts)](
            logits, lengths, thresholds, bits, counts, indices, stride, words, target, parts, sample=sample,
            capacity=capacity, lines=SHAPE.lines, warps=SHAPE.warps, num_warps=SHAPE.warps,
        )  # fmt: skip
    _select[(rows,)](
        logits, lengths, thresholds, counts, indices, table, sequence, out, stride, table.stride(0), k, parts,
        capacity=capacity, padded=triton.next_power_of_2(k), page_keys=page_keys, warps=warps, num_warps=warps,
    )  # fmt: skip
    return out


def topk_triton(logits: torch.Tensor, k: int) -> torch.Tensor:
    """As `topk.topk` where no logit is NaN: int64 [rows, min(k, n)]."""
    rows, n = logits.shape
    lengths = torch.full((rows,), n, dtype=torch.int32, device=logits.device)
    table = torch.arange(-(-n // index_k.KEYS), dtype=torch.int32, device=logits.device)[None]
    return topk_slots_triton(logits, lengths, min(k, n), table, torch.zeros_like(lengths), index_k.KEYS).long()
