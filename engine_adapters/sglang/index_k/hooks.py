"""The hooks of `index_k_dtype = "bf16"`, by release: (target, kind, function)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsv4ctl.engine_adapters.sglang.index_k import geometry, read, store

_POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool."
_INDEXER = "sglang.srt.layers.attention.dsv4.indexer."
_COMPRESSOR = "sglang.srt.layers.attention.dsv4.compressor_v2."
_CONFIGURATOR = "sglang.srt.model_executor.pool_configurator.DSV4PoolConfigurator."
_UTILS = "sglang.srt.mem_cache.utils."

Hook = tuple[str, str, Callable[..., Any]]

_COMMON: tuple[Hook, ...] = (
    # No index-K pool of another layout exists, and the indexer's switches stand.
    (_POOL + "DeepSeekV4IndexerPool._create_buffer", "after", geometry.created),
    (_COMPRESSOR + "compress_norm_rope_store", "around", store.compress_norm_rope_store),
    # The indexer's fp8 view of the pages passes, no other view does.
    (_POOL + "DeepSeekV4TokenToKVPool.get_index_k_with_scale_buffer", "after", read.index_keys),
    # Rounded to fp8, the queries would undo what bf16 keys gain.
    (_INDEXER + "fused_q_indexer_rope_hadamard_quant", "replace", read.index_queries),
    (_INDEXER + "C4IndexerBackendMixin.forward_c4_indexer", "around", read.forward_c4_indexer),
    (_INDEXER + "fp8_paged_mqa_logits_torch", "replace", read.paged_logits),
    (_INDEXER + "fp8_paged_mqa_logits_torch_sm120", "replace", read.paged_logits),
    # The other paths to index keys: an error, not a wrong number.
    (_POOL + "DeepSeekV4IndexerPool.get_index_k_scale_buffer", "replace", geometry.refuse),
    (_POOL + "DeepSeekV4IndexerPool.set_index_k_scale_buffer", "replace", geometry.refuse),
    (_POOL + "DeepSeekV4IndexerPool.set_index_fused", "replace", geometry.refuse),
    (_POOL + "DeepSeekV4IndexerPool.set_index_fp4", "replace", geometry.refuse),
    (_UTILS + "get_hash_str", "around", geometry.page_hash),
)
HOOKS: dict[str, tuple[Hook, ...]] = {
    "0.5.16": (
        *_COMMON,
        (_POOL + "DeepSeekV4IndexerPool.get_bytes_per_token", "replace", geometry.pool_bytes_per_token),
        (_CONFIGURATOR + "_get_bytes_per_full_token", "after", geometry.bytes_per_full_token),
    ),
    "0.5.23": (
        *_COMMON,
        (_POOL + "get_dsv4_indexer_bytes_per_token", "around", geometry.indexer_bytes_per_token),
        (_UTILS + "storage_namespace_seed", "around", geometry.namespace_seed),
    ),
}
