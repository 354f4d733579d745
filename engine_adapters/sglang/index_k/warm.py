"""Compiles the kernels before the server is ready: the first request would wait seconds for them."""

from __future__ import annotations

import torch

from dsv4ctl.engine_adapters.sglang.index_k import read
from dsv4ctl.engine_adapters.sglang.index_k.targets import store_targets
from dsv4ctl.kernels import index_k, ops
from dsv4ctl.kernels.logits import HEADS


def compile_kernels(device: torch.device) -> None:
    """One launch of each variant that a decode of up to 64 queries and a prefill need, on a page of their own."""
    pages = torch.zeros(1, index_k.PAGE_BYTES["bf16"], dtype=torch.uint8, device=device)
    plan = torch.zeros(1, 16, dtype=torch.uint8, device=device)
    out_loc = torch.zeros(1, dtype=torch.int64, device=device)
    for decode in (True, False):
        slots, positions = store_targets(plan, out_loc, 4, decode=decode)
    freqs = torch.ones(1, 32, dtype=torch.complex64, device=device)
    row = torch.ones(1, index_k.DIM, device=device)
    ops.norm_rope_hadamard_store(pages, slots, row, row[0], torch.view_as_real(freqs).flatten(-2), positions, 1e-6)
    q = torch.ones(1, HEADS, index_k.DIM, dtype=torch.bfloat16, device=device)
    turned, weights = read.index_queries(q, q[:, :, 0].contiguous(), 1.0, freqs, out_loc)
    table, lengths = out_loc.to(torch.int32)[:, None], torch.ones(1, dtype=torch.int32, device=device)
    out = torch.empty(1, index_k.KEYS, device=device)
    alone, shared = read.one_query_blocks(1, device), read.shared_blocks((1,), device)
    for blocks, prefill in ((alone, False), (alone, True), (shared, True)):
        ops.paged_logits(turned, weights.squeeze(2), pages, table, lengths, blocks, out, prefill=prefill)
