"""Shapes of the reference engine: model geometry and the pools that follow from it. Imports no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

INDEX_SCALE_BYTES = 4
STATE_BYTES = 4
KV_BYTES = 2
RING_RATIO_4 = 8
RING_RATIO_128 = 128
PAGE_ALIGNMENT = 64

Space = Literal["full", "swa", "state"]
Span = Literal["full", "window", "point"]
SPACES: tuple[Space, ...] = ("full", "swa", "state")
POOLS = ("swa_kv", "c4_kv", "c128_kv", "index_k", "c4_state", "index_state", "c128_state")


class Geometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A DeepSeek-V4-shaped model, small. The defaults are the embedded engine's.

    Raises ValueError (naming field, value and what is allowed) for a shape the model cannot have.
    """

    compress_ratios: tuple[int, ...] = (0, 4, 4, 128, 4)
    hidden: int = 64
    heads: int = 2
    kv_dim: int = 64
    rope_dim: int = 16
    mlp: int = 128
    index_heads: int = 2
    index_dim: int = 128
    index_topk: int = 32
    index_k_dtype: Literal["bf16", "fp8"] = "bf16"
    window: int = 128
    page_tokens: int = 256
    context_tokens: int = 16384
    vocab: int = 264

    def __post_init__(self) -> None:
        if not self.compress_ratios or any(ratio not in (0, 4, 128) for ratio in self.compress_ratios):
            raise ValueError(f"compress_ratios {self.compress_ratios}: a list of 0, 4 and 128 expected")
        if self.page_tokens != 256:
            raise ValueError(f"page_tokens {self.page_tokens}: only 256 (64 index keys a page) is supported")
        if not 0 < self.window <= self.page_tokens:
            raise ValueError(f"window {self.window}: 1 to {self.page_tokens} expected")
        if self.index_dim != 128:
            raise ValueError(f"index_dim {self.index_dim}: only 128 (the Hadamard rotation) is supported")
        if self.kv_dim % 32 or self.kv_dim <= 0:
            raise ValueError(f"kv_dim {self.kv_dim}: a multiple of 32 expected (page alignment)")
        if self.rope_dim % 2 or not 0 < self.rope_dim <= self.kv_dim:
            raise ValueError(f"rope_dim {self.rope_dim}: an even number up to kv_dim expected")
        if self.context_tokens % self.page_tokens or self.context_tokens <= 0:
            raise ValueError(f"context_tokens {self.context_tokens}: a multiple of page_tokens expected")
        if self.heads > 0 and self.mlp % self.heads:
            raise ValueError(f"mlp {self.mlp}: a multiple of heads ({self.heads}) expected")
        for name in ("hidden", "heads", "mlp", "index_heads", "index_topk", "vocab"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} {getattr(self, name)}: a number above 0 expected")

    @property
    def layers(self) -> int:
        return len(self.compress_ratios)

    def layers_of_ratio(self, ratio: int) -> tuple[int, ...]:
        """Model layers with this compress ratio, ascending."""
        return tuple(layer for layer, value in enumerate(self.compress_ratios) if value == ratio)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens (the last one may be partly filled)."""
        return -(-tokens // self.page_tokens)


class Segment(msgspec.Struct, frozen=True):
    """One run of equal rows inside a page: rows * row_bytes bytes from offset."""

    offset: int
    row_bytes: int


class PoolSpec(msgspec.Struct, frozen=True):
    """What one pool is: its space, span, layers and the layout of a page (bytes per layer).

    A page has `rows` rows; each row lies in every segment (fp8 index keys: key bytes, then scales).
    `tokens_per_row` is 1, 4 or 128; for a ring (space `state`) rows are slots of position % rows.
    """

    name: str
    space: Space
    span: Span
    model_layers: tuple[int, ...]
    rows: int
    tokens_per_row: int
    segments: tuple[Segment, ...]
    page_bytes: int

    @property
    def ring(self) -> bool:
        return self.space == "state"

    def local_layer(self, model_layer: int) -> int:
        """Pool-local index of a model layer. Raises KeyError when the pool has no such layer."""
        try:
            return self.model_layers.index(model_layer)
        except ValueError:
            raise KeyError(f"pool {self.name} has layers {self.model_layers}, not {model_layer}") from None

    def valid_rows(self, page: int, tokens: int) -> int:
        """Rows of logical page `page` that a sequence of `tokens` tokens has written and still needs.

        Paged pools: completed rows. Rings: the leading slots in use at length `tokens` (the page is
        ignored); a ratio-128 ring holds only the open block, so nothing at a page boundary.
        """
        if self.name == "c128_state":
            return tokens % self.rows
        if self.ring:
            return min(tokens, self.rows)
        page_tokens = self.rows * self.tokens_per_row
        return max(0, min(self.rows, (tokens - page * page_tokens) // self.tokens_per_row))

    def valid_ranges(self, valid_rows: int) -> tuple[tuple[int, int], ...]:
        """Byte ranges [start, end) of the first `valid_rows` rows, one a segment, ascending."""
        return tuple((part.offset, part.offset + valid_rows * part.row_bytes) for part in self.segments)


def pool_specs(geometry: Geometry) -> dict[str, PoolSpec]:
    """Pools of a geometry by name, in the order of POOLS; pools without layers are left out.

    Sizes follow DeepSeek-V4's: index key 256 B (bf16) or 128 B + a 4 B scale (fp8); a state row keeps
    kv and gate in fp32, twice the width for ratio 4 (its blocks overlap).
    """
    ratio_4, ratio_128 = geometry.layers_of_ratio(4), geometry.layers_of_ratio(128)
    row = geometry.kv_dim * KV_BYTES
    keys = geometry.page_tokens // 4
    if geometry.index_k_dtype == "bf16":
        index_segments: tuple[Segment, ...] = (Segment(0, geometry.index_dim * 2),)
    else:
        scales = Segment(keys * geometry.index_dim, INDEX_SCALE_BYTES)
        index_segments = (Segment(0, geometry.index_dim), scales)
    rows_128 = geometry.page_tokens // 128
    kv_state, index_state = (Segment(0, 2 * dim * 2 * STATE_BYTES) for dim in (geometry.kv_dim, geometry.index_dim))
    kv_state_128 = Segment(0, geometry.kv_dim * 2 * STATE_BYTES)
    all_layers = tuple(range(geometry.layers))
    specs = (
        _spec("swa_kv", "swa", "window", all_layers, geometry.page_tokens, 1, (Segment(0, row),)),
        _spec("c4_kv", "full", "full", ratio_4, keys, 4, (Segment(0, row),)),
        _spec("c128_kv", "full", "full", ratio_128, rows_128, 128, (Segment(0, row),)),
        _spec("index_k", "full", "full", ratio_4, keys, 4, index_segments),
        _spec("c4_state", "state", "point", ratio_4, RING_RATIO_4, 1, (kv_state,)),
        _spec("index_state", "state", "point", ratio_4, RING_RATIO_4, 1, (index_state,)),
        _spec("c128_state", "state", "point", ratio_128, RING_RATIO_128, 1, (kv_state_128,)),
    )
    return {spec.name: spec for spec in specs if spec.model_layers}


def _spec(
    name: str,
    space: Space,
    span: Span,
    model_layers: tuple[int, ...],
    rows: int,
    tokens_per_row: int,
    segments: tuple[Segment, ...],
) -> PoolSpec:
    page_bytes = rows * sum(part.row_bytes for part in segments)
    if page_bytes % PAGE_ALIGNMENT:
        raise ValueError(f"pool {name}: a page of {page_bytes} B is not a multiple of {PAGE_ALIGNMENT} B")
    return PoolSpec(name, space, span, model_layers, rows, tokens_per_row, segments, page_bytes)
