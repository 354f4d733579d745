"""Rows of the index logits and of top-k, with accuracy."""
# ruff: noqa: B023 (what a loop times is called within its turn)

from __future__ import annotations

import itertools
import time

import torch
from triton.errors import TritonError

from dsv4ctl.kernels import index_k, ops, topk_triton
from dsv4ctl.kernels.logits import query_blocks
from dsv4ctl.kernels.logits_triton import Shape, paged_logits_triton
from kernel_bench import peers
from kernel_bench.harness import Report, Row, decode_inputs, events_us, graph_us, key_pool

POOL_KEYS = 1 << 24
DECODE = ((1, 16), (1, 64), (1, 256), (4, 64), (4, 256), (16, 16), (16, 64), (16, 256), (64, 16), (64, 64), (64, 256))
TUNED = {
    1: [
        Shape(64, 64, 4, 3, 128), Shape(64, 32, 4, 3, 128), Shape(128, 16, 4, 3, 128), Shape(128, 32, 4, 3, 128),
        Shape(128, 32, 4, 2, 128), Shape(128, 16, 8, 3, 128), Shape(128, 16, 4, 4, 168),
    ],
    2: [
        Shape(64, 64, 4, 3, 168), Shape(64, 64, 4, 3, 128), Shape(128, 32, 8, 3, 128), Shape(128, 32, 8, 2, 128),
        Shape(64, 64, 8, 3, 80), Shape(64, 64, 4, 2, 128), Shape(128, 32, 4, 3, 255),
    ],
    4: [
        Shape(64, 64, 8, 3, 128), Shape(128, 32, 8, 3, 255), Shape(64, 64, 8, 2, 128), Shape(64, 64, 4, 3, 255),
        Shape(128, 32, 8, 2, 168),
    ],
}  # fmt: skip


