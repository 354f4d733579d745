"""Seeded random weights: the same in every process with the same torch release and on every device. The model
knows nothing.

The gains are chosen so that damage shows: attention is peaked (a few rows decide) and outweighs the
residual stream, so wrong bytes in any pool change greedy tokens soon (measured in tests/reference_model).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.tokenizer import EOS, PRINTABLE

ATTENTION_GAIN = 4.0
"""Factor on the softmax logits, whose standard deviation would be about 1 otherwise."""
COMPRESSED_BONUS = {4: 3.0, 128: 3.0}
"""Added to the softmax logits of compressed rows, each of which stands for several tokens."""
OUTPUT_GAIN = 2.0
GATE_GAIN = 2.0


@dataclass(frozen=True)
class LayerWeights:
    """One layer. `project` fp32 [hidden, sum of `widths`] holds what every rank projects of the attention's input.

    `widths`: kv; ratio 128: compressor rows; ratio 4: compressor rows, index compressor rows, index queries,
    index head weights. `kv_position`, `index_position` [page_tokens, width]: added to the compressors' gate
    scores (one pattern a block, repeated). The other tensors are one a shard, that is, a query head and its
    part of the MLP: query [hidden, kv_dim], output [kv_dim, hidden], gate_up [hidden, 2 * mlp / heads],
    down [mlp / heads, hidden].
    """

    project: torch.Tensor
    widths: tuple[int, ...]
    query: tuple[torch.Tensor, ...]
    output: tuple[torch.Tensor, ...]
    gate_up: tuple[torch.Tensor, ...]
    down: tuple[torch.Tensor, ...]
    kv_position: torch.Tensor | None
    index_position: torch.Tensor | None


@dataclass(frozen=True)
class Weights:
    """`embed` fp32 [vocab, hidden], `head` fp32 [hidden, vocab], `head_bias` [vocab] (-inf: never said)."""

    embed: torch.Tensor
    head: torch.Tensor
    head_bias: torch.Tensor
    layers: tuple[LayerWeights, ...]


def make_weights(geometry: Geometry, seed: int, device: torch.device) -> Weights:
    """Weights of a geometry, drawn on the CPU, rounded to bf16 and kept in fp32: so they are used."""
    hidden = geometry.hidden
    head_bias = torch.full((geometry.vocab,), float("-inf"), device="cpu")
    head_bias[[*PRINTABLE, EOS]] = 0.0
    return Weights(
        embed=_normal(seed, "embed", geometry.vocab, hidden).to(device),
        head=(_normal(seed, "head", hidden, geometry.vocab) / hidden**0.5).to(device),
        head_bias=head_bias.to(device),
        layers=tuple(_layer(geometry, seed, layer, device) for layer in range(geometry.layers)),
    )


def _layer(geometry: Geometry, seed: int, layer: int, device: torch.device) -> LayerWeights:
    ratio, hidden = geometry.compress_ratios[layer], geometry.hidden
    attention = geometry.heads * geometry.kv_dim
    widths = [geometry.kv_dim]
    if ratio == 128:
        widths += [2 * geometry.kv_dim]
    if ratio == 4:
        index_queries = geometry.index_heads * geometry.index_dim
        widths += [4 * geometry.kv_dim, 4 * geometry.index_dim, index_queries, geometry.index_heads]
    kv_width = geometry.kv_dim * (2 if ratio == 4 else 1)

    def normal(name: str, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (_normal(seed, f"{layer}.{name}", rows, columns) * (gain / rows**0.5)).to(device)

    def position(name: str, width: int) -> torch.Tensor:
        return _normal(seed, f"{layer}.{name}", ratio, width).repeat(geometry.page_tokens // ratio, 1).to(device)

    project = _bf16(normal("project", hidden, attention + sum(widths)))
    gate_up = _bf16(normal("gate_up", hidden, 2 * geometry.mlp)).chunk(2 * geometry.heads, dim=1)
    gates = zip(gate_up[: geometry.heads], gate_up[geometry.heads :], strict=True)
    return LayerWeights(
        project=project[:, attention:].contiguous(),
        widths=tuple(widths),
        query=_shards(project[:, :attention].chunk(geometry.heads, dim=1)),
        output=_shards(_bf16(normal("output", attention, hidden, OUTPUT_GAIN)).chunk(geometry.heads)),
        gate_up=_shards([torch.cat(pair, dim=1) for pair in gates]),
        down=_shards(_bf16(normal("down", geometry.mlp, hidden)).chunk(geometry.heads)),
        kv_position=position("kv_position", kv_width) if ratio else None,
        index_position=position("index_position", 2 * geometry.index_dim) if ratio == 4 else None,
    )


def _shards(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(part.contiguous() for part in parts)


def _normal(seed: int, name: str, rows: int, columns: int) -> torch.Tensor:
    """Standard normal values, drawn from a stream of their own: one tensor's shape moves no other."""
    generator = torch.Generator("cpu").manual_seed(seed * 0x9E3779B1 + zlib.crc32(name.encode()) & (1 << 63) - 1)
    return _bf16(torch.randn(rows, columns, generator=generator, device="cpu"))


def _bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16).to(torch.float32)
