"""Index-K pages: how 64 keys of 128 dims lie in a page, in bf16 or fp8, and the logits over them.

bf16: [64, 128] bf16, 16,384 B. fp8: 64 x 128 e4m3 bytes, then 64 fp32 scales, 8,448 B.
"""

from __future__ import annotations

import functools
import math

import torch

KEYS = 64
DIM = 128
PAGE_BYTES = {"bf16": KEYS * DIM * 2, "fp8": KEYS * DIM + KEYS * 4}
FP8_MAX = 448.0
ROPE_AT = 64


def layout_of(page_bytes: int) -> str:
    """The layout of pages of that many bytes: "bf16" or "fp8". Raises ValueError for another size."""
    for dtype, size in PAGE_BYTES.items():
        if size == page_bytes:
            return dtype
    raise ValueError(f"index-K pages of {page_bytes} B: 16384 (bf16) or 8448 (fp8) expected")


@functools.lru_cache(maxsize=16)
def hadamard(device: torch.device) -> torch.Tensor:
    """The fixed rotation: fp32 [128, 128] Sylvester-Hadamard matrix over sqrt(128), its own inverse."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < DIM:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / math.sqrt(DIM)


def store_keys(pages: torch.Tensor, dtype: str, page: int, row: int, keys: torch.Tensor) -> None:
    """Write fp32 keys [n, 128] as rows row.. of one page of uint8 [pages, page_bytes]."""
    target, count = pages[page], keys.shape[0]
    if dtype == "bf16":
        target.view(torch.bfloat16).view(KEYS, DIM)[row : row + count] = keys.to(torch.bfloat16)
        return
    scales = keys.abs().amax(dim=1).clamp_(min=1e-4) / FP8_MAX
    codes = (keys / scales[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    target[: KEYS * DIM].view(torch.float8_e4m3fn).view(KEYS, DIM)[row : row + count] = codes
    target[KEYS * DIM :].view(torch.float32)[row : row + count] = scales


def store_slots_reference(pages: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """Write keys [T, 128] at `slots` int [T] = page * 64 + row (negative: none) of uint8 [pages, page_bytes]."""
    dtype = layout_of(pages.shape[1])
    for slot, key in zip(slots.tolist(), keys.to(torch.float32), strict=True):
        if slot >= 0:
            store_keys(pages, dtype, slot // KEYS, slot % KEYS, key[None])


def norm_rope_hadamard(
    rows: torch.Tensor, norm: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """What the compressor does to a pooled row before it is stored as an index key: fp32 [T, 128].

    RMS norm (over 128, times `norm` [128]), rotation of the last 64 dims as pairs (2i, 2i + 1) by `cos_sin` fp32
    [positions, 64] = (cos, sin) interleaved, at `positions` int [T], then the rotation `hadamard`: what SGLang's
    fused_norm_rope_v2 stores for head dim 128, before its quantisation. rows [T, 128] bf16 or fp32.
    """
    x = rows.to(torch.float32)
    x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon) * norm.to(torch.float32)
    return rope_hadamard(x, cos_sin, positions)


def rope_hadamard(rows: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The two rotations of `norm_rope_hadamard` alone: fp32 [T, 128] -> fp32 [T, 128]."""
    x = rows.clone()
    first, second = rows[:, ROPE_AT::2], rows[:, ROPE_AT + 1 :: 2]
    cos, sin = cos_sin[positions.long(), 0::2], cos_sin[positions.long(), 1::2]
    x[:, ROPE_AT::2] = first * cos - second * sin
    x[:, ROPE_AT + 1 :: 2] = first * sin + second * cos
    return x @ hadamard(x.device)


def read_keys(pages: torch.Tensor, dtype: str, chosen: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` keys of the pages `chosen` (int64 [p], logical order) of uint8 [pages, page_bytes].

    Returns fp32 [count, 128].
    """
    raw = pages.index_select(0, chosen)
    if dtype == "bf16":
        return raw.view(torch.bfloat16).view(-1, DIM)[:count].to(torch.float32)
    codes = raw[:, : KEYS * DIM].contiguous().view(torch.float8_e4m3fn).view(-1, DIM)[:count].to(torch.float32)
    scales = raw[:, KEYS * DIM :].contiguous().view(torch.float32).view(-1, 1)[:count]
    return codes.to(torch.float32) * scales


def index_logits(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """logits[t, j] = sum_h weights[t, h] * relu(queries[t, h] . keys[j]).

    queries [T, H, 128], weights [T, H], keys [n, 128], all fp32 -> fp32 [T, n].
    """
    tokens, heads, dim = queries.shape
    dots = (queries.reshape(tokens * heads, dim) @ keys.T).relu_().view(tokens, heads, -1)
    return torch.bmm(weights[:, None, :], dots)[:, 0, :]
