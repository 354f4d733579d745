"""Compressors: softmax-gated pooling of token rows into one row a block, and the state rings behind it.

A token's row is (values, gate scores + position bias), fp32, 2 * width. Ratio 4 overlaps: a block pools the
first half of the previous block's channels and the second half of its own. Ratio 128 pools its own tokens.
A ring keeps position p in slot p % slots of the sequence's `state` page.
"""

from __future__ import annotations

import torch

from dsv4ctl.engine_adapters.reference.geometry import RING_RATIO_4, RING_RATIO_128
from dsv4ctl.engine_adapters.reference.sequence import Chunk, Gate
from dsv4ctl.engine_adapters.reference.weights import GATE_GAIN


def compress_4(
    rows: torch.Tensor, position: torch.Tensor, chunk: Chunk, pool: str, layer: int, gate: Gate
) -> torch.Tensor | None:
    """Pool the ratio-4 blocks a chunk completes: rows [T, 4 * dim] -> [blocks, dim], or None.

    `position` [page_tokens, 2 * dim] is added to `rows` in place.
    Reads (behind the gate) and updates ring `pool` of the layer.
    """
    _add_position(rows, position, chunk)
    ring = _ring(chunk, pool, layer, gate, needed=chunk.start > 0)
    first_block, end_block = chunk.start // 4, chunk.end // 4
    if chunk.tokens == 1:
        ring[chunk.start % RING_RATIO_4] = rows[0]
        if end_block == first_block:
            return None
        ordered = ring if chunk.start % RING_RATIO_4 == RING_RATIO_4 - 1 else ring.roll(4, dims=0)
        before, own = ordered[:4], ordered[4:]
    else:
        before, own = ring[4:].clone(), rows[: (end_block - first_block) * 4]
        kept = min(chunk.tokens, RING_RATIO_4)
        slots = torch.arange(chunk.end - kept, chunk.end, device=ring.device) % RING_RATIO_4
        ring[slots] = rows[-kept:]
        if end_block == first_block:
            return None
    return _pool_overlapping(before if first_block else None, own)


def compress_128(
    rows: torch.Tensor, position: torch.Tensor, chunk: Chunk, layer: int, gate: Gate
) -> torch.Tensor | None:
    """Pool the ratio-128 blocks a chunk completes: rows [T, 2 * dim] -> [blocks, dim], or None.

    `position` [page_tokens, dim] is added to `rows` in place.
    The ring keeps the open block only: at a page boundary none of it is needed.
    """
    _add_position(rows, position, chunk)
    ring = _ring(chunk, "c128_state", layer, gate, needed=chunk.start % RING_RATIO_128 > 0)
    blocks = chunk.end // RING_RATIO_128 - chunk.start // RING_RATIO_128
    if chunk.tokens == 1:
        ring[chunk.start % RING_RATIO_128] = rows[0]
        whole = ring
    else:
        whole, left = rows.split([blocks * RING_RATIO_128, chunk.tokens - blocks * RING_RATIO_128])
        ring[: left.shape[0]] = left
    if blocks == 0:
        return None
    values, scores = whole.view(blocks, RING_RATIO_128, 2, -1).unbind(dim=2)
    return (values * (scores * GATE_GAIN).softmax(dim=1)).sum(dim=1)


def _add_position(rows: torch.Tensor, position: torch.Tensor, chunk: Chunk) -> None:
    """Add the position bias to the gate scores, in place."""
    first = chunk.start % position.shape[0]
    rows[:, rows.shape[1] // 2 :] += position[first : first + chunk.tokens]


def _ring(chunk: Chunk, pool: str, layer: int, gate: Gate, needed: bool) -> torch.Tensor:
    """The private ring [slots, row] of the layer, filled from the snapshot the chunk starts from, if any."""
    slots = chunk.pools.specs[pool].rows
    rings = chunk.pools.rows(pool, layer).view(-1, slots, chunk.pools.rows(pool, layer).shape[1])
    if needed:
        gate("compressor", pool, layer)
        if chunk.state_from != chunk.state_to:
            rings[chunk.state_to] = rings[chunk.state_from]
    return rings[chunk.state_to]


def _pool_overlapping(before: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
    """Rows of the block before the first (None: there is none), [4, 4 * dim], and own, [n * 4, 4 * dim] -> [n, dim].

    A softmax over 8 rows a channel, as a quotient of sums (the scores are bounded: no maximum is taken out).
    """
    weighted, weights = _quad_sums(own)
    dim = weights.shape[1] // 2
    if before is None:
        earlier_weighted = earlier_weights = weights.new_zeros(1, 2 * dim)
    else:
        earlier_weighted, earlier_weights = _quad_sums(before)
    numerator = torch.cat([earlier_weighted, weighted[:-1]])[:, :dim] + weighted[:, dim:]
    denominator = torch.cat([earlier_weights, weights[:-1]])[:, :dim] + weights[:, dim:]
    return numerator / denominator


def _quad_sums(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n * 4, values and scores] -> per block: sums of exp(score) * value, and of exp(score)."""
    values, scores = rows.chunk(2, dim=-1)
    weights = (scores * GATE_GAIN).exp_()
    weighted = weights * values
    return weighted.view(-1, 4, values.shape[1]).sum(dim=1), weights.view(-1, 4, values.shape[1]).sum(dim=1)
