"""Index keys in bf16 against SGLang's own kernels, on a GPU: python3 index_k_check.py [--keys N] [--out FILE].

Needs sglang 0.5.16 and dsv4ctl on PYTHONPATH. Prints one JSON object; exit code 1 if a bound does not hold.
The data: random pooled rows, through norm, RoPE and Hadamard as the model's compressor sends them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsv4ctl.engine_adapters.sglang.index_k import read, store
from dsv4ctl.engine_adapters.sglang.index_k.pages import IndexKeys
from dsv4ctl.kernels import index_k, ops
from dsv4ctl.kernels.logits import QueryBlocks

RATIO, TOPK, EPSILON = 4, 512, 1e-6
WEIGHT_SCALE = index_k.DIM**-0.5 / 8
#: name -> most that is right. Rounding errs by half a step at most, and fp32 sums in another order by a little.
BOUNDS = {
    "store_bf16_halfsteps": 1.05,
    "store_fp8_halfsteps": 1.05,
    "store_stray_bytes": 0,
    "logits_bf16_error": 0.01,
    "logits_fp8_kernel_error": 5e-3,
    "query_bf16_halfsteps": 1.05,
    "weight_error": 1e-6,
    "prefill_shared_error": 1e-5,
}
LEAST = {"jaccard_bf16_mean": 0.98, "jaccard_bf16_above_fp8": 0.0}


class Data(NamedTuple):
    rows: torch.Tensor  #: fp32 [N, 128], what the compressor pools
    norm: torch.Tensor  #: fp32 [128]
    freqs: torch.Tensor  #: complex64 [positions, 32]
    slots: torch.Tensor  #: int64 [N], shuffled pages
    table: torch.Tensor  #: int32 [T, pages]
    lengths: torch.Tensor  #: int32 [T]
    q: torch.Tensor  #: bf16 [T, 64, 128], before RoPE
    weights: torch.Tensor  #: bf16 [T, 64]
    positions: torch.Tensor  #: int64 [T]


def made(keys: int, queries: int) -> Data:
    torch.manual_seed(11)
    pages = keys // index_k.KEYS
    order = torch.randperm(pages) + 1
    slots = (order[:, None] * index_k.KEYS + torch.arange(index_k.KEYS)).flatten()
    angles = torch.outer(torch.arange(keys * RATIO).double(), 40000.0 ** -(torch.arange(32).double() / 32)).float()
    lengths = torch.linspace(keys // 2 + 3, keys, queries).to(torch.int32)
    data = Data(
        rows=torch.randn(keys, index_k.DIM),
        norm=1 + 0.1 * torch.randn(index_k.DIM),
        freqs=torch.polar(torch.ones_like(angles), angles),
        slots=slots,
        table=order.to(torch.int32).expand(queries, pages).contiguous(),
        lengths=lengths,
        q=torch.randn(queries, 64, index_k.DIM).to(torch.bfloat16),
        weights=torch.randn(queries, 64).to(torch.bfloat16),
        positions=lengths.long() * RATIO - 1,
    )
    return Data(*(one.cuda() for one in data))


def stored(data: Data, dtype: str, own: Callable[..., None], plan: Any) -> torch.Tensor:
    """All keys through the store that SGLang calls: its own for fp8, hooked for bf16. uint8 [pages + 1, page_bytes]."""
    pages = torch.zeros(data.table.shape[1] + 1, index_k.PAGE_BYTES[dtype], dtype=torch.uint8, device="cuda")
    arguments = {
        "norm_weight": data.norm, "norm_eps": EPSILON, "freq_cis": data.freqs, "out_loc": data.slots,
        "kvcache": pages, "page_size": index_k.KEYS, "use_fp4": False, "bf16_store": False,
    }  # fmt: skip
    if dtype == "fp8":
        own(data.rows, plan, **arguments)
    else:
        store.compress_norm_rope_store(own, data.rows, plan, **arguments)
    return pages


def prefill_plan(sglang: Any, keys: int) -> Any:
    words = torch.zeros(keys, 4, dtype=torch.int32)
    words[:, 0] = (torch.arange(keys) + 1) * RATIO
    words[:, 1] = torch.arange(keys)
    return sglang.CompressorPrefillPlan(RATIO, words.view(torch.uint8).cuda(), None)


def in_order(pages: torch.Tensor, data: Data) -> torch.Tensor:
    """The keys of pages in logical order: fp32 [N, 128]."""
    return index_k.read_keys(pages, index_k.layout_of(pages.shape[1]), data.table[0].long(), data.rows.shape[0])


def halfsteps(got: torch.Tensor, exact: torch.Tensor, bits: int) -> float:
    """The largest error in halves of the last of `bits` bits after the point; steps no longer shrink below 2^-6."""
    step = exact.abs().clamp(min=2.0**-6).log2().floor().exp2() * 2.0**-bits
    return float(((got - exact).abs() / (step / 2)).max())


def error(got: torch.Tensor, exact: torch.Tensor, lengths: torch.Tensor) -> float:
    """Relative L2 distance over the columns that count."""
    seen = torch.arange(exact.shape[1], device=exact.device) < lengths[:, None]
    return float(((got - exact)[seen].norm() / exact[seen].norm()).cpu())


def jaccard(got: torch.Tensor, exact: torch.Tensor, lengths: torch.Tensor) -> list[float]:
    """Agreement of the top 512 with that of the exact logits, a figure a query."""
    figures = []
    for row, length in enumerate(lengths.tolist()):
        mine, theirs = (set(one[row, :length].topk(TOPK).indices.tolist()) for one in (got, exact))
        figures.append(len(mine & theirs) / len(mine | theirs))
    return figures


def microseconds(call: Callable[[], object]) -> float:
    """Best of 20 launches, by events, after one that compiles."""
    call()
    times = []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return round(min(times), 1)


def exact_logits(data: Data, keys: torch.Tensor) -> torch.Tensor:
    """Logits of unrounded queries and keys: fp32 [T, N], float64 inside."""
    cos_sin = torch.view_as_real(data.freqs).flatten(-2)
    tokens, heads, dim = data.q.shape
    q = index_k.rope_hadamard(data.q.float().view(-1, dim), cos_sin, data.positions.repeat_interleave(heads)).double()
    weights = data.weights.double() * WEIGHT_SCALE
    out = torch.empty(tokens, keys.shape[0], device="cuda")
    for row, turned in enumerate(q.view(tokens, heads, dim)):
        out[row] = (weights[row] @ (turned @ keys.double().T).relu()).float()
    return out


def check_store(data: Data, sglang: Any, report: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a): both stores against fp32. Returns exact keys, bf16 pages, fp8 pages."""
    plan = prefill_plan(sglang, data.rows.shape[0])
    ours, theirs = (stored(data, dtype, sglang.compress_norm_rope_store, plan) for dtype in ("bf16", "fp8"))
    cos_sin = torch.view_as_real(data.freqs).flatten(-2)
    at = torch.arange(data.rows.shape[0], device="cuda") * RATIO
    exact = index_k.norm_rope_hadamard(data.rows, data.norm, cos_sin, at, EPSILON)
    mine, fp8 = in_order(ours, data), in_order(theirs, data)
    scale = exact.abs().amax(1, keepdim=True) / index_k.FP8_MAX
    report |= {
        "store_bf16_halfsteps": halfsteps(mine, exact, 7),
        "store_fp8_halfsteps": halfsteps(fp8 / scale, exact / scale, 3),
        "store_bf16_fp8_apart": float((mine - fp8).norm() / exact.norm()),
        "store_bf16_error": float((mine - exact).norm() / exact.norm()),
        "store_fp8_error": float((fp8 - exact).norm() / exact.norm()),
        "store_stray_bytes": int(ours[0].count_nonzero()),
        "store_bf16_us": microseconds(lambda: stored(data, "bf16", sglang.compress_norm_rope_store, plan)),
        "store_fp8_us": microseconds(lambda: stored(data, "fp8", sglang.compress_norm_rope_store, plan)),
    }
    return exact, ours, theirs


