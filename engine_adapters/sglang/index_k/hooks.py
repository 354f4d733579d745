"""The hooks of `index_k_dtype = "bf16"`, by release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from dsv4ctl.engine_adapters.sglang.index_k import geometry, read, store

_POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
_INDEXER = "sglang.srt.layers.attention.dsv4.indexer"
_UTILS = "sglang.srt.mem_cache.utils"

Kind = Literal["after", "around", "replace"]
Hook = tuple[str, Kind, Callable[..., Any]]

_COMMON: list[Hook] = [
    (
        "sglang.srt.layers.attention.dsv4.compressor_v2.compress_norm_rope_store",
        "around",
        store.compress_norm_rope_store,
    ),
    (f"{_POOL}.DeepSeekV4IndexerPool._create_buffer", "after", geometry.created),
    (f"{_POOL}.DeepSeekV4TokenToKVPool.get_index_k_with_scale_buffer", "after", read.index_keys),
    (f"{_INDEXER}.fused_q_indexer_rope_hadamard_quant", "replace", read.index_queries),
    (f"{_INDEXER}.C4IndexerBackendMixin.forward_c4_indexer", "around", read.forward_c4_indexer),
    (f"{_INDEXER}.fp8_paged_mqa_logits_torch", "replace", read.paged_logits),
    (f"{_INDEXER}.fp8_paged_mqa_logits_torch_sm120", "replace", read.paged_logits),
    (f"{_UTILS}.get_hash_str", "around", geometry.page_hash),
    *(
        (f"{_POOL}.DeepSeekV4IndexerPool.{name}", "replace", geometry.refuse)
        for name in ("get_index_k_scale_buffer", "set_index_k_scale_buffer", "set_index_fused", "set_index_fp4")
    ),
]
HOOKS: dict[str, list[Hook]] = {
    "0.5.16": [
        *_COMMON,
        (f"{_POOL}.DeepSeekV4IndexerPool.get_bytes_per_token", "replace", geometry.pool_bytes_per_token),
        (
            "sglang.srt.model_executor.pool_configurator.DSV4PoolConfigurator._get_bytes_per_full_token",
            "after",
            geometry.bytes_per_full_token,
        ),
    ],
    "0.5.23": [
        *_COMMON,
        (f"{_POOL}.get_dsv4_indexer_bytes_per_token", "around", geometry.indexer_bytes_per_token),
        (f"{_UTILS}.storage_namespace_seed", "around", geometry.namespace_seed),
    ],
}
