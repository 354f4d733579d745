# mypy: allow-untyped-defs, allow-incomplete-defs
"""Exact top-k in Triton by a sampled threshold: one pass over the logits, then a selection among a few thousand.

1. A strided sample of a row gives a threshold that somewhat more than k of its logits should reach.
2. One pass writes a bit for each logit: whether it reaches the threshold.
3. Per row: if between k and `capacity` bits are set, they become a list of candidates in index order, and the k-th
   largest of those is found two bits at a time; otherwise (ties, a sample that misled) it is found bit by bit over the
   whole row: slower, and as exact.
Floats become signed integers of the same order; NaN the smallest of them, which is never selected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsv4ctl.kernels import index_k

NEVER = tl.constexpr(-(1 << 31))


@dataclass(frozen=True)
class Shape:
    """Launch shape: warps of the three kernels; words a turn and turns of a program of the pass over the logits."""

    sample_warps: int = 8
    filter_warps: int = 4
    lines: int = 256
    turns: int = 1
    select_warps: int = 8


SHAPE = Shape()  # measured best on an H200 (docs/kernels.md)


@triton.jit
def _ordered(x):
    """fp32 -> int32 of the same order; -0.0 as 0.0; NaN as NEVER (below -inf)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NEVER)


@triton.jit
def _kth(values, k, low_bits: tl.constexpr):
    """The largest t, a multiple of 2^low_bits or NEVER, such that at least k of int32 `values` are >= t.

    Two bits a turn: the counts of three thresholds travel in one sum, 20 bits each.
    """
    found = tl.full([], NEVER, tl.int32)
    one = tl.full([], 1, tl.int64)
    for turn in range((32 - low_bits) // 2):
        step = tl.full([], 1, tl.int32) << (30 - 2 * turn)
        first, second, third = found + step, found + 2 * step, found + 3 * step
        ones = (values >= first).to(tl.int64)
        ones += tl.where(values >= second, one << 20, 0)
        ones += tl.where(values >= third, one << 40, 0)
        count = tl.sum(ones, axis=0)
        reached = ((count & 0xFFFFF) >= k).to(tl.int32)
        reached += (((count >> 20) & 0xFFFFF) >= k).to(tl.int32)
        reached += ((count >> 40) >= k).to(tl.int32)
        found += reached * step
    return found


@triton.jit
def _sample(
    logits_ptr,
    lengths_ptr,
    thresholds_ptr,
    stride,
    target,
    sample: tl.constexpr,
    capacity: tl.constexpr,
):
    row = tl.program_id(0)
    length = tl.load(lengths_ptr + row)
    if length > capacity:
        index = (tl.arange(0, sample).to(tl.int64) * length) // sample
        values = _ordered(tl.load(logits_ptr + row.to(tl.int64) * stride + index))
        rank = tl.cdiv(target * sample, length)
        found = _kth(values, rank, 6)
        tl.store(thresholds_ptr + row, tl.maximum(found, NEVER + 1))


@triton.jit
def _filter(
    logits_ptr, lengths_ptr, thresholds_ptr, bits_ptr, stride, words, lines: tl.constexpr, turns: tl.constexpr,
    capacity: tl.constexpr,
):  # fmt: skip
    """`turns` x `lines` words of 32 logits a program."""
    row = tl.program_id(0)
    length = tl.load(lengths_ptr + row)
    if length > capacity:
        threshold = tl.load(thresholds_ptr + row)
        source = logits_ptr + row.to(tl.int64) * stride
        bit = tl.full([], 1, tl.int32) << tl.arange(0, 32)
        for turn in range(turns):
            word = (tl.program_id(1) * turns + turn) * lines + tl.arange(0, lines)
            at = word[:, None] * 32 + tl.arange(0, 32)[None, :]
            value = _ordered(tl.load(source + at, mask=at < length, other=float("nan")))
            bits = tl.sum(tl.where(value >= threshold, bit[None, :], 0), axis=1)
            tl.store(bits_ptr + row.to(tl.int64) * words + word, bits, mask=word < words)


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
def _list(bits_ptr, indices_ptr, row, length, words, width: tl.constexpr, capacity: tl.constexpr):
    """Write the indices of a row's set bits, ascending, to indices int32 [rows, capacity]; how many there are."""
    indices = indices_ptr + row.to(tl.int64) * capacity
    total = tl.full([], 0, tl.int32)
    for start in range(0, tl.cdiv(length, 32), width):
        word = start + tl.arange(0, width)
        left = tl.load(bits_ptr + row.to(tl.int64) * words + word, mask=word * 32 < length, other=0)
        ones = _ones(left)
        place = total + tl.cumsum(ones, axis=0) - ones
        for _ in range(tl.max(ones, axis=0)):
            lowest = left & -left
            power = lowest.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
            tl.store(indices + place, word * 32 + (power >> 23) - 127, mask=(left != 0) & (place < capacity))
            left ^= lowest
            place += 1
        total += tl.sum(ones, axis=0)
    tl.debug_barrier()
    return total


@triton.jit
def _emit(out, table, index, chosen, place, page_keys: tl.constexpr):
    page = tl.load(table + index // page_keys, mask=chosen, other=0)
    tl.store(out + place, page * page_keys + index % page_keys, mask=chosen)


@triton.jit
def _whole_row(source, length, out, table, k, size: tl.constexpr, page_keys: tl.constexpr):
    """Select over the row itself, a pass a bit; the number selected."""
    lane = tl.arange(0, size)
    found = tl.full([], NEVER, tl.int32)
    for step in range(32):
        tried = tl.where(step == 0, 0, found + (tl.full([], 1, tl.int32) << (31 - step)))
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
        ties = ((value == found) & (value != NEVER)).to(tl.int32)
        chosen = (value > found) | ((ties == 1) & (equal + tl.cumsum(ties, axis=0) <= k - above))
        ones = chosen.to(tl.int32)
        _emit(out, table, at, chosen, placed + tl.cumsum(ones, axis=0) - 1, page_keys)
        placed += tl.sum(ones, axis=0)
        equal += tl.sum(ties, axis=0)
    return placed


@triton.jit(do_not_specialize=["table_stride"])
def _select(
    logits_ptr, lengths_ptr, bits_ptr, indices_ptr, table_ptr, sequence_ptr, out_ptr, stride, table_stride, words, k,
    width: tl.constexpr, capacity: tl.constexpr, padded: tl.constexpr, page_keys: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    length = tl.load(lengths_ptr + row)
    source = logits_ptr + row.to(tl.int64) * stride
    table = table_ptr + tl.load(sequence_ptr + row).to(tl.int64) * table_stride
    out = out_ptr + row.to(tl.int64) * k
    placed = tl.full([], 0, tl.int32)
    came = length
    index = tl.arange(0, capacity)
    if length > capacity:
        came = _list(bits_ptr, indices_ptr, row, length, words, width, capacity)
        index = tl.load(indices_ptr + row.to(tl.int64) * capacity + index, mask=index < came, other=length)
    if (length > capacity) & ((came < k) | (came > capacity)):
        placed = _whole_row(source, length, out, table, k, capacity, page_keys)
    else:
        value = _ordered(tl.load(source + index, mask=index < length, other=float("nan")))
        found = _kth(value, k, 0)
        above = tl.sum((value > found).to(tl.int32), axis=0)
        ties = ((value == found) & (value != NEVER)).to(tl.int32)
        chosen = (value > found) | ((ties == 1) & (tl.cumsum(ties, axis=0) <= k - above))
        ones = chosen.to(tl.int32)
        _emit(out, table, index, chosen, tl.cumsum(ones, axis=0) - 1, page_keys)
        placed = tl.sum(ones, axis=0)
    at = tl.arange(0, padded)
    tl.store(out + at, tl.full((padded,), -1, tl.int32), mask=(at >= placed) & (at < k))


def topk_slots_triton(
    logits: torch.Tensor, lengths: torch.Tensor, k: int, table: torch.Tensor, sequence: torch.Tensor, page_keys: int
) -> torch.Tensor:
    """As `topk_slots_reference`; k at most 2048, lengths and sequence int32. Graph-safe: lengths are read there."""
    if not 0 < k <= 2048:
        raise ValueError(f"k {k}: 1..2048")
    rows, columns = logits.shape
    out = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    capacity = 4096 if k <= 512 else 8192
    # A row that is all candidates needs no words: the variant is the same at every length.
    words, stride = -(-columns // 32) if columns > capacity else 0, logits.stride(0)
    bits = indices = out
    if columns > capacity:
        thresholds = torch.empty(rows, dtype=torch.int32, device=logits.device)
        bits = torch.empty(rows, words, dtype=torch.int32, device=logits.device)
        indices = torch.empty(rows, capacity, dtype=torch.int32, device=logits.device)
        target = k + 3 * capacity // 8
        sample = 2048 if columns <= 1 << 17 else 4096
        _sample[(rows,)](
            logits,
            lengths,
            thresholds,
            stride,
            target,
            sample=sample,
            capacity=capacity,
            num_warps=SHAPE.sample_warps,
        )
        _filter[(rows, triton.cdiv(words, SHAPE.lines * SHAPE.turns))](
            logits, lengths, thresholds, bits, stride, words, lines=SHAPE.lines, turns=SHAPE.turns, capacity=capacity,
            num_warps=SHAPE.filter_warps,
        )  # fmt: skip
    _select[(rows,)](
        logits, lengths, bits, indices, table, sequence, out, stride, table.stride(0), words, k,
        width=min(2048, triton.next_power_of_2(max(128, words))), capacity=capacity, padded=triton.next_power_of_2(k),
        page_keys=page_keys, num_warps=SHAPE.select_warps,
    )  # fmt: skip
    return out


def topk_triton(logits: torch.Tensor, k: int) -> torch.Tensor:
    """As `topk.topk` where no logit is NaN: int64 [rows, min(k, n)]."""
    rows, n = logits.shape
    lengths = torch.full((rows,), n, dtype=torch.int32, device=logits.device)
    table = torch.arange(-(-n // index_k.KEYS), dtype=torch.int32, device=logits.device)[None]
    return topk_slots_triton(logits, lengths, min(k, n), table, torch.zeros_like(lengths), index_k.KEYS).long()
