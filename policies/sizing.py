"""Sizing: bytes of each pool per full token, from the shape of the model and the dtypes in use.

A full token is one token of context that the `full` pools cover. Window pools and the state rings behind them
are kept for `swa_ratio` of the full tokens. All arithmetic is exact; figures become floats at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

import msgspec

KvDtype = Literal["fp8", "bf16"]
StateDtype = Literal["fp32", "bf16"]
C128State = Literal["per-token", "per-request"]

_WIDTH = {"fp8": 1, "bf16": 2, "fp32": 4}
_NOPE_SCALE_GROUP = 64  # fp8 KV: one UE8M0 byte for 64 values, the scales padded to 8 bytes
_SCALES_ALIGN = 8
_INDEX_SCALE_GROUP = 128  # fp8 index-K: one fp32 scale for 128 values


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the bytes depend on. `layers`: number of layers by compress ratio (0: window only, 4, 128)."""

    layers: dict[int, int]
    nope_dim: int = 448
    rope_dim: int = 64
    index_dim: int = 128
    swa_ratio: float = 0.1
    window: int = 128
    c4_ring: int = 8
    c128_ring: int = 128
    kv_dtype: KvDtype = "fp8"
    index_k_dtype: KvDtype = "fp8"
    state_dtype: StateDtype = "fp32"

    def __post_init__(self) -> None:
        unknown = sorted(set(self.layers) - {0, 4, 128})
        if unknown:
            raise ValueError(f"compress ratios {unknown}: 0, 4 and 128 expected")
        if not sum(self.layers.values()):
            raise ValueError("a model without layers: at least one layer expected")


class Sizing(msgspec.Struct, frozen=True):
    """`by_pool`: bytes per full token. `per_request`: bytes per request, of the pools counted that way."""

    by_pool: dict[str, float]
    total: float
    per_request: dict[str, int]


def shape_of(config: Mapping[str, Any], **changes: Any) -> ModelShape:
    """The shape in a DeepSeek-V4 `config.json`; `changes`: what it does not state (dtypes, rings, ratio).

    Raises ValueError naming the key that is missing.
    """
    missing = [key for key in ("compress_ratios", "num_hidden_layers", "head_dim") if key not in config]
    if missing:
        raise ValueError(f"model config without {', '.join(missing)}: a DeepSeek-V4 config.json expected")
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]  # a further entry is the draft layer's
    rope = config.get("qk_rope_head_dim", 64)
    return ModelShape(
        layers={ratio: ratios.count(ratio) for ratio in sorted(set(ratios))},
        nope_dim=config["head_dim"] - rope,
        rope_dim=rope,
        index_dim=config.get("index_head_dim", 128),
        window=config.get("sliding_window", 128),
        **changes,
    )


def kv_entry_bytes(shape: ModelShape) -> int:
    """One KV entry of one layer: nope in `kv_dtype` (fp8: with its scales), rope always in bf16."""
    rope = shape.rope_dim * _WIDTH["bf16"]
    if shape.kv_dtype == "bf16":
        return shape.nope_dim * _WIDTH["bf16"] + rope
    scales = -(-shape.nope_dim // _NOPE_SCALE_GROUP)
    return shape.nope_dim + rope + -(-scales // _SCALES_ALIGN) * _SCALES_ALIGN


def index_key_bytes(shape: ModelShape) -> int:
    """One index key of one layer; fp8: with its scales."""
    if shape.index_k_dtype == "bf16":
        return shape.index_dim * _WIDTH["bf16"]
    return shape.index_dim + -(-shape.index_dim // _INDEX_SCALE_GROUP) * _WIDTH["fp32"]


def bytes_per_full_token(shape: ModelShape, *, c128_state: C128State = "per-token") -> Sizing:
    """Bytes per full token by pool.

    A state slot holds a value and a score for each dimension; at ratio 4 two blocks overlap: twice that.
    `c128_state`: whether the ring of ratio 128 is counted per token or, as later releases do, per request.
    """
    c4, c128 = shape.layers.get(4, 0), shape.layers.get(128, 0)
    entry, key = kv_entry_bytes(shape), index_key_bytes(shape)
    head_dim = shape.nope_dim + shape.rope_dim
    pair = 2 * _WIDTH[shape.state_dtype]
    kept = Fraction(str(shape.swa_ratio))
    c4_slots = kept * shape.c4_ring / shape.window
    c128_slots = kept * shape.c128_ring / shape.window
    c128_slot_bytes = pair * head_dim * c128
    exact = {
        "swa_kv": kept * entry * sum(shape.layers.values()),
        "c4_kv": Fraction(entry * c4, 4),
        "c128_kv": Fraction(entry * c128, 128),
        "index_k": Fraction(key * c4, 4),
        "c4_state": c4_slots * 2 * pair * head_dim * c4,
        "index_state": c4_slots * 2 * pair * shape.index_dim * c4,
        "c128_state": c128_slots * c128_slot_bytes,
    }
    per_request: dict[str, int] = {}
    if c128_state == "per-request":
        del exact["c128_state"]
        per_request["c128_state"] = shape.c128_ring * c128_slot_bytes
    return Sizing(
        by_pool={pool: float(size) for pool, size in exact.items()},
        total=float(sum(exact.values())),
        per_request=per_request,
    )
