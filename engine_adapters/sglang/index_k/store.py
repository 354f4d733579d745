"""Store path: SGLang's `compress_norm_rope_store`, for index keys in bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsv4ctl.engine_adapters.sglang.index_k.targets import store_targets
from dsv4ctl.kernels import index_k, ops


def compress_norm_rope_store(
    original: Callable[..., None],
    kv: torch.Tensor,
    plan: Any,
    *,
    norm_weight: torch.Tensor,
    norm_eps: float,
    freq_cis: torch.Tensor,
    out_loc: torch.Tensor,
    kvcache: torch.Tensor,
    page_size: int,
    use_fp4: bool = False,
    **others: Any,
) -> None:
    """Index keys (head dim 128): norm, RoPE, Hadamard and a bf16 scatter in our kernel. Attention keys: as before.

    kv [N, 128], `plan` a Compressor{Decode,Prefill}Plan, freq_cis complex64 [positions, 32], out_loc int64 [tokens],
    kvcache uint8 [pages, 16384]. Raises ValueError for another geometry.
    """
    if kv.shape[-1] != index_k.DIM:
        original(
            kv, plan, norm_weight=norm_weight, norm_eps=norm_eps, freq_cis=freq_cis, out_loc=out_loc, kvcache=kvcache,
            page_size=page_size, use_fp4=use_fp4, **others,
        )  # fmt: skip
        return
    if use_fp4 or page_size != index_k.KEYS or kvcache.shape[1] != index_k.PAGE_BYTES["bf16"]:
        raise ValueError(
            f"index keys in pages of {page_size} keys, {kvcache.shape[1]} B, fp4 {use_fp4}: with index_k_dtype bf16 "
            f"{index_k.KEYS} keys, {index_k.PAGE_BYTES['bf16']} B and no fp4 indexer expected"
        )
    slots, positions = store_targets(plan[1], out_loc, plan.compress_ratio, decode=plan.is_decode)
    cos_sin = torch.view_as_real(freq_cis).flatten(-2)
    if kv.shape[0]:
        ops.norm_rope_hadamard_store(kvcache, slots, kv, norm_weight, cos_sin, positions, norm_eps)
