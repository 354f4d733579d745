"""Read path: queries in bf16 and logits over bf16 pages, in the shapes SGLang's indexer passes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from dsv4ctl.engine_adapters.sglang.index_k.pages import IndexKeys, pages_of
from dsv4ctl.kernels import ops
from dsv4ctl.kernels.logits import HEADS, QueryBlocks, query_blocks

PREFILL_ROWS = 512  #: from here on the prefill kernel's grid: each program of the decode kernel adds up all lengths
SHARED_ROWS = 4  #: queries of one sequence that read its keys together
_counts: ContextVar[tuple[int, ...] | None] = ContextVar("_counts", default=None)


def index_keys(pages: torch.Tensor, *_arguments: Any, **_options: Any) -> IndexKeys:
    """After `DeepSeekV4TokenToKVPool.get_index_k_with_scale_buffer`: its buffer, wrapped."""
    return IndexKeys(pages)


def forward_c4_indexer(original: Callable[..., None], backend: Any, *arguments: Any, **options: Any) -> None:
    """Around `C4IndexerBackendMixin.forward_c4_indexer`: tells `paged_logits` which queries of a prefill share keys."""
    with sharing(_queries_of_sequences(options.get("forward_batch"))):
        original(backend, *arguments, **options)


@contextlib.contextmanager
def sharing(counts: tuple[int, ...] | None) -> Iterator[None]:
    """In its body `paged_logits` gets `counts[s]` consecutive queries of each sequence s; None: nothing is known."""
    token = _counts.set(counts)
    try:
        yield
    finally:
        _counts.reset(token)


def _queries_of_sequences(batch: Any) -> tuple[int, ...] | None:
    """Queries of each sequence of an eager, unsplit prefill; None for any other batch."""
    if (
        getattr(batch, "forward_mode", None) is None
        or batch.forward_mode.name != "EXTEND"
        or batch._original_forward_mode is not None
        or batch.tbo_parent_token_range is not None
        or batch.extend_seq_lens_cpu is None
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    ):
        return None
    return tuple(int(count) for count in batch.extend_seq_lens_cpu)


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
    counts = _counts.get()
    if counts is not None and sum(counts) == rows:
        blocks, prefill = shared_blocks(counts, q.device), True
    else:
        blocks, prefill = one_query_blocks(rows, q.device), rows >= PREFILL_ROWS
    if rows:
        ops.paged_logits(
            q[:, 0], weights, pages_of(cache), page_table, lengths.reshape(rows).to(torch.int32), blocks, out,
            prefill=prefill,
        )  # fmt: skip
    return out


@functools.lru_cache(maxsize=4)
def shared_blocks(counts: tuple[int, ...], device: torch.device) -> QueryBlocks:
    """Blocks of queries of one sequence each. SGLang's page table has a row a query: a block takes its first one's."""
    blocks = query_blocks(counts, SHARED_ROWS, device)
    return QueryBlocks(blocks.first, blocks.count, blocks.first, SHARED_ROWS)


@functools.lru_cache(maxsize=64)
def one_query_blocks(rows: int, device: torch.device) -> QueryBlocks:
    """A block for each query. On a GPU only the number of blocks is read, so a captured graph may share them."""
    first = torch.arange(rows, dtype=torch.int32, device=device)
    return QueryBlocks(first, torch.ones_like(first), first, rows=1, regular=True)
