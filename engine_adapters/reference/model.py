"""The model: DeepSeek-V4-shaped, small, fp32 arithmetic on bf16 (or fp8) storage, one chunk at a time.

Every cached byte is written to and read from the pools; before each read of cached bytes the caller's
`gate` is called. Nothing here depends on other sequences: a chunk's result is a function of its tokens,
the bytes its page table points to, and the shapes (start, tokens), which cold and cached runs share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from dsv4ctl.engine_adapters.reference.compressor import compress_4, compress_128
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.indexer import paged_logits
from dsv4ctl.engine_adapters.reference.pools import resolved
from dsv4ctl.engine_adapters.reference.rope import Rope
from dsv4ctl.engine_adapters.reference.sequence import Chunk, Gate
from dsv4ctl.engine_adapters.reference.weights import (
    ATTENTION_GAIN,
    COMPRESSED_BONUS,
    LayerWeights,
    make_weights,
)
from dsv4ctl.kernels import index_k, ops

NEVER = float("-inf")
EPSILON = 1e-6


Gather = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""The partial sums of this rank's shards -> those of all shards, in order. Every rank calls it at the same places."""


def gather_nothing(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """One rank has every shard."""
    return parts


class Model:
    """Weights and the forward pass. Creating one sets torch to one thread: results depend on the number.

    Tensor-parallel by query head: a rank computes the attention and the MLP part of its `shards` (heads), `gather`
    collects the partial sums, and every rank adds them in the order of the shards. One rank computes the same
    shards in the same shapes and adds them in the same order, so that n ranks equal one rank bit for bit.
    """

    def __init__(
        self,
        geometry: Geometry,
        seed: int,
        shards: range | None = None,
        gather: Gather = gather_nothing,
        device: str | torch.device = "cpu",
    ) -> None:
        torch.set_num_threads(1)
        self.geometry = geometry
        self.shards = range(geometry.heads) if shards is None else shards
        self._gather = gather
        self.seed = seed
        self.device = resolved(device)
        self.weights = make_weights(geometry, seed, self.device)
        self.rope = Rope(geometry, self.device)

    @torch.inference_mode()
    def embed(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's hidden state before layer 0: fp32 [T, hidden]."""
        return self.weights.embed[chunk.ids]

    @torch.inference_mode()
    def forward_layer(self, layer: int, hidden: torch.Tensor, chunk: Chunk, gate: Gate) -> torch.Tensor:
        """One layer of one chunk: fp32 [T, hidden] -> fp32 [T, hidden]. Writes the chunk's rows in the pools.

        Layers must be run in ascending order; between two of them, chunks of other sequences may be run.
        """
        weights = self.weights.layers[layer]
        hidden = hidden + self._attention(layer, weights, _normed(hidden), chunk, gate)
        x, parts = _normed(hidden), []
        for shard in self.shards:
            up, gated = (x @ weights.gate_up[shard]).chunk(2, dim=-1)
            parts.append((functional.silu(gated) * up) @ weights.down[shard])
        return hidden + self._sum(parts)

    def _sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return functools.reduce(torch.add, self._gather(parts))

    def wait(self) -> None:
        """Everything that was launched is done: what a forward read may be reused, what it wrote may be read."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @torch.inference_mode()
    def next_token(self, hidden: torch.Tensor) -> int:
        """Greedy token after the last row of the last layer's hidden state; the lowest id wins ties."""
        logits = _normed(hidden[-1]) @ self.weights.head + self.weights.head_bias
        return int(np.argmax(logits.cpu().numpy()))

    def forward(self, chunk: Chunk, gate: Gate) -> torch.Tensor:
        """All layers of one chunk: fp32 [T, hidden]."""
        hidden = self.embed(chunk)
        for layer in range(self.geometry.layers):
            hidden = self.forward_layer(layer, hidden, chunk, gate)
        return hidden

    def _attention(self, layer: int, weights: LayerWeights, x: torch.Tensor, chunk: Chunk, gate: Gate) -> torch.Tensor:
        geometry, ratio = self.geometry, self.geometry.compress_ratios[layer]
        kv, *compressed = (x @ weights.project).split(weights.widths, dim=-1)
        self._write_window(layer, self.rope.at(_normed(kv[:, None]), chunk.start)[:, 0], chunk)
        gain = ATTENTION_GAIN / geometry.kv_dim**0.5
        queries = [self.rope.at(_normed((x @ weights.query[s])[:, None]), chunk.start) * gain for s in self.shards]
        shared = shared_bias = chosen = None
        if ratio == 4:
            kv_rows, index_rows, index_query, index_weight = compressed
            self._compress_4(layer, weights, kv_rows, index_rows, chunk, gate)
            if chunk.end >= 4:
                chosen = self._choose(layer, index_query, index_weight, chunk, gate)
                gate("attention", "c4_kv", layer)
        elif ratio == 128:
            self._compress_128(layer, weights, compressed[0], chunk, gate)
            if chunk.end >= 128:
                shared, shared_bias = self._read_128(layer, chunk, gate)
        gate("attention", "swa_kv", layer)
        window = chunk.pools.rows("swa_kv", layer).index_select(0, chunk.window_rows).to(torch.float32)
        outs = [torch.empty_like(query) for query in queries]
        for block in chunk.query_blocks:
            at, keys, bias = block.queries, window[block.keys], block.bias
            if shared is not None and shared_bias is not None:
                keys, bias = torch.cat([keys, shared]), torch.cat([bias, shared_bias[at]], dim=1)
            if chosen is None:
                for query, out in zip(queries, outs, strict=True):
                    out[at] = attend(query[at], keys, bias)
            else:
                selected, selected_bias = self._read_chosen(layer, chosen[at], chunk.positions[at], chunk)
                for query, out in zip(queries, outs, strict=True):
                    out[at] = attend_chosen(query[at], keys, bias, selected, selected_bias)
        turned = [self.rope.at(out, chunk.start, inverse=True).view(chunk.tokens, -1) for out in outs]
        return self._sum([out @ weights.output[shard] for shard, out in zip(self.shards, turned, strict=True)])

    def _write_window(self, layer: int, kv: torch.Tensor, chunk: Chunk) -> None:
        page_tokens = self.geometry.page_tokens
        first = chunk.swa_page * page_tokens + chunk.start % page_tokens
        chunk.pools.rows("swa_kv", layer)[first : first + chunk.tokens] = kv.to(torch.bfloat16)

    def _compress_4(
        self,
        layer: int,
        weights: LayerWeights,
        kv_rows: torch.Tensor,
        index_rows: torch.Tensor,
        chunk: Chunk,
        gate: Gate,
    ) -> None:
        """Update both ratio-4 rings; write the kv rows and index keys of the blocks the chunk completes."""
        geometry = self.geometry
        block, row = chunk.start // 4, chunk.start % geometry.page_tokens // 4
        assert weights.kv_position is not None
        assert weights.index_position is not None
        kv = compress_4(kv_rows, weights.kv_position, chunk, "c4_state", layer, gate)
        keys = compress_4(index_rows, weights.index_position, chunk, "index_state", layer, gate)
        if kv is None or keys is None:
            return
        kv = self.rope.at_blocks(_normed(kv), block, 4)
        first = chunk.full_page * (geometry.page_tokens // 4) + row
        chunk.pools.rows("c4_kv", layer)[first : first + kv.shape[0]] = kv.to(torch.bfloat16)
        keys = self.rope.at_blocks(_normed(keys), block, 4) @ index_k.hadamard(self.device)
        pages = chunk.pools.layer_bytes("index_k", layer)
        index_k.store_keys(pages, geometry.index_k_dtype, chunk.full_page, row, keys)

    def _choose(
        self,
        layer: int,
        index_query: torch.Tensor,
        index_weight: torch.Tensor,
        chunk: Chunk,
        gate: Gate,
    ) -> torch.Tensor:
        """The indexer: logical block numbers int64 [T, k], ascending; those not yet visible come out too."""
        geometry = self.geometry
        query = self.rope.at(index_query.view(chunk.tokens, geometry.index_heads, geometry.index_dim), chunk.start)
        query, own = query @ index_k.hadamard(self.device), chunk.hidden_4.shape[1]
        if self.device.type == "cuda":
            logits = paged_logits(query, index_weight, chunk, layer, gate)
            logits[:, logits.shape[1] - own :] += chunk.hidden_4
            return ops.topk_indices(logits, geometry.index_topk)
        gate("indexer", "index_k", layer)
        pages = chunk.pools.layer_bytes("index_k", layer)
        keys = index_k.read_keys(pages, geometry.index_k_dtype, chunk.full_pages, chunk.end // 4)
        chosen = []
        for block in chunk.query_blocks:
            logits = index_k.index_logits(query[block.queries], index_weight[block.queries], keys)
            logits[:, logits.shape[1] - own :] += chunk.hidden_4[block.queries]
            chosen.append(ops.topk_indices(logits, geometry.index_topk))
        return torch.cat(chosen)

    def _read_chosen(
        self, layer: int, chosen: torch.Tensor, positions: torch.Tensor, chunk: Chunk
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compressed rows of the chosen blocks [T, k] of some queries: fp32 [T, k, kv_dim], and their bias [T, k]."""
        rows = chunk.rows_4[chosen.reshape(-1)]
        selected = chunk.pools.rows("c4_kv", layer).index_select(0, rows).to(torch.float32)
        bias = torch.zeros(chosen.shape, device=self.device).masked_fill_(
            (chosen + 1) * 4 > positions[:, None] + 1, NEVER
        )
        return selected.view(*chosen.shape, -1), bias.add_(COMPRESSED_BONUS[4])

    def _compress_128(self, layer: int, weights: LayerWeights, rows: torch.Tensor, chunk: Chunk, gate: Gate) -> None:
        """Update the ratio-128 ring; write the kv rows of the blocks the chunk completes."""
        assert weights.kv_position is not None
        kv = compress_128(rows, weights.kv_position, chunk, layer, gate)
        if kv is None:
            return
        kv = self.rope.at_blocks(_normed(kv), chunk.start // 128, 128)
        page_tokens = self.geometry.page_tokens
        first = chunk.full_page * (page_tokens // 128) + chunk.start % page_tokens // 128
        chunk.pools.rows("c128_kv", layer)[first : first + kv.shape[0]] = kv.to(torch.bfloat16)

    def _read_128(self, layer: int, chunk: Chunk, gate: Gate) -> tuple[torch.Tensor, torch.Tensor]:
        """All completed ratio-128 rows: fp32 [n, kv_dim], and their bias [T, n]."""
        gate("attention", "c128_kv", layer)
        shared = chunk.pools.rows("c128_kv", layer).index_select(0, chunk.rows_128).to(torch.float32)
        bias = torch.full((chunk.tokens, shared.shape[0]), COMPRESSED_BONUS[128], device=self.device)
        bias[:, shared.shape[0] - chunk.hidden_128.shape[1] :] += chunk.hidden_128
        return shared, bias


def attend(query: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Softmax over rows all queries share; rows are keys and values.

    query [T, H, D] (scaled), keys [K, D], bias [T, K] -> [T, H, D]. Queries and keys have RMS 1, so the
    scores are bounded and no maximum is taken out.
    """
    weights = _shared_weights(query, keys, bias)
    return _mix(weights, keys).div_(weights.sum(dim=-1, keepdim=True))


def attend_chosen(
    query: torch.Tensor,
    keys: torch.Tensor,
    bias: torch.Tensor,
    selected: torch.Tensor,
    selected_bias: torch.Tensor,
) -> torch.Tensor:
    """As `attend`, in one softmax with rows of each query's own: selected [T, k, D], their bias [T, k]."""
    weights = _shared_weights(query, keys, bias)
    own = torch.bmm(query, selected.transpose(1, 2)).add_(selected_bias[:, None, :]).exp_()
    total = weights.sum(dim=-1, keepdim=True).add_(own.sum(dim=-1, keepdim=True))
    return _mix(weights, keys).add_(torch.bmm(own, selected)).div_(total)


def _shared_weights(query: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    tokens, heads, dim = query.shape
    scores = (query.reshape(tokens * heads, dim) @ keys.T).view(tokens, heads, -1)
    return scores.add_(bias[:, None, :]).exp_()


def _mix(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    tokens, heads, count = weights.shape
    return (weights.view(tokens * heads, count) @ rows).view(tokens, heads, -1)


def _normed(x: torch.Tensor) -> torch.Tensor:
    """RMS norm without weights: x / rms(x)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * norm.add_(EPSILON).reciprocal_().mul_(x.shape[-1] ** 0.5)
