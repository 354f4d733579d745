"""Device-side tickets on this GPU: late loads under graph replay, overlap, cost, deadlock, random interleavings."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsv4ctl.kernels import index_k
from dsv4ctl.kernels.copies_triton import load_triton
from dsv4ctl.kernels.copy_engine import load_engine, write_words
from dsv4ctl.kernels.digest_triton import digest_pages_triton
from dsv4ctl.kernels.logits import QueryBlocks, query_blocks
from dsv4ctl.kernels.logits_triton import paged_logits_triton
from dsv4ctl.kernels.tickets import Tickets
from dsv4ctl.kernels.tickets_triton import release
from kernel_bench.harness import Decode, Report, Row, alternating_us, decode_inputs, key_pool, queued_us

ROUNDS = 10_000
LOADERS = ("kernel", "engine + release kernel", "engine + write value")


@dataclass
class Scene:
    """One layer: a host pool of true keys, a device pool, a decode over `pages` of it, tickets."""

    host: torch.Tensor
    device: torch.Tensor
    data: Decode
    blocks: QueryBlocks
    tickets: Tickets
    host_pages: torch.Tensor
    device_pages: torch.Tensor
    lists: tuple[list[int], list[int]]

    def spoil(self) -> None:
        """Stale bytes in every page, no page landed, no result."""
        self.device.copy_(self.device.flip(1).roll(1, dims=1))
        self.tickets.words.zero_()
        self.tickets.failed.zero_()
        self.data.out.fill_(7.0)

    def logits(self, gated: bool, reserved_sms: int = 8, prefill: bool = False) -> None:
        paged_logits_triton(
            self.data.q, self.data.weights, self.device[0], self.data.table, self.data.lengths, self.blocks,
            self.data.out, self.tickets if gated else None, reserved_sms=reserved_sms, prefill=prefill,
        )  # fmt: skip

    def load(self, loader: str, first: int = 0, end: int | None = None) -> None:
        """Load pages first..end-1 of the list and release them, on the current stream."""
        part = slice(first, end)
        groups, generations = self.device_pages[part], self.tickets.expected.view(-1)[part]
        if loader == "kernel":
            words = self.tickets.words[None]
            load_triton(
                self.host, self.device, self.host_pages[part], groups, 0, 1, release=(words, groups, generations)
            )
            return
        load_engine(self.host, self.device, self.lists[0][part], self.lists[1][part], 0, 1)
        if loader == "engine + release kernel":
            release(self.tickets.words, groups, generations)
        else:
            write_words(self.tickets.words, self.lists[1][part], [1] * len(self.lists[1][part]))


def scene(batch: int, keys: int, queries: int = 1, deadline_us: int = 5_000_000) -> Scene:
    pages = batch * keys // index_k.KEYS
    device = key_pool(pages * index_k.KEYS, "bf16")[None]
    host = torch.empty(pages, 1, device.shape[2], dtype=torch.uint8, pin_memory=True)
    host.copy_(key_pool(pages * index_k.KEYS, "bf16")[:, None])
    data = decode_inputs(batch, keys, queries, pages)
    rows = min(4, queries)
    tickets = Tickets(
        torch.zeros(pages, dtype=torch.int64, device="cuda"),
        torch.ones_like(data.table, dtype=torch.int64),
        torch.zeros(batch, dtype=torch.int32, device="cuda"),
        deadline_us,
    )
    device_pages = data.table.view(-1)
    host_pages = torch.randperm(pages, device="cuda").to(torch.int32)
    lists = host_pages.tolist(), device_pages.tolist()
    return Scene(
        host, device, data, query_blocks([queries] * batch, rows, "cuda"), tickets, host_pages, device_pages, lists
    )


def truth(one: Scene, prefill: bool = False) -> torch.Tensor:
    """The logits when everything has landed."""
    one.spoil()
    one.load("engine + release kernel")
    one.logits(gated=False, prefill=prefill)
    torch.cuda.current_stream().synchronize()
    return one.data.out.clone()


def check(report: Report) -> None:
    for part in (late_replay, cost, overlap, never_lands, no_deadlock, interleavings):
        report.section(f"tickets_{part.__name__}", lambda report, part=part: _streamed(part, report))


def _streamed(part: Callable[[Report], None], report: Report) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        part(report)


def _verdict(report: Report, name: str, shape: str, good: bool, note: str = "") -> None:
    report.add(Row("tickets", name, shape, float(good), "", goal="holds", met=good, note=note))


def late_replay(report: Report) -> None:
    """(a) A captured graph is replayed 3 ms before its load begins."""
    one = scene(4, 16384)
    expected = truth(one)
    graphs = {gated: torch.cuda.CUDAGraph() for gated in (False, True)}
    for gated, graph in graphs.items():
        one.logits(gated)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            one.logits(gated)
    side = torch.cuda.Stream()
    for loader in LOADERS:
        for gated, graph in graphs.items():
            one.spoil()
            torch.cuda.synchronize()
            graph.replay()
            with torch.cuda.stream(side):
                torch.cuda._sleep(6_000_000)
                one.load(loader)
            torch.cuda.synchronize()
            right = torch.equal(one.data.out, expected) and not bool(one.tickets.failed.any())
            wrong = int((one.data.out != expected).sum())
            name = f"(a) late load, {'with' if gated else 'without'} tickets: {'right' if gated else 'wrong'}"
            _verdict(report, name, loader, right == gated, f"{wrong} of {expected.numel()} logits wrong")


def cost(report: Report) -> None:
    """Everything landed: the same launch with and without tickets."""
    for batch, kilo in ((64, 64), (16, 256), (4, 64)):
        scenes = [scene(batch, kilo << 10) for _ in range(1 if batch > 4 else 6)]
        for one in scenes:
            one.tickets.words.fill_(1)
        plain = [lambda one=one: one.logits(gated=False, reserved_sms=0) for one in scenes]
        gated = [lambda one=one: one.logits(gated=True, reserved_sms=0) for one in scenes]
        with_tickets, without = alternating_us([gated, plain], 25)
        ratio = with_tickets / without
        row = Row("tickets", "cost of landed tickets", f"{batch} x {kilo}K", with_tickets, "us", "no tickets", ratio)
        row.goal, row.met = "<= 1.02", ratio <= 1.02
        report.add(row)


def overlap(report: Report) -> None:
    """(b) Load and logits started together, against each alone."""
    side = torch.cuda.Stream()
    for batch, queries, prefill in ((1, 1, False), (16, 1, False), (1, 128, True), (1, 512, True)):
        one = scene(batch, 65536, queries)
        expected = truth(one, prefill)
        shape = f"{batch} x 64K keys, {queries} q"
        one.tickets.words.fill_(1)
        compute = queued_us(lambda one=one, prefill=prefill: one.logits(True, prefill=prefill))
        for loader in LOADERS[:2]:
            load = queued_us(lambda one=one, loader=loader: one.load(loader))
            one.spoil()
            wrong = 0

            def both(one: Scene = one, loader: str = loader, prefill: bool = prefill) -> None:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    one.load(loader)
                one.logits(True, prefill=prefill)
                torch.cuda.current_stream().wait_stream(side)

            times = []
            for _ in range(5):
                one.spoil()
                times.append(_once_us(both))
                wrong += int((one.data.out != expected).sum())
            took = sorted(times)[2]
            ratio = took / max(load, compute)
            note = f"load {load:.0f}, logits {compute:.0f}, sum {load + compute:.0f} us; {wrong} logits wrong"
            row = Row("tickets", f"(b) load+logits, {loader}", shape, took, "us", "max of both", ratio, note=note)
            row.goal, row.met = "<= 1.1", ratio <= 1.1 and wrong == 0
            report.add(row)


def _once_us(call: Callable[[], None]) -> float:
    """As `queued_us`, one call on the state as it is."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def never_lands(report: Report) -> None:
    """A page that never lands: its flag within the deadline, NaN there, other sequences right."""
    one = scene(4, 16384, deadline_us=20_000)
    expected = truth(one)
    one.logits(gated=True)  # compiled before it is timed
    one.spoil()
    one.load("kernel")
    late = 100
    one.tickets.words[one.device_pages[256 + late].long()] = 0
    torch.cuda.synchronize()
    began = time.monotonic()
    one.logits(gated=True)
    torch.cuda.synchronize()
    took = (time.monotonic() - began) * 1e3
    flags = one.tickets.failed.tolist()
    others = all(torch.equal(one.data.out[row], expected[row]) for row in (0, 2, 3))
    page = one.data.out[1, late * 64 : late * 64 + 64]
    good = flags == [0, late + 1, 0, 0] and others and bool(page.isnan().all()) and took < 100
    _verdict(report, "a page never lands: flag, no hang", "deadline 20 ms", good, f"flags {flags}, {took:.1f} ms")
    groups = torch.arange(8, dtype=torch.int32, device="cuda")
    tickets = Tickets(
        torch.tensor([1, 1, 1, 0, 1, 1, 1, 1], device="cuda"), torch.ones(8, dtype=torch.int64, device="cuda"),
        torch.zeros(8, dtype=torch.int32, device="cuda"), 20_000,
    )  # fmt: skip
    digests = digest_pages_triton(one.device[:, :8], groups, tickets)
    plain = digest_pages_triton(one.device[:, :8], groups)
    plain[0, 3] = 0
    good = torch.equal(digests, plain) and tickets.failed.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    _verdict(report, "the same for digests", "deadline 20 ms", good, f"flags {tickets.failed.tolist()}")


