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


@functools.lru_cache(maxsize=1)
def hadamard() -> torch.Tensor:
    """The fixed rotation: fp32 [128, 128] Sylvester-Hadamard matrix over sqrt(128), its own inverse."""
    matrix = torch.ones(1, 1)
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