def _sets(batch: int, keys: int) -> int:
    """Input sets to rotate among, so that together they are several times the L2."""
    return max(1, min(24, (400 << 20) // (batch * keys * 130)))


def _floor_us(report: Report, dtype: str, batch: int, keys: int, queries: int) -> tuple[float, str]:
    """Bytes (keys read once, logits written) over the copy rate, and flops over the measured rate: the larger."""
    moved = batch * keys * (index_k.PAGE_BYTES[dtype] / index_k.KEYS + 4 * queries)
    by_bytes = moved / report.floors["copy_gbs"] / 1e3
    by_flops = batch * queries * keys * 64 * 128 * 2 / report.floors[f"{dtype}_tflops"] / 1e6
    return (by_bytes, "floor (bytes)") if by_bytes >= by_flops else (by_flops, "floor (flops)")


def tune(report: Report) -> None:
    for dtype, queries in (("bf16", 1), ("fp8", 1), ("bf16", 2), ("fp8", 2), ("bf16", 4), ("fp8", 4)):
        pool = key_pool(POOL_KEYS, dtype)
        data = decode_inputs(64, 262144, queries, pool.shape[0])
        small = [decode_inputs(4, 65536, queries, pool.shape[0]) for _ in range(8)]
        for shape in TUNED[queries]:
            if time.monotonic() > report.deadline:
                return
            try:
                blocks = query_blocks([queries] * 64, queries, "cuda")
                few = query_blocks([queries] * 4, queries, "cuda")
                took = graph_us([lambda: _call(data, pool, blocks, dtype, shape)] * 2, 3)
                quick = graph_us([lambda one=one: _call(one, pool, few, dtype, shape) for one in small], 3)
            except (
                RuntimeError,
                ValueError,
                AssertionError,
                TritonError,
            ) as error:  # a shape that does not fit the card
                report.note(f"{dtype} {shape}: {str(error)[:120]}")
                continue
            floor, _ = _floor_us(report, dtype, 64, 262144, queries)
            name = f"{dtype} {queries} q, {shape.block}/{shape.steps}/{shape.warps}/{shape.stages}/{shape.registers}"
            report.add(
                Row("tune", name, "64 x 256K; 4 x 64K", took, "us", "floor", floor / took, note=f"{quick:.1f} us")
            )


def _call(data, pool, blocks, dtype, shape=None, **options):  # type: ignore[no-untyped-def]
    q = data.q if dtype == "bf16" else data.q8
    paged_logits_triton(q, data.weights, pool, data.table, data.lengths, blocks, data.out, shape=shape, **options)


def decode(report: Report) -> None:
    pools = {dtype: key_pool(POOL_KEYS, dtype) for dtype in ("bf16", "fp8")}
    for batch, kilo in DECODE:
        _decode_row(report, pools, batch, kilo, 1)
    for queries in (2, 4):
        _decode_row(report, pools, 64, 64, queries)
        _decode_row(report, pools, 16, 256, queries)


def _decode_row(report: Report, pools: dict[str, torch.Tensor], batch: int, kilo: int, queries: int) -> None:
    keys = kilo << 10
    data = [decode_inputs(batch, keys, queries, pools["bf16"].shape[0]) for _ in range(_sets(batch, keys))]
    blocks = query_blocks([queries] * batch, queries, "cuda")
    shape = f"{batch} x {kilo}K, {queries} q"
    times = {}
    for dtype, pool in pools.items():
        times[dtype] = took = graph_us(
            [lambda one=one, pool=pool, dtype=dtype: _call(one, pool, blocks, dtype) for one in data]
        )
        floor, name = _floor_us(report, dtype, batch, keys, queries)
        row = Row("decode", f"logits {dtype}", shape, took, "us", name, floor / took)
        if dtype == "bf16" and name == "floor (bytes)":
            row.goal, row.met = ">= 0.85", floor / took >= 0.85
        report.add(row)
    _against_deep_gemm(report, data, pools["fp8"], times, shape, batch, queries)
    if queries == 1 and batch * keys <= 1 << 21:
        for dtype, pool in pools.items():
            one = data[0]
            other = events_us(peers.torch_logits(one.q, pool, one.weights, one.table), repeats=3)
            report.add(
                Row("decode", f"torch fallback / {dtype}", shape, other, "us", f"{dtype} kernel", other / times[dtype])
            )


def _against_deep_gemm(report, data, pool, times, shape, batch, queries):  # type: ignore[no-untyped-def]
    try:
        calls = [
            peers.deep_gemm_logits(
                one.q8.view(batch, queries, 64, 128), pool, one.weights, one.lengths.view(batch, queries), one.table
            )
            for one in data
        ]
        got = calls[0]()
        mine = data[0]
        _call(mine, pool, query_blocks([queries] * batch, queries, "cuda"), "fp8")
        error = float((got[:, : mine.out.shape[1]] - mine.out).norm() / mine.out.norm())
        other = graph_us(calls)
    except (ImportError, RuntimeError, ValueError, AssertionError, AttributeError, TypeError) as error:
        if not any("DeepGEMM" in text for text in report.notes):
            report.note(f"DeepGEMM is not compared: {type(error).__name__}: {str(error)[:400]}")
        return
    note = f"DeepGEMM fp8 {other:.1f} us; its logits differ by {error:.1e}"
    for dtype, most in (("bf16", 1.94), ("fp8", 1.0)):
        ratio = times[dtype] / other
        report.add(
            Row("decode", f"{dtype} / DeepGEMM fp8", shape, times[dtype], "us", "DeepGEMM", ratio, f"<= {most}",
                ratio <= most, note)
        )  # fmt: skip


def prefill(report: Report) -> None:
    for dtype in ("bf16", "fp8"):
        pool = key_pool(1 << 20, dtype)
        data = decode_inputs(1, 65536, 4096, pool.shape[0])
        data.lengths.copy_(torch.arange(65536 - 1024, 65536, device="cuda").repeat_interleave(4) + 1)
        flops = float(data.lengths.sum()) * 64 * 128 * 2
        for rows, warps, stages, block, registers in (
            (4, 8, 3, 64, 128), (4, 8, 2, 64, 128), (2, 4, 3, 64, 168), (2, 4, 3, 128, 255), (4, 8, 3, 128, 255),
            (2, 4, 3, 64, 128),
        ):  # fmt: skip
            blocks = query_blocks([4096], rows, "cuda")
            shape = Shape(block, 4096 // block, warps, stages, registers)
            try:
                took = events_us(lambda: _call(data, pool, blocks, dtype, shape, prefill=True), repeats=3)
            except (RuntimeError, ValueError, AssertionError, TritonError) as error:
                report.note(f"prefill {dtype} {rows} {shape}: {str(error)[:120]}")
                continue
            rate = flops / took / 1e6
            ratio = rate / report.floors[f"{dtype}_tflops"]
            name = f"prefill {dtype}, {rows} rows, {block}/{warps}/{stages}/{registers}"
            report.add(Row("prefill", name, "4096 queries x 64K keys", rate, "TF/s", "matmul", ratio))


def topk(report: Report) -> None:
    for (rows, kilo), k in itertools.product(((64, 64), (64, 128), (64, 256), (1, 256)), (512, 1024, 2048)):
        n = kilo << 10
        logits = [torch.randn(rows, n, device="cuda") for _ in range(max(2, min(16, (300 << 20) // (rows * n * 4))))]
        lengths = torch.full((rows,), n, dtype=torch.int32, device="cuda")
        table = torch.randperm(rows * n // 64, device="cuda").to(torch.int32).view(rows, -1)
        sequence = torch.arange(rows, dtype=torch.int32, device="cuda")
        took = graph_us([lambda x=x: ops.topk_slots(x, lengths, k, table, sequence) for x in logits])
        shape = f"{rows} x {kilo}K"
        floor = rows * n * 4 / report.floors["read_gbs"] / 1e3
        report.add(Row("topk", f"top-{k}", shape, took, "us", "floor (bytes)", floor / took))
        other = graph_us([lambda x=x: torch.topk(x, k, dim=1) for x in logits], 3)
        ratio = other / took
        report.add(Row("topk", f"torch.topk / top-{k}", shape, other, "us", "ours", ratio, ">= 3", ratio >= 3))
        for name, make in (
            ("SGLang topk_v2", lambda x: peers.sglang_topk(x, lengths, table, k)),
            ("sgl-kernel fast_topk", lambda x: peers.sgl_kernel_topk(x, lengths) if k == 2048 else None),
        ):
            try:
                calls = [make(x) for x in logits]
                if any(call is None for call in calls):
                    continue
                other = graph_us(calls)
            except (ImportError, RuntimeError, ValueError, OSError, AttributeError, TypeError) as error:
                if not any(name in text for text in report.notes):
                    report.note(f"{name} is not compared: {type(error).__name__}: {str(error)[:300]}")
                continue
            ratio = other / took
            report.add(Row("topk", f"{name} / top-{k}", shape, other, "us", "ours", ratio, ">= 1", ratio >= 1))


def tune_topk(report: Report) -> None:
    """Other launch shapes of top-k, at 64 rows and at one."""
    usual = topk_triton.SHAPE
    try:
        for shape in (
            (16, 512, 1, 1 << 14, 512), (16, 256, 1, 1 << 14, 512), (8, 256, 2, 1 << 14, 512),
            (8, 256, 1, 1 << 14, 512), (8, 256, 4, 1 << 14, 512), (16, 512, 1, 1 << 14, 256),
            (16, 512, 1, 1 << 13, 512), (16, 512, 1, 1 << 15, 512),
        ):  # fmt: skip
            topk_triton.SHAPE = topk_triton.Shape(*shape)
            for (rows, kilo), k in itertools.product(((64, 64), (64, 256), (1, 256)), (512, 2048)):
                took = _topk_us(rows, kilo << 10, k)
                report.add(Row("tune", f"top-{k} {shape}", f"{rows} x {kilo}K", took, "us",
                               note=str(topk_triton.SHAPE)))  # fmt: skip
    finally:
        topk_triton.SHAPE = usual


def _topk_us(rows: int, n: int, k: int) -> float:
    logits = [torch.randn(rows, n, device="cuda") for _ in range(max(2, min(16, (300 << 20) // (rows * n * 4))))]
    lengths = torch.full((rows,), n, dtype=torch.int32, device="cuda")
    table = torch.randperm(rows * n // 64, device="cuda").to(torch.int32).view(rows, -1)
    sequence = torch.arange(rows, dtype=torch.int32, device="cuda")
    return graph_us([lambda x=x: ops.topk_slots(x, lengths, k, table, sequence) for x in logits])