def no_deadlock(report: Report) -> None:
    """(c) The grid waits on every multiprocessor it may have before a loader that needs some is launched."""
    one = scene(16, 65536, deadline_us=2_000_000)
    expected = truth(one)
    side = torch.cuda.Stream()
    for reserved in (8, 0):
        for loader in LOADERS:
            one.spoil()
            torch.cuda.synchronize()
            began = time.monotonic()
            one.logits(gated=True, reserved_sms=reserved)
            time.sleep(0.005)
            with torch.cuda.stream(side):
                one.load(loader)
            torch.cuda.synchronize()
            took = (time.monotonic() - began) * 1e3
            failed = int(one.tickets.failed.count_nonzero())
            right = torch.equal(one.data.out, expected) and failed == 0
            ended = right or (failed > 0 and took < 4000)  # by its deadline at the latest, and reported
            note = f"{took:.1f} ms, {'right' if right else f'{failed} sequences flagged'}"
            _verdict(report, f"(c) {loader}", f"{reserved} SMs reserved", right if reserved else ended, note)


def interleavings(report: Report) -> None:
    """(d) Random page sets, splits, orders, delays and loaders; one graph of logits and digests, replayed."""
    for gated, rounds in ((True, ROUNDS), (False, ROUNDS // 10)):
        wrong, failed, seconds = _interleave(gated, rounds)
        good = wrong == 0 and failed == 0 if gated else wrong > 0
        name = f"(d) interleavings, {'with' if gated else 'without'} tickets"
        _verdict(report, name, f"{rounds} rounds", good, f"{wrong} rounds wrong, {failed} flags, {seconds:.1f} s")


@dataclass
class Game:
    """Two sequences of 8 pages out of a pool of 24, true keys in a stock of 64 host pages, results known by page."""

    host: torch.Tensor
    device: torch.Tensor
    data: Decode
    blocks: QueryBlocks
    tickets: Tickets
    listed: Tickets
    logits_of: torch.Tensor
    digest_of: torch.Tensor

    def read(self, gated: bool) -> torch.Tensor:
        """The logits into `data.out`; returns the digests."""
        table = self.data.table
        paged_logits_triton(
            self.data.q, self.data.weights, self.device[0], table, self.data.lengths, self.blocks, self.data.out,
            self.tickets if gated else None, reserved_sms=16,
        )  # fmt: skip
        return digest_pages_triton(self.device, table.view(-1), self.listed if gated else None, reserved_sms=16)

    def load(self, loader: int, into: torch.Tensor, source: torch.Tensor, numbers: list[list[int]], turn: int) -> None:
        words, generation = self.tickets.words, torch.full_like(into, turn, dtype=torch.int64)
        if loader == 0:
            load_triton(self.host, self.device, source, into, 0, 1, (words[None], into, generation), programs=8)
            return
        load_engine(self.host, self.device, numbers[0], numbers[1], 0, 1)
        if loader == 1:
            release(words, into, generation)
        else:
            write_words(words, numbers[1], [turn] * len(numbers[1]))


SEQUENCES, PAGES, POOL, STOCK = 2, 8, 24, 64
TOTAL = SEQUENCES * PAGES


def _game() -> Game:
    device, source = key_pool(POOL * 64, "bf16")[None], key_pool(STOCK * 64, "bf16")
    host = torch.empty(STOCK, 1, device.shape[2], dtype=torch.uint8, pin_memory=True)
    host.copy_(source[:, None])
    data, every = decode_inputs(SEQUENCES, PAGES * 64, 1, TOTAL), decode_inputs(SEQUENCES, STOCK * 64, 1, STOCK)
    blocks = query_blocks([1] * SEQUENCES, 1, "cuda")
    every.table.copy_(torch.arange(STOCK, device="cuda").expand(SEQUENCES, STOCK))
    paged_logits_triton(data.q, data.weights, source, every.table, every.lengths, blocks, every.out)
    digest_of = digest_pages_triton(source[None], torch.arange(STOCK, dtype=torch.int32, device="cuda"))[0]
    words = torch.zeros(POOL, dtype=torch.int64, device="cuda")
    expected = torch.zeros(SEQUENCES, PAGES, dtype=torch.int64, device="cuda")
    tickets, listed = (
        Tickets(words, wanted, torch.zeros(flags, dtype=torch.int32, device="cuda"), 5_000_000)
        for wanted, flags in ((expected, SEQUENCES), (expected.view(-1), TOTAL))
    )
    return Game(host, device, data, blocks, tickets, listed, every.out.view(SEQUENCES, STOCK, 64), digest_of)


def _interleave(gated: bool, rounds: int) -> tuple[int, int, float]:
    dice, game = random.Random(7), _game()
    game.read(gated)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        digests = game.read(gated)
    tables = torch.stack([torch.randperm(POOL, device="cuda")[:TOTAL] for _ in range(rounds)]).to(torch.int32)
    chosen = torch.randint(0, STOCK, (rounds, TOTAL), dtype=torch.int32, device="cuda")
    on_device, on_host = tables.tolist(), chosen.tolist()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    main, side, read_done = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Event()
    order = torch.arange(SEQUENCES, device="cuda")[:, None]
    began = time.monotonic()
    for turn in range(rounds):
        game.data.table.view(-1).copy_(tables[turn])
        game.tickets.expected.fill_(turn + 1)
        torch.cuda._sleep(1_600_000)
        read_done.record()
        with torch.cuda.stream(side):
            side.wait_event(read_done)
            cuts = sorted(dice.sample(range(1, TOTAL), dice.randrange(0, 3)))
            parts = list(zip([0, *cuts], [*cuts, TOTAL], strict=True))
            dice.shuffle(parts)
            for first, end in parts:
                torch.cuda._sleep(dice.choice((0, 0, 2_000, 20_000, 60_000)))
                numbers = [on_host[turn][first:end], on_device[turn][first:end]]
                game.load(dice.randrange(3), tables[turn, first:end], chosen[turn, first:end], numbers, turn + 1)
        torch.cuda._sleep(dice.choice((0, 2_000, 20_000)))
        graph.replay()
        pages_read = chosen[turn].view(SEQUENCES, PAGES).long()
        good = (game.data.out.view(SEQUENCES, PAGES, 64) == game.logits_of[order, pages_read]).all()
        good &= (digests[0] == game.digest_of[pages_read.view(-1)]).all()
        wrong += ~good
        main.wait_stream(side)
    torch.cuda.synchronize()
    flags = int(game.tickets.failed.count_nonzero() + game.listed.failed.count_nonzero())
    return int(wrong), flags, time.monotonic() - began
