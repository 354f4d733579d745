"""Rows of the kernels that only move bytes: store, digest, load and backup."""
# ruff: noqa: B023 (what a loop times is called within its turn)

from __future__ import annotations

import ctypes
import itertools

import torch

from dsv4ctl.kernels import index_k, ops
from dsv4ctl.kernels.copies_triton import backup_triton, load_triton
from dsv4ctl.kernels.copy_engine import backup_engine, load_engine
from dsv4ctl.kernels.digest_triton import Shape, digest_pages_triton
from kernel_bench.harness import Report, Row, events_us, graph_us, random_bytes

LAYERS = 21


def store(report: Report) -> None:
    for dtype, page_bytes in index_k.PAGE_BYTES.items():
        for count in (64, 65536):
            rows = [torch.randn(count, 128, device="cuda") for _ in range(4)]
            pages = random_bytes(4096, page_bytes)
            slots = torch.randperm(4096 * 64, device="cuda")[:count].to(torch.int32)
            norm, positions = torch.ones(128, device="cuda"), torch.arange(count, dtype=torch.int32, device="cuda")
            cos_sin = torch.rand(count, 64, device="cuda")
            time = graph_us(
                [
                    lambda x=x: ops.norm_rope_hadamard_store(pages, slots, x, norm, cos_sin, positions, 1e-6)
                    for x in rows
                ]
            )
            moved = count * (512 + 256 + page_bytes // 64 + 8)
            floor = moved / report.floors["copy_gbs"] / 1e3
            report.add(Row("store", f"fused store {dtype}", f"{count} keys", time, "us", "floor (bytes)", floor / time))


def digests(report: Report) -> None:
    for page_bytes in (16384, 8448, 149760):
        for megabytes, sets in ((64, 8), (256, 4), (2048, 1)):
            _digest_row(report, page_bytes, megabytes, sets, None)


def tune_digests(report: Report) -> None:
    for page_bytes in (16384, 8448):
        for block, ahead, programs, warps in itertools.product(
            (128, 256, 512, 2048), (1, 3, 5), (8, 16, 32), (1, 2, 4, 8)
        ):
            if 4 <= block // warps // 32 <= 8 or block * ahead < 512 or block // warps < 32 or programs * warps > 64:
                continue
            _digest_row(report, page_bytes, 256, 4, Shape(block, ahead, programs, warps))


def _digest_row(report: Report, page_bytes: int, megabytes: int, sets: int, shape: Shape | None) -> None:
    pages = (megabytes << 20) // page_bytes
    sources = [random_bytes(1, pages, page_bytes) for _ in range(sets)]
    order = torch.randperm(pages, device="cuda").to(torch.int32)
    took = graph_us([lambda source=source: digest_pages_triton(source, order, shape=shape) for source in sources])
    rate = pages * page_bytes / took / 1e3
    ratio = rate / report.floors.get(f"read_{megabytes}mib_gbs", report.floors["read_gbs"])
    row = Row("digest", "digest", f"{megabytes} MiB in pages of {page_bytes} B", rate, "GB/s", "read rate", ratio)
    if shape is None:
        row.goal, row.met = ">= 0.90", ratio >= 0.9
    else:
        row.section, row.note = "tune", str(shape)
    report.add(row)


def _loop_us(host: torch.Tensor, device: torch.Tensor, pages: int) -> float:
    """One cudaMemcpyAsync a page and layer, called through ctypes."""
    runtime = ctypes.CDLL("libcudart.so.13")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    pairs = [
        (
            ctypes.c_void_p(device.data_ptr() + layer * device.stride(0) + page * device.stride(1)),
            ctypes.c_void_p(host.data_ptr() + page * host.stride(0) + layer * host.stride(1)),
        )
        for layer in range(LAYERS)
        for page in range(0, pages, 2)
    ]
    size, kind = ctypes.c_size_t(host.shape[2]), ctypes.c_int(1)

    def loop() -> None:
        for target, source in pairs:
            runtime.cudaMemcpyAsync(target, source, size, kind, stream)

    return events_us(loop, len(pairs), repeats=3)


def copies(report: Report) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        for page_bytes in (8192, 8448, 16384, 149760):
            _copies(report, page_bytes)


def _copies(report: Report, page_bytes: int) -> None:
    pages = min(1024, (256 << 20) // (page_bytes * LAYERS))
    host = torch.empty(pages, LAYERS, page_bytes, dtype=torch.uint8, pin_memory=True)
    host.copy_(random_bytes(pages, LAYERS, page_bytes))
    device = random_bytes(LAYERS, 2 * pages, page_bytes)
    on_host, on_device = torch.randperm(pages), torch.randperm(2 * pages)[:pages]
    lists = [chosen.to(torch.int32).cuda() for chosen in (on_host, on_device)]
    numbers = on_host.tolist(), on_device.tolist()
    total = pages * LAYERS * page_bytes
    shape = f"{pages} pages x {LAYERS} layers of {page_bytes} B"
    best = {}
    for direction, kernel, engine, floor in (
        ("load", load_triton, load_engine, report.floors["h2d_gbs"]),
        ("backup", backup_triton, backup_engine, report.floors["d2h_gbs"]),
    ):
        for programs in (16, 32, 64, 128):
            time = events_us(
                lambda kernel=kernel, programs=programs: kernel(host, device, *lists, 0, LAYERS, programs=programs),
                repeats=3,
            )
            rate = total / time / 1e3
            ratio = rate / floor
            best[direction] = max(best.get(direction, 0.0), rate)
            name = f"{direction}, kernel, {programs} programs"
            report.add(Row("copies", name, shape, rate, "GB/s", "pinned memcpy", ratio, ">= 0.95", ratio >= 0.95))
        time = events_us(lambda engine=engine: engine(host, device, *numbers, 0, LAYERS), repeats=3)
        rate = total / time / 1e3
        best[direction] = max(best[direction], rate)
        report.add(Row("copies", f"{direction}, copy engine", shape, rate, "GB/s", "pinned memcpy", rate / floor))
    loop = _loop_us(host, device, pages)
    rate = page_bytes / loop / 1e3
    ratio = best["load"] / rate
    row = Row("copies", "load, best against a loop", shape, best["load"], "GB/s", f"loop's {rate:.1f} GB/s", ratio)
    if page_bytes <= 8448:
        row.goal, row.met = ">= 4", ratio >= 4
    report.add(row)