def check_read(data: Data, sglang: Any, pages: tuple[torch.Tensor, ...], report: dict[str, Any]) -> None:
    """(b), (c): our bf16 logits and SGLang's fp8 ones against exact arithmetic, and their choices."""
    keys, ours, theirs = pages
    exact = exact_logits(data, keys)
    arguments = (data.q, data.weights, WEIGHT_SCALE, data.freqs, data.positions)
    q, weights = read.index_queries(*arguments)
    q8, weights8 = sglang.fused_q_indexer_rope_hadamard_quant(*arguments)
    cos_sin = torch.view_as_real(data.freqs).flatten(-2)
    turned = index_k.rope_hadamard(
        data.q.float().view(-1, index_k.DIM), cos_sin, data.positions.repeat_interleave(64)
    ).view(q.shape)
    longest = data.table.shape[1] * index_k.KEYS

    def bf16() -> torch.Tensor:
        return read.paged_logits(
            q.unsqueeze(1), IndexKeys(ours), weights.squeeze(2), data.lengths, data.table, None, longest, False
        )

    out8 = torch.zeros(q.shape[0], longest, device="cuda")
    ops.paged_logits(
        q8, weights8.squeeze(2), theirs, data.table, data.lengths, read.one_query_blocks(q.shape[0], q.device), out8
    )
    deep_gemm = deep_gemm_logits(q8, theirs, weights8.squeeze(2), data)
    fp8 = deep_gemm()
    mine = jaccard(bf16(), exact, data.lengths)
    others = jaccard(fp8, exact, data.lengths)
    report |= {
        "query_bf16_halfsteps": halfsteps(q.float(), turned, 7),
        "weight_error": float((weights.squeeze(2) - data.weights.float() * WEIGHT_SCALE).abs().max()),
        "logits_bf16_error": error(bf16(), exact, data.lengths),
        "logits_fp8_error": error(fp8, exact, data.lengths),
        "logits_fp8_kernel_error": error(out8, fp8, data.lengths),
        "jaccard_bf16_mean": sum(mine) / len(mine),
        "jaccard_bf16_least": min(mine),
        "jaccard_fp8_mean": sum(others) / len(others),
        "jaccard_fp8_least": min(others),
        "jaccard_bf16_above_fp8": (sum(mine) - sum(others)) / len(mine),
        "logits_bf16_us": microseconds(bf16),
        "logits_fp8_us": microseconds(deep_gemm),
    }


