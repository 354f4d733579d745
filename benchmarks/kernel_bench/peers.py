"""Public kernels to compare with, where they can be loaded; None where not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from dsv4ctl.kernels import index_k

PagedLogits = Callable[[], object]


def deep_gemm_logits(
    q8: torch.Tensor, pages: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
) -> PagedLogits:
    """DeepGEMM's fp8 paged MQA logits over the same pages; its schedule is made here, outside the timing.

    q8 [B, queries, 64, 128]; lengths int32 [B, queries].
    """
    import deep_gemm
    import tvm_ffi

    cache = pages.view(pages.shape[0], index_k.KEYS, 1, index_k.DIM + 4)
    with tvm_ffi.use_torch_stream():
        plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, index_k.KEYS, deep_gemm.get_num_sms())
    longest = table.shape[1] * index_k.KEYS

    def call() -> object:
        with tvm_ffi.use_torch_stream():
            return deep_gemm.fp8_paged_mqa_logits(q8, cache, weights, lengths, table, plan, longest, False)

    return call


def torch_logits(
    q: torch.Tensor, pages: torch.Tensor, weights: torch.Tensor, table: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """The way a torch fallback does it (as SGLang's): gather all pages, one batched product, relu, weighted sum."""

    def call() -> torch.Tensor:
        raw = pages[table.long()]
        if pages.shape[1] == index_k.PAGE_BYTES["bf16"]:
            keys, scales = raw.view(torch.bfloat16).view(table.shape[0], -1, index_k.DIM), None
        else:
            codes = raw[..., : index_k.KEYS * index_k.DIM].contiguous().view(torch.float8_e4m3fn)
            keys = codes.to(torch.bfloat16).view(table.shape[0], -1, index_k.DIM)
            scales = raw[..., index_k.KEYS * index_k.DIM :].contiguous().view(torch.float32).view(table.shape[0], -1)
        dots = torch.bmm(keys, q.transpose(1, 2)).relu_()
        logits = (dots * weights[:, None, :]).sum(dim=2)
        return logits if scales is None else logits * scales

    return call


def sglang_topk(
    logits: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, k: int
) -> Callable[[], torch.Tensor] | None:
    """SGLang's topk_v2 for DeepSeek-V4, from a compiled module named by KERNEL_BENCH_TOPK_V2."""
    name = os.environ.get("KERNEL_BENCH_TOPK_V2", "")
    if not Path(name).is_file():
        return None
    import tvm_ffi

    module = tvm_ffi.load_module(name)
    plan = lengths.new_empty(lengths.shape[0] + 1, 2)
    slots = torch.empty(lengths.shape[0], k, dtype=torch.int32, device=logits.device)
    with tvm_ffi.use_torch_stream():
        module.topk_plan(lengths, plan, 0)

    def call() -> torch.Tensor:
        with tvm_ffi.use_torch_stream():
            module.topk_transform(logits, lengths, table, slots, index_k.KEYS, plan, None)
        return slots

    return call


def sgl_kernel_topk(logits: torch.Tensor, lengths: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """sgl-kernel's fast_topk (k = 2048 only), from the library named by KERNEL_BENCH_SGL_KERNEL."""
    name = os.environ.get("KERNEL_BENCH_SGL_KERNEL", "")
    if not Path(name).is_file():
        return None
    torch.ops.load_library(name)
    indices = torch.empty(logits.shape[0], 2048, dtype=torch.int32, device=logits.device)

    def call() -> torch.Tensor:
        torch.ops.sgl_kernel.fast_topk(logits, indices, lengths, None)
        return indices

    return call
