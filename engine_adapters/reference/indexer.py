"""Index logits on the device, page by page: the CUDA path of the indexer."""

from __future__ import annotations

import functools

import torch

from dsv4ctl.engine_adapters.reference.sequence import Chunk, Gate
from dsv4ctl.kernels import index_k, ops
from dsv4ctl.kernels.logits import HEADS, QueryBlocks, query_blocks
from dsv4ctl.kernels.tickets import Tickets

#: Queries of a chunk that one program of the kernel takes together.
_ROWS = 4
#: Multiprocessors left to the loader while the kernel waits for it.
_RESERVED = 16


@functools.lru_cache(maxsize=512)
def _blocks(tokens: int, device: torch.device) -> QueryBlocks:
    """Of one chunk: the same in every layer, and made of lists, which the device waits for."""
    return query_blocks([tokens], 1 if tokens == 1 else _ROWS, device)


def paged_logits(query: torch.Tensor, weights: torch.Tensor, chunk: Chunk, layer: int, gate: Gate) -> torch.Tensor:
    """Logits of all completed blocks: query [T, H, 128] (rotated), weights [T, H], fp32 -> fp32 [T, blocks].

    Queries are rounded to bf16; heads up to the kernel's 64 are zeros. Keys on their way are waited for by the kernel,
    page by page: attention waited on the host for all of the layer before, so that this layer's copy is next. The
    host's gate stands behind the kernel, before anything else of the layer is read; where the kernel gave up by
    then, it runs again.
    """
    tokens, heads, blocks = query.shape[0], query.shape[1], chunk.end // 4
    pages = chunk.pools.layer_bytes("index_k", layer)
    padded = query.new_zeros(tokens, HEADS, index_k.DIM, dtype=torch.bfloat16)
    padded[:, :heads] = query
    shares = weights.new_zeros(tokens, HEADS)
    shares[:, :heads] = weights
    table = chunk.full_pages.to(torch.int32)[None]
    lengths = torch.full((tokens,), blocks, dtype=torch.int32, device=query.device)
    queries = _blocks(tokens, query.device)
    out = query.new_empty(tokens, table.shape[1] * index_k.KEYS)

    def launch(acquired: Tickets | None) -> None:
        ops.paged_logits(
            padded, shares, pages, table, lengths, queries, out, acquired, prefill=tokens > 1, reserved_sms=_RESERVED
        )

    if chunk.landing is None:
        gate("indexer", "index_k", layer)
        launch(None)
    else:
        launch(chunk.landing.of(chunk.pools.specs["index_k"].local_layer(layer)))
        gate("indexer", "index_k", layer)
        if chunk.landing.late():
            launch(None)
    return out[:, :blocks]
