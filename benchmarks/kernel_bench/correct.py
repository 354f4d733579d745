"""The kernels against their references on this GPU, at real sizes, before anything is timed."""

from __future__ import annotations

import numpy as np
import torch

from dsv4ctl.kernels import digest, index_k, ops
from dsv4ctl.kernels.copies_triton import backup_triton, load_triton
from dsv4ctl.kernels.copy_engine import backup_engine, load_engine
from dsv4ctl.kernels.digest_triton import digest_pages_triton
from dsv4ctl.kernels.logits import QueryBlocks, paged_logits_reference, query_blocks
from dsv4ctl.kernels.topk import topk_slots_reference
from kernel_bench.harness import Report, Row, decode_inputs, key_pool, random_bytes


def passed(report: Report, name: str, shape: str, good: bool, note: str = "") -> None:
    report.add(Row("correct", name, shape, float(good), "", goal="equals its reference", met=good, note=note))


def check(report: Report) -> None:
    for part in (_store, _digest, _copies, _logits, _topk):
        report.section(f"correct{part.__name__}", part)


def _store(report: Report) -> None:
    rows = torch.randn(4096, 128, device="cuda") * torch.rand(4096, 1, device="cuda").mul(9).exp2()
    slots = torch.randperm(8192, device="cuda")[:4096].to(torch.int32)
    norm, positions = torch.rand(128, device="cuda") + 0.5, torch.randint(0, 4096, (4096,), device="cuda")
    angles = torch.rand(4096, 32, device="cuda") * 6
    cos_sin = torch.stack([angles.cos(), angles.sin()], dim=-1).view(4096, 64).contiguous()
    for dtype, page_bytes in index_k.PAGE_BYTES.items():
        pages = torch.zeros(128, page_bytes, dtype=torch.uint8, device="cuda")
        ops.store_slots(pages, slots, rows)
        expected = torch.zeros(128, page_bytes, dtype=torch.uint8)
        index_k.store_slots_reference(expected, slots.cpu(), rows.cpu())
        wrong = int((pages.cpu() != expected).sum())
        passed(report, f"store {dtype}", "4096 keys", wrong == 0, f"{wrong} bytes differ")
        ops.norm_rope_hadamard_store(pages, slots, rows, norm, cos_sin, positions, 1e-6)
        keys = index_k.norm_rope_hadamard(rows.double(), norm, cos_sin.double(), positions, 1e-6).float()
        read = index_k.read_keys(pages, dtype, torch.arange(128, device="cuda"), 8192)[slots.long()]
        error = float((read - keys).norm() / keys.norm())
        passed(
            report, f"fused store {dtype}", "4096 keys", error < (3e-3 if dtype == "bf16" else 4e-2), f"rel {error:.2e}"
        )


def _digest(report: Report) -> None:
    for page_bytes in (8448, 16384, 37440, 149760):
        source = random_bytes(2, 200, page_bytes)
        pages = torch.randperm(200, device="cuda")[:100].to(torch.int32)
        got = digest_pages_triton(source, pages).cpu().numpy().view(np.uint64)
        host = source[:, pages.long()].cpu().numpy()
        good = all(np.array_equal(got[layer], digest.digest_numpy(host[layer])) for layer in range(2))
        passed(report, "digest", f"2 layers x 100 pages of {page_bytes} B", good)


def _copies(report: Report) -> None:
    for page_bytes in (8448, 16384, 149760):
        host = torch.empty(64, 4, page_bytes, dtype=torch.uint8, pin_memory=True)
        host.copy_(random_bytes(64, 4, page_bytes))
        before = random_bytes(4, 80, page_bytes)
        generator = np.random.default_rng(page_bytes)
        on_host, on_device = generator.permutation(64)[:40], generator.permutation(80)[:40]
        lists = [torch.tensor(pages, dtype=torch.int32, device="cuda") for pages in (on_host, on_device)]
        expected = before.cpu()
        expected[1:3, on_device] = host[on_host, 1:3].transpose(0, 1)
        back = host.clone()
        back[on_host, 1:3] = before.cpu()[1:3, on_device].transpose(0, 1)
        with torch.cuda.stream(torch.cuda.Stream()):
            for name, load, backup, pages in (
                ("kernel", load_triton, backup_triton, lists),
                ("engine", load_engine, backup_engine, (on_host.tolist(), on_device.tolist())),
            ):
                device, target = before.clone(), host.clone().pin_memory()
                load(host, device, *pages, 1, 3)
                backup(target, before, *pages, 1, 3)
                torch.cuda.current_stream().synchronize()
                good = torch.equal(device.cpu(), expected) and torch.equal(target, back)
                passed(report, f"load and backup, {name}", f"40 pages of {page_bytes} B, 2 layers", good)


def _logits(report: Report) -> None:
    for dtype in ("bf16", "fp8"):
        pool = key_pool(1 << 17, dtype)
        for queries, prefill in ((1, False), (2, False), (4, False), (37, True), (64, True)):
            data = decode_inputs(8, 16384, queries, pool.shape[0], ragged=True)
            rows = min(4, queries)
            blocks = query_blocks([queries] * 8, rows, "cuda")
            host = QueryBlocks(blocks.first.cpu(), blocks.count.cpu(), blocks.sequence.cpu(), rows)
            for q in (data.q, data.q8):
                data.out.fill_(7.0)
                ops.paged_logits(q, data.weights, pool, data.table, data.lengths, blocks, data.out, prefill=prefill)
                expected = torch.full_like(data.out, 7.0)
                paged_logits_reference(q, data.weights, pool, data.table, data.lengths, host, expected)
                error = float((data.out - expected).double().norm() / expected.double().norm())
                tails = bool((data.out == 7.0).eq(expected == 7.0).all())
                shape = f"8 x {queries} queries, 1..16384 keys"
                passed(
                    report, f"logits {dtype}, q {str(q.dtype)[6:]}", shape, error < 1e-3 and tails, f"rel {error:.1e}"
                )


def _topk(report: Report) -> None:
    n, rows = 65536, 9
    normal = torch.randn(rows, n, device="cuda")
    cases = {
        "normal": normal,
        "ties": normal.mul(2).round(),
        "all equal": torch.ones_like(normal),
        "positive, narrow": normal * 0.01 + 50,
        "NaN and inf": torch.where(normal > 2, float("nan"), torch.where(normal < -2, float("inf"), normal)),
        "clustered": torch.cat([normal[:, :-4096], normal[:, -4096:] + 20], dim=1),
        "few": torch.where(torch.rand_like(normal) < 0.001, normal, float("nan")),
    }
    lengths = torch.randint(1, n + 1, (rows,), dtype=torch.int32, device="cuda")
    lengths[:4] = torch.tensor([n, 5, 600, 8193], device="cuda")
    table = torch.randperm(4 * 1024, device="cuda").to(torch.int32).view(4, 1024)
    sequence = (torch.arange(rows, device="cuda") % 4).to(torch.int32)
    for name, logits in cases.items():
        for k in (512, 1024, 2048):
            got = ops.topk_slots(logits, lengths, k, table, sequence)
            again = ops.topk_slots(logits, lengths, k, table, sequence)
            expected = topk_slots_reference(logits, lengths, k, table, sequence, 64)
            passed(
                report, f"top-{k}, {name}", f"{rows} x 1..{n}", torch.equal(got, expected) and torch.equal(got, again)
            )