def deep_gemm_logits(
    q8: torch.Tensor, pages: torch.Tensor, weights: torch.Tensor, data: Data
) -> Callable[[], torch.Tensor]:
    """As SGLang's indexer calls DeepGEMM; the schedule is made once."""
    import deep_gemm

    lengths = data.lengths.unsqueeze(-1)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, index_k.KEYS, deep_gemm.get_num_sms())
    cache = pages.view(pages.shape[0], index_k.KEYS, 1, index_k.DIM + 4)
    longest = data.table.shape[1] * index_k.KEYS
    return lambda: deep_gemm.fp8_paged_mqa_logits(
        q8.unsqueeze(1), cache, weights, lengths, data.table, schedule, longest, False
    )


def check_prefill(options: argparse.Namespace, sglang: Any, report: dict[str, Any]) -> None:
    """Queries that share the keys of their sequence: the logits of queries alone, and the time of both dtypes."""
    data = made(options.keys, options.prefill)
    plan = prefill_plan(sglang, options.keys)
    ours, theirs = (stored(data, dtype, sglang.compress_norm_rope_store, plan) for dtype in ("bf16", "fp8"))
    arguments = (data.q, data.weights, WEIGHT_SCALE, data.freqs, data.positions)
    q, weights = read.index_queries(*arguments)
    q8, weights8 = sglang.fused_q_indexer_rope_hadamard_quant(*arguments)
    outs = [torch.zeros(options.prefill, options.keys, device="cuda") for _ in range(2)]

    def logits(blocks: QueryBlocks, out: torch.Tensor) -> None:
        ops.paged_logits(q, weights.squeeze(2), ours, data.table, data.lengths, blocks, out, prefill=True)

    shared = read.shared_blocks((3, options.prefill - 3), q.device)
    logits(shared, outs[0])
    logits(read.one_query_blocks(options.prefill, q.device), outs[1])
    report |= {
        "prefill_shared_error": error(outs[0], outs[1], data.lengths),
        "prefill_bf16_us": microseconds(lambda: logits(shared, outs[0])),
        "prefill_alone_bf16_us": microseconds(
            lambda: logits(read.one_query_blocks(options.prefill, q.device), outs[1])
        ),
        "prefill_fp8_us": microseconds(deep_gemm_logits(q8, theirs, weights8.squeeze(2), data)),
    }


def judged(report: dict[str, Any]) -> list[str]:
    """The bounds that do not hold; a figure that is missing or NaN does not."""
    above = [name for name, most in BOUNDS.items() if not report.get(name, float("nan")) <= most]
    return above + [name for name, least in LEAST.items() if not report.get(name, float("nan")) >= least]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=16384, help="index keys of the sequence, a multiple of 64")
    parser.add_argument("--queries", type=int, default=16)
    parser.add_argument("--prefill", type=int, default=1024, help="queries of one prefill")
    parser.add_argument("--out", type=Path, help="also write the object here")
    options = parser.parse_args()
    begin = time.monotonic()
    from sglang.jit_kernel import dsv4 as sglang

    report: dict[str, Any] = {
        "keys": options.keys,
        "queries": options.queries,
        "prefill": options.prefill,
        "gpu": torch.cuda.get_device_name(),
        "import_s": round(time.monotonic() - begin, 1),
        "bounds": BOUNDS | LEAST,
    }
    try:
        data = made(options.keys, options.queries)
        check_read(data, sglang, check_store(data, sglang, report), report)
        check_prefill(options, sglang, report)
    finally:  # a figure that could not be taken does not take the others along
        report |= {"failed": judged(report), "wall_s": round(time.monotonic() - begin, 1)}
        text = json.dumps(report)
        print(text, flush=True)
    if options.out:
        options.out.write_text(text + "\n")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
