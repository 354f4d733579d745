# mypy: allow-untyped-defs, allow-incomplete-defs
"""Index-K store in Triton: a paged scatter, optionally with the compressor's norm, RoPE and Hadamard rotation fused.

Rounding is done by hand, to nearest even, as torch and the GPU do; Triton's interpreter rounds otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4ctl.kernels import index_k


@triton.jit
def _normed(x, norm_ptr, epsilon, dim: tl.constexpr):
    """RMS norm of x fp32 [block, dim]."""
    x = x * tl.math.rsqrt(tl.sum(x * x, axis=1) / dim + epsilon)[:, None]
    return x * tl.load(norm_ptr + tl.arange(0, dim)).to(tl.float32)[None, :]


@triton.jit
def rotated(x, position, mask, cos_sin_ptr, scale: tl.constexpr, dim: tl.constexpr, rope_at: tl.constexpr):
    """RoPE of dims rope_at.. at `position` int64 [block], Hadamard, of x fp32 [block, dim]."""
    block: tl.constexpr = x.shape[0]
    half: tl.constexpr = dim // 2
    pair = tl.arange(0, half)
    angles = cos_sin_ptr + position[:, None] * (dim - rope_at) + 2 * (pair - rope_at // 2)[None, :]
    turned = (mask[:, None]) & (pair >= rope_at // 2)[None, :]
    cos = tl.load(angles, mask=turned, other=1.0)
    sin = tl.load(angles + 1, mask=turned, other=0.0)
    first, second = tl.split(tl.reshape(x, (block, half, 2)))
    x = tl.reshape(tl.join(first * cos - second * sin, first * sin + second * cos), (block, dim))
    for power in tl.static_range(7):
        x = _butterflies(x, block, dim, 1 << power)
    return x * scale


@triton.jit
def to_bf16(x):
    """The bf16 nearest to x fp32, ties to even, NaN kept."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _butterflies(x, block: tl.constexpr, dim: tl.constexpr, apart: tl.constexpr):
    """(a, b) -> (a + b, a - b) for elements `apart` apart: one of the seven factors of the Hadamard matrix."""
    pairs = tl.permute(tl.reshape(x, (block, dim // (2 * apart), 2, apart)), (0, 1, 3, 2))
    first, second = tl.split(pairs)
    pairs = tl.join(first + second, first - second)
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (block, dim))


@triton.jit
def _to_e4m3_grid(x):
    """The e4m3 value nearest to x, |x| <= 448, ties to even, in fp32."""
    bits = x.to(tl.uint32, bitcast=True)
    coarse = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
    subnormal = (x + 24576.0) - 24576.0  # 1.5 * 2^14: fp32 keeps multiples of 2^-9 beside it
    value = tl.where(tl.abs(x) < 0.015625, subnormal, coarse).to(tl.uint32, bitcast=True)
    return (value | (bits & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=("count",))
def _store(
    rows_ptr, slots_ptr, keys_ptr, scales_ptr, norm_ptr, cos_sin_ptr, positions_ptr, epsilon, count,
    row_stride, block: tl.constexpr, dim: tl.constexpr, rope_at: tl.constexpr, page_keys: tl.constexpr,
    page_stride: tl.constexpr, scale_stride: tl.constexpr, fp8: tl.constexpr, fused: tl.constexpr,
    fp8_max: tl.constexpr, rotation_scale: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    d = tl.arange(0, dim)
    mask = at < count
    x = tl.load(rows_ptr + (at.to(tl.int64) * row_stride)[:, None] + d[None, :], mask=mask[:, None], other=0.0)
    x = x.to(tl.float32)
    if fused:
        position = tl.load(positions_ptr + at, mask=mask, other=0).to(tl.int64)
        x = rotated(_normed(x, norm_ptr, epsilon, dim), position, mask, cos_sin_ptr, rotation_scale, dim, rope_at)
    slot = tl.load(slots_ptr + at, mask=mask, other=-1).to(tl.int64)
    written = slot >= 0
    page, line = slot // page_keys, slot % page_keys
    target = keys_ptr + (page * page_stride + line * dim)[:, None] + d[None, :]
    if fp8:
        scale = tl.math.div_rn(tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4), tl.full((block,), fp8_max, tl.float32))
        code = tl.math.div_rn(x, tl.broadcast_to(scale[:, None], (block, dim)))
        code = tl.minimum(tl.maximum(code, -fp8_max), fp8_max)
        tl.store(target, _to_e4m3_grid(code).to(tl.float8e4nv), mask=written[:, None])
        tl.store(scales_ptr + page * scale_stride + page_keys * dim // 4 + line, scale, mask=written)
    else:
        tl.store(target, to_bf16(x), mask=written[:, None])


def _launch(
    pages: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    norm: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    epsilon: float,
    fused: bool,
) -> None:
    fp8 = index_k.layout_of(pages.shape[1]) == "fp8"
    keys = pages.view(torch.float8_e4m3fn if fp8 else torch.bfloat16)
    block = 16
    _store[(triton.cdiv(rows.shape[0], block),)](
        rows, slots, keys, pages.view(torch.float32), norm, cos_sin, positions, epsilon,
        rows.shape[0], rows.stride(0), block=block, dim=index_k.DIM, rope_at=index_k.ROPE_AT, page_keys=index_k.KEYS,
        page_stride=keys.shape[1], scale_stride=pages.shape[1] // 4, fp8=fp8, fused=fused, fp8_max=index_k.FP8_MAX,
        rotation_scale=index_k.DIM**-0.5,        num_warps=4,
    )  # fmt: skip


def store_slots_triton(pages: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """As `index_k.store_slots_reference`, bit for bit."""
    _launch(pages, slots, keys, keys, keys, slots, 0.0, fused=False)


def norm_rope_hadamard_store_triton(
    pages: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    norm: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    epsilon: float,
) -> None:
    """`index_k.norm_rope_hadamard` and the store in one launch; fp32 sums in another order than torch's."""
    _launch(pages, slots, rows, norm, cos_sin, positions, epsilon, fused=True)
