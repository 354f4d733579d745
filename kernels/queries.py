"""Index queries: what the indexer does to its projected queries before the logits, plain torch."""

from __future__ import annotations

import torch

from dsv4ctl.kernels import index_k


def index_queries_reference(
    q: torch.Tensor, weights: torch.Tensor, weight_scale: float, cos_sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE and Hadamard rotation of every head, rounded to bf16; weights times `weight_scale`.

    q [T, H, 128] bf16 or fp32, weights [T, H], cos_sin fp32 [positions, 64] = (cos, sin) interleaved, positions
    int [T] -> (bf16 [T, H, 128], fp32 [T, H]). SGLang's fused_q_indexer_rope_hadamard_quant does the same and then
    quantises q to fp8, folding the scale into the weights.
    """
    tokens, heads, dim = q.shape
    rows = q.to(torch.float32).reshape(tokens * heads, dim)
    turned = index_k.rope_hadamard(rows, cos_sin, positions.repeat_interleave(heads))
    return turned.to(torch.bfloat16).view(tokens, heads, dim), weights.to(torch.float32) * weight_scale
