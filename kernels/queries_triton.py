# mypy: allow-untyped-defs, allow-incomplete-defs
"""Index queries in Triton: RoPE, Hadamard rotation and rounding to bf16 in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4ctl.kernels import index_k
from dsv4ctl.kernels.index_k_triton import rotated, to_bf16


@triton.jit
def _queries(
    q_ptr, weights_ptr, cos_sin_ptr, positions_ptr, out_ptr, out_weights_ptr, count, weight_scale, weights_stride,
    heads: tl.constexpr, block: tl.constexpr, dim: tl.constexpr, rope_at: tl.constexpr, rotation_scale: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    mask = at < count
    places = (at.to(tl.int64) * dim)[:, None] + tl.arange(0, dim)[None, :]
    x = tl.load(q_ptr + places, mask=mask[:, None], other=0.0).to(tl.float32)
    token = (at // heads).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=mask, other=0).to(tl.int64)
    x = rotated(x, position, mask, cos_sin_ptr, rotation_scale, dim, rope_at)
    tl.store(out_ptr + places, to_bf16(x), mask=mask[:, None])
    weight = tl.load(weights_ptr + token * weights_stride + at % heads, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_weights_ptr + at, weight * weight_scale, mask=mask)


def index_queries_triton(
    q: torch.Tensor, weights: torch.Tensor, weight_scale: float, cos_sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `queries.index_queries_reference`; q contiguous, the last dim of weights too."""
    tokens, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    out_weights = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    block = 16
    if tokens:
        _queries[(triton.cdiv(tokens * heads, block),)](
            q, weights, cos_sin, positions, out, out_weights, tokens * heads, weight_scale, weights.stride(0),
            heads=heads, block=block, dim=dim, rope_at=index_k.ROPE_AT, rotation_scale=index_k.DIM**-0.5, num_warps=4,
        )  # fmt: skip
    return out, out_weights
