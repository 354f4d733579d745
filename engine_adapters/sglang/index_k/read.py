"""Read path: queries in bf16 and logits over bf16 pages, in the shapes SGLang's indexer passes."""

from __future__ import annotations

import functools
from typing import Any

import torch

from dsv4ctl.engine_adapters.sglang.index_k.pages import IndexKeys, pages_of
from dsv4ctl.kernels import ops
from dsv4ctl.kernels.logits import HEADS, QueryBlocks

PREFILL_ROWS = (
    512  #: from here on the grid of the prefill kernel: the decode kernel adds up all lengths in each program
)


def index_keys(pages: torch.Tensor, *_arguments: Any, **_options: Any) -> IndexKeys:
    """After `DeepSeekV4TokenToKVPool.get_index_k_with_scale_buffer`: its buffer, wrapped."""
    return IndexKeys(pages)


def index_queries(
    q_input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: float,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For `fused_q_indexer_rope_hadamard_quant`: bf16 [T, H, 128] instead of fp8, weights fp32 [T, H, 1]."""
    cos_sin = torch.view_as_real(freqs_cis).flatten(-2)
    queries, weights = ops.index_queries(q_input.contiguous(), weight, weight_scale, cos_sin, positions)
    return queries, weights.unsqueeze(-1)


def paged_logits(
    q: torch.Tensor,
    cache: object,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    _schedule: object,
    max_keys: int,
    _clean: bool = True,
) -> torch.Tensor:
    """For `fp8_paged_mqa_logits_torch` and its sm_120 twin: fp32 [T, max_keys], columns past a row's length unwritten.

    q [T, 1, 64, 128] bf16 (or e4m3, its scale in the weights), weights fp32 [T, 64], lengths int [T] or [T, 1],
    page_table int32 [T, pages], a row a query. Raises ValueError for another number of heads.
    """
    rows, _, heads, _ = q.shape
    if heads != HEADS:
        raise ValueError(f"an indexer of {heads} heads: index_k_dtype bf16 has a kernel for {HEADS}")
    out = torch.empty((rows, max_keys), dtype=torch.float32, device=q.device)
    if rows:
        ops.paged_logits(
            q[:, 0], weights, pages_of(cache), page_table, lengths.reshape(rows).to(torch.int32),
            _one_query_blocks(rows, q.device), out, prefill=rows >= PREFILL_ROWS,
        )  # fmt: skip
    return out


@functools.lru_cache(maxsize=64)
def _one_query_blocks(rows: int, device: torch.device) -> QueryBlocks:
    """A block for each query. On a GPU only the number of blocks is read, so a captured graph may share them."""
    first = torch.arange(rows, dtype=torch.int32, device=device)
    return QueryBlocks(first, torch.ones_like(first), first, rows=1, regular=True)
