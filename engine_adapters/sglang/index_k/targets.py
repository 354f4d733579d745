"""Where SGLang's compression plan sends each pooled row: slot in the index-K pool and RoPE position.

A plan is uint8 [N, 16], a row each (include/sgl_kernel/deepseek_v4/compress_v2.cuh). Decode: uint32 sequence length,
then three int32 of the compressor's own. Prefill: uint32 sequence length, 0xFFFFFFFF for none, uint16 token of the
batch, uint16, two int32. The pooled row ends at that length and begins `ratio` tokens earlier, which is its position.
"""

from __future__ import annotations

import torch

from dsv4ctl.kernels.device import on_gpu


def store_targets(
    plan: torch.Tensor, out_loc: torch.Tensor, ratio: int, *, decode: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """plan uint8 [N, 16], out_loc int64 [tokens] -> slots int64 [N] (-1: nothing to store), positions int32 [N].

    Decode: row i belongs to out_loc[i], and is stored when its sequence fills a group of `ratio` tokens.
    """
    if on_gpu(plan):
        from dsv4ctl.engine_adapters.sglang.index_k.targets_triton import store_targets_triton

        return store_targets_triton(plan, out_loc, ratio, decode=decode)
    return store_targets_reference(plan, out_loc, ratio, decode=decode)


def store_targets_reference(
    plan: torch.Tensor, out_loc: torch.Tensor, ratio: int, *, decode: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`store_targets` in plain torch."""
    words = plan.view(torch.int32)
    lengths = words[:, 0]
    if decode:
        tokens, valid = torch.arange(words.shape[0], device=plan.device), lengths % ratio == 0
    else:
        tokens, valid = words[:, 1] & 0xFFFF, lengths != -1
    valid &= lengths >= ratio
    slots = out_loc[torch.where(valid, tokens, 0).long()]
    return torch.where(valid, slots, -1), torch.where(valid, lengths - ratio, 0)
