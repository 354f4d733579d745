"""Timing, data and the table: every row is written to the result file as soon as its section has ended."""

from __future__ import annotations

import datetime as dt
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.errors import TritonError

from dsv4ctl.kernels import index_k


@dataclass
class Row:
    """One line of the table. ratio: value against floor or peer, in the sense that `goal` names."""

    section: str
    name: str
    shape: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    goal: str = ""
    met: bool | None = None
    note: str = ""


@dataclass
class Report:
    path: Path
    deadline: float
    rows: list[Row] = field(default_factory=list)
    floors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        ratio = "" if row.ratio is None else f"{row.ratio:8.3f} of {row.against}"
        met = "" if row.met is None else ("  met" if row.met else "  MISSED") + f" ({row.goal})"
        print(f"  {row.name:34s} {row.shape:34s} {row.value:12.3f} {row.unit:5s} {ratio}{met} {row.note}", flush=True)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"  note: {text}", flush=True)

    def section(self, name: str, run: Callable[[Report], None]) -> None:
        """Run one section unless the time is up; what it raises is noted and the rest goes on."""
        if time.monotonic() > self.deadline:
            self.note(f"{name}: not run, the time was up")
            return
        print(f"[{name}]", flush=True)
        began = time.monotonic()
        try:
            run(self)
            torch.cuda.synchronize()
        except (RuntimeError, ValueError, AssertionError, TypeError, AttributeError, TritonError) as error:
            self.note(f"{name}: {type(error).__name__}: {str(error)[:1500]}")
        self.seconds[name] = round(time.monotonic() - began, 1)
        torch.cuda.empty_cache()
        self.write()

    def write(self) -> None:
        properties = torch.cuda.get_device_properties(0)
        document: dict[str, Any] = {
            "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "versions": {
                "torch": torch.__version__,
                "triton": triton.__version__,
                "cuda": torch.version.cuda,
                "python": platform.python_version(),
            },
            "floors": self.floors,
            "rows": [asdict(row) for row in self.rows],
            "notes": self.notes,
            "seconds": self.seconds,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(document, indent=1) + "\n")


def graph_us(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Microseconds a call: `calls` (on different data) captured in a graph, median over its replays."""
    return alternating_us([calls], repeats)[0]


def alternating_us(groups: Sequence[Sequence[Callable[[], object]]], repeats: int = 7) -> list[float]:
    """As `graph_us` for each group of calls, the groups' graphs replayed in turn: for small differences."""
    graphs = [_captured(calls) for calls in groups]
    times: list[list[float]] = [[] for _ in groups]
    for turn in range(repeats + 2):
        for calls, graph, taken in zip(groups, graphs, times, strict=True):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            if turn >= 2:
                taken.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return [statistics.median(taken) for taken in times]


def _captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def events_us(call: Callable[[], object], calls: int = 1, repeats: int = 7) -> float:
    """Microseconds of `call` / `calls` by device events, median, after two calls to warm up."""
    times = []
    for turn in range(repeats + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        if turn >= 2:
            times.append(start.elapsed_time(stop) * 1e3 / calls)
    return statistics.median(times)


def queued_us(call: Callable[[], object], repeats: int = 5) -> float:
    """Microseconds of what `call` launches on the current stream, behind a pause so that launching costs none."""
    times = []
    for turn in range(repeats + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        if turn >= 2:
            times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def random_bytes(*shape: int) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    words = torch.randint(-(1 << 62), 1 << 62, (count // 8,), dtype=torch.int64, device="cuda")
    return words.view(torch.uint8).view(shape)


@dataclass
class Decode:
    """Inputs of one logits call."""

    q: torch.Tensor
    q8: torch.Tensor
    weights: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    out: torch.Tensor


def key_pool(keys: int, dtype: str, clustered: bool = False) -> torch.Tensor:
    """A pool of random keys, in pieces so that no fp32 copy of it all is made: uint8 [pages, page_bytes]."""
    from dsv4ctl.kernels.index_k_triton import store_slots_triton

    pages = torch.empty(keys // index_k.KEYS, index_k.PAGE_BYTES[dtype], dtype=torch.uint8, device="cuda")
    for at in range(0, keys, 1 << 20):
        count = min(1 << 20, keys - at)
        values = clustered_keys(count) if clustered else torch.randn(count, index_k.DIM, device="cuda")
        slots = torch.arange(at, at + count, dtype=torch.int32, device="cuda")
        store_slots_triton(pages, slots, values)
    return pages


def clustered_keys(count: int) -> torch.Tensor:
    """Keys as of a long text: runs of 64 near one of a few hundred topics, topics near each other."""
    common = torch.randn(1, index_k.DIM, device="cuda")
    topics = common + 0.7 * torch.randn(384, index_k.DIM, device="cuda")
    chosen = torch.randint(0, 384, (-(-count // 64),), device="cuda").repeat_interleave(64)[:count]
    return topics[chosen] + 0.5 * torch.randn(count, index_k.DIM, device="cuda")


def decode_inputs(batch: int, keys: int, queries: int, pool_pages: int, ragged: bool = False) -> Decode:
    """Each sequence's pages are random ones of the pool, no page twice (if the pool has enough)."""
    rows, pages = batch * queries, keys // index_k.KEYS
    order = torch.randperm(pool_pages, device="cuda").to(torch.int32)
    table = order[torch.arange(batch * pages, device="cuda") % pool_pages].view(batch, pages).contiguous()
    q = torch.randn(rows, 64, index_k.DIM, device="cuda").to(torch.bfloat16)
    weights = torch.rand(rows, 64, device="cuda")
    lengths = torch.full((rows,), keys, dtype=torch.int32, device="cuda")
    if ragged:
        lengths = torch.randint(1, keys + 1, (batch, 1), dtype=torch.int32, device="cuda").repeat(1, queries).view(-1)
    out = torch.full((rows, keys), float("nan"), device="cuda")
    return Decode(q, q.to(torch.float8_e4m3fn), weights, table, lengths, out)
