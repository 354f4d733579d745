"""Geometry of bf16 index keys in SGLang: bytes of a key, of a full token, and the names of pages in storage.

Buffers, the items of PD and the host pool of HiCache follow from the bytes of a key.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from dsv4ctl.engine_adapters.sglang.index_k.pages import FP8_ROW
from dsv4ctl.engine_adapters.sglang.index_k.warm import compile_kernels
from dsv4ctl.kernels import index_k

KEY_BYTES = index_k.PAGE_BYTES["bf16"] // index_k.KEYS
_RATIO = 4  #: tokens an index key stands for
_SEED = hashlib.sha256(b"dsv4ctl index_k_dtype=bf16").hexdigest()


def bytes_per_token(head_dim: int) -> int:
    """Bytes of a bf16 index key. Raises ValueError for a head dim the kernels don't have."""
    if head_dim != index_k.DIM:
        raise ValueError(f"an index head dim of {head_dim}: index_k_dtype bf16 has kernels for {index_k.DIM}")
    return KEY_BYTES


def pool_bytes_per_token(pool: Any) -> int:
    """For `DeepSeekV4IndexerPool.get_bytes_per_token` (0.5.16). Raises ValueError with the fp4 indexer on."""
    if pool.use_fp4_indexer:
        raise ValueError("the fp4 indexer and index_k_dtype bf16 exclude each other: turn one of them off")
    return bytes_per_token(pool.index_head_dim)


def created(_result: None, pool: Any) -> None:
    """After `DeepSeekV4IndexerPool._create_buffer`: no pool of another layout lives in this process, and the indexer's
    switches stand (0.5.16 turns the TileLang indexer on for sm_120 after the server has started). Kernels are compiled.

    Raises ValueError for other pages, as the fp4 indexer's or those of ratios 1 and 2.
    """
    buffers = pool.index_k_with_scale_buffer
    sizes = {0} if buffers is None else {buffer.shape[1] for buffer in buffers}  # a draft model's pool has none
    if sizes - {index_k.PAGE_BYTES["bf16"]}:
        raise ValueError(
            f"index-K pages of {', '.join(map(str, sorted(sizes)))} B: index_k_dtype bf16 needs pages of "
            f"{index_k.PAGE_BYTES['bf16']} B in every index-K pool of the model (no fp4 indexer, compress ratio 4)"
        )
    os.environ.update(environment())
    device = torch.device(pool.device)
    if device.type == "cuda":
        compile_kernels(device)


def environment() -> dict[str, str]:
    """SGLang's switches that lead its indexer to the hooked functions; for the server's environment."""
    return {
        "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1",
        "SGLANG_OPT_DSV4_NONPAGED_INDEXER": "0",
        "SGLANG_OPT_USE_AITER_INDEXER": "0",
        "SGLANG_OPT_USE_TILELANG_INDEXER": "0",
    }


def bytes_per_full_token(result: float, configurator: Any) -> float:
    """After `DSV4PoolConfigurator._get_bytes_per_full_token` (0.5.16), which counts fp8 keys: 31 B more a c4 layer."""
    return result + (KEY_BYTES - FP8_ROW) / _RATIO * configurator.num_layers_ca4


def indexer_bytes_per_token(original: Callable[..., int], index_head_dim: int, use_fp4_indexer: bool) -> int:
    """Around `get_dsv4_indexer_bytes_per_token` (0.5.23: pool and configurator call it).

    The configurator asks for the fp4 size of ratios 1 and 2 whether the model has them or not; `created` refuses
    such a pool.
    """
    return original(index_head_dim, use_fp4_indexer) if use_fp4_indexer else bytes_per_token(index_head_dim)


def page_hash(
    original: Callable[..., Any], token_ids: Any, prior_hash: str | None = None, page_size: int | None = None
) -> Any:
    """Around `get_hash_str`: a chain of page hashes begins with the dtype, so no storage backend mixes fp8 and bf16."""
    return original(token_ids, prior_hash or _SEED, page_size)


def namespace_seed(original: Callable[..., str | None], extra_key: str | None, cache_salt: str | None) -> str:
    """Around `storage_namespace_seed` (0.5.23): the same for chains that begin with a namespace of their own."""
    seed = original(extra_key, cache_salt)
    return hashlib.sha256(bytes.fromhex(_SEED + seed)).hexdigest() if seed else _SEED


def refuse(*_arguments: Any, **_options: Any) -> NoReturn:
    """For the pool's other writers and readers of index keys: none of them knows bf16 pages."""
    raise NotImplementedError(
        "this path of SGLang writes or reads index keys in fp8 or fp4; with index_k_dtype bf16 only the paged indexer "
        "and the fused compressor store reach them"
    )
