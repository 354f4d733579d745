"""What this card and this host give: the figures that everything else is measured against."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel_bench.harness import Report, Row, events_us, graph_us, random_bytes


@triton.jit
def _read(source_ptr, out_ptr, words, block: tl.constexpr):
    """Reads everything once; one word a program is written."""
    total = tl.zeros((block,), tl.int32)
    for start in range(tl.program_id(0) * block, words, tl.num_programs(0) * block):
        total ^= tl.load(source_ptr + (start + tl.arange(0, block)))
    tl.store(out_ptr + tl.program_id(0), tl.xor_sum(total, axis=0))


def read_gbs(megabytes: int, sets: int) -> float:
    """GB/s of plain reading, best of several grids."""
    sources = [random_bytes(megabytes << 20).view(torch.int32) for _ in range(sets)]
    out = torch.empty(4096, dtype=torch.int32, device="cuda")
    best = 0.0
    for programs, block, warps in ((132 * 8, 4096, 8), (132 * 4, 8192, 8), (132 * 16, 4096, 4), (132 * 16, 2048, 4)):
        calls = [
            lambda source=source, programs=programs, block=block, warps=warps: _read[(programs,)](
                source, out, source.shape[0], block=block, num_warps=warps
            )
            for source in sources
        ]
        best = max(best, (megabytes << 20) / graph_us(calls) / 1e3)
    return best


def copy_gbs(megabytes: int) -> float:
    """GB/s of a device-to-device copy, bytes read plus bytes written."""
    source = random_bytes(megabytes << 20)
    target = torch.empty_like(source)
    return 2 * (megabytes << 20) / events_us(lambda: target.copy_(source)) / 1e3


def measure(report: Report) -> None:
    floors = report.floors
    floors["copy_gbs"] = copy_gbs(4096)
    floors["read_gbs"] = read_gbs(4096, 1)
    floors["read_64mib_gbs"] = read_gbs(64, 8)
    floors["read_256mib_gbs"] = read_gbs(256, 4)
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in range(2))
    floors["bf16_tflops"] = 2 * 8192**3 / graph_us([lambda: a @ b] * 5) / 1e6
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    scaled = lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16)  # noqa: E731
    floors["fp8_tflops"] = 2 * 8192**3 / graph_us([scaled] * 5) / 1e6
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    floors["h2d_gbs"] = (1 << 30) / events_us(lambda: device.copy_(host, non_blocking=True), repeats=3) / 1e3
    floors["d2h_gbs"] = (1 << 30) / events_us(lambda: host.copy_(device, non_blocking=True), repeats=3) / 1e3
    empty = torch.empty(1, device="cuda")
    floors["graph_node_us"] = graph_us([lambda: empty.add_(1)] * 50)
    for name, value in floors.items():
        report.add(Row("floors", name, "", value, name.rsplit("_", 1)[1]))
