"""Recall of the stored key formats: the top 512 of bf16 and fp8 keys against those of the fp32 keys."""

from __future__ import annotations

import dataclasses

import torch

from dsv4ctl.kernels import index_k, ops
from dsv4ctl.kernels.logits import query_blocks
from kernel_bench.harness import Report, Row, clustered_keys

K = 512


def measure(report: Report) -> None:
    for kind in ("random", "clustered"):
        for kilo in (4, 16, 64):
            for batch in (1, 8, 64):
                _row(report, kind, kilo << 10, batch)


def _row(report: Report, kind: str, count: int, batch: int) -> None:
    """`batch` sequences over one key set, a query each; logits of fp64 on the fp32 keys and queries are the truth."""
    keys = clustered_keys(count) if kind == "clustered" else torch.randn(count, 128, device="cuda")
    q = torch.randn(batch, 64, 128, device="cuda")
    if kind == "clustered":
        q = q + 0.5 * keys[torch.randint(0, count, (batch,), device="cuda")][:, None]
    weights = torch.rand(batch, 64, device="cuda")
    lengths = torch.full((batch,), count, dtype=torch.int32, device="cuda")
    sequence = torch.zeros(batch, dtype=torch.int32, device="cuda")
    truth = torch.empty(batch, count, device="cuda", dtype=torch.float64)
    rounded = torch.empty_like(truth)
    for row in range(batch):
        truth[row] = _exact(q[row], keys, weights[row])
        rounded[row] = _exact(q[row].to(torch.bfloat16), keys.to(torch.bfloat16), weights[row])
    chosen = truth.topk(K, dim=1).indices
    for kind_of, kept in (
        ("bf16 keys, fp32 queries", keys.to(torch.bfloat16)),
        ("fp16 keys, fp32 queries", keys.half()),
    ):
        exact = torch.stack([_exact(q[row], kept, weights[row]) for row in range(batch)])
        same = _same(chosen, exact.topk(K, dim=1).indices)
        jaccard = same / (2 * K - same)
        shape = f"{kind}, {batch} x {count >> 10}K keys"
        report.add(Row("accuracy", f"Jaccard, exact sums, {kind_of}", shape, jaccard, "", "fp32 order", jaccard))
    slots = torch.arange(count, dtype=torch.int32, device="cuda")
    table = torch.arange(count // 64, dtype=torch.int32, device="cuda")[None].contiguous()
    shape = f"{kind}, {batch} x {count >> 10}K keys"
    for dtype in ("bf16", "fp8"):
        pages = torch.zeros(count // 64, index_k.PAGE_BYTES[dtype], dtype=torch.uint8, device="cuda")
        ops.store_slots(pages, slots, keys)
        out = torch.empty(batch, count, device="cuda")
        scale = q.abs().amax(dim=2, keepdim=True) / 448
        query = q.to(torch.bfloat16) if dtype == "bf16" else (q / scale).to(torch.float8_e4m3fn)
        folded = weights if dtype == "bf16" else weights * scale[:, :, 0]
        blocks = query_blocks([1] * batch, 1, "cuda")
        blocks = dataclasses.replace(blocks, sequence=torch.zeros_like(blocks.sequence), regular=False)
        ops.paged_logits(query, folded, pages, table, lengths, blocks, out)
        got = ops.topk_slots(out, lengths, K, table, sequence).long()
        same = _same(chosen, got)
        jaccard = same / (2 * K - same)
        row = Row("accuracy", f"top-512 Jaccard, {dtype}", shape, jaccard, "", "fp32 order", jaccard)
        if dtype == "bf16":
            row.goal, row.met = ">= 0.999", jaccard >= 0.999
            error = float((out.double() - rounded).norm() / rounded.norm())
            spread = float((out.double() - truth).norm() / (truth - truth.mean(1, keepdim=True)).norm())
            row.note = f"rel. error {error:.1e} to fp64 on the same bits; {spread:.1e} of the spread to fp32 keys"
        report.add(row)


def _exact(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The logits of one query in fp64: [n]."""
    return torch.einsum("h,hn->n", weights.double(), (q.double() @ keys.double().T).relu_())


def _same(chosen: torch.Tensor, got: torch.Tensor) -> float:
    """Mean number of common elements, row by row."""
    counts = [int(torch.isin(a, b).sum()) for a, b in zip(chosen, got, strict=True)]
    return sum(counts) / len(counts)
