"""What a ticket costs: request + release against an asyncio.Lock, with many tickets alive, and its memory.

    python benchmarks/ledger.py [--json]

Times are CPU time of the thread, medians of many short repeats that interleave what is compared; `ratio_of_least` is
that of the least of each, to which other work on the machine adds nothing. One ticket covers one landed page; the
event trace is on, and its ring full.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
import tracemalloc
from collections.abc import Callable

from figures import show

from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.ticket import Ticket
from dsv4ctl.controlplane.tickets.types import Consumer, Extent, LoadKind, SpaceSpec
from dsv4ctl.controlplane.trace.ring import CAPACITY, Ring

LAYERS = 61
REPEATS, PAIRS = 100, 500
LIVE = (100, 1_000, 10_000, 100_000, 1_000_000)
#: As in a decoding room: one ticket a consumer.
CONSUMERS = (Consumer.ATTENTION, Consumer.INDEXER, Consumer.COMPRESSOR)


class Bench:
    def __init__(self) -> None:
        self.gate = Gate({"full": SpaceSpec(64, ("c4_kv", "c128_kv", "index_k"))}, LAYERS, Ring(time.monotonic_ns))
        for consumer in CONSUMERS:
            self.gate.register(consumer, "benchmark")
        taken = self.gate.allocate({"full": 64})
        assert taken is not None
        load = self.gate.open_load(LoadKind.HICACHE, [self.gate.extent("full", taken["full"])])
        self.gate.layer_landed(load, LAYERS)
        self.gate.end_load(load)
        self.extents: list[Extent] = [self.gate.extent("full", (page,)) for page in taken["full"]]

    def hold(self, count: int) -> list[Ticket]:
        """`count` tickets that stay alive, three a room."""
        return [
            self.gate.request(CONSUMERS[n % 3], self.extents[n % 64 : n % 64 + 1], room=RoomKey(n // 3, 1))
            for n in range(count)
        ]

    def settle(self) -> None:
        """Fills the ring with what is then measured: it drops as much as it is given."""
        for _ in range(CAPACITY // PAIRS):
            self.pairs()

    def pairs(self) -> float:
        """Nanoseconds a request + release."""
        gate, consumer, extents, room = self.gate, Consumer.ATTENTION, self.extents[:1], RoomKey(-1, 1)
        begin = time.thread_time_ns()
        for _ in range(PAIRS):
            gate.release(gate.request(consumer, extents, room=room))
        return (time.thread_time_ns() - begin) / PAIRS


def lock_pairs() -> float:
    """Nanoseconds an acquire + release of an uncontended asyncio.Lock."""

    async def run() -> float:
        lock = asyncio.Lock()
        begin = time.thread_time_ns()
        for _ in range(PAIRS):
            await lock.acquire()
            lock.release()
        return (time.thread_time_ns() - begin) / PAIRS

    return asyncio.run(run())


def interleaved(subjects: list[Callable[[], float]]) -> list[tuple[float, ...]]:
    """What each subject took, measured turn by turn."""
    rounds = [[subject() for subject in subjects] for _ in range(REPEATS)]
    return list(zip(*rounds, strict=True))


def bytes_per_ticket(count: int = 50_000) -> float:
    """Memory that `count` live tickets add, over `count`; their extents and rooms' keys are the caller's."""
    bench = Bench()
    bench.gate.trace = Ring(time.monotonic_ns, capacity=1)  # what a ring keeps is bounded, and no ticket's
    rooms = [RoomKey(n // 3, 1) for n in range(count)]
    lists = [[extent] for extent in bench.extents]
    tracemalloc.start()
    tickets = [bench.gate.request(CONSUMERS[n % 3], lists[n % 64], room=rooms[n]) for n in range(count)]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / len(tickets)


def measure() -> dict[str, object]:
    benches = {count: Bench() for count in LIVE}
    held = {count: bench.hold(count) for count, bench in benches.items()}
    alone = Bench()
    for bench in (alone, *benches.values()):
        bench.settle()
    taken = interleaved([lock_pairs, alone.pairs, *(bench.pairs for bench in benches.values())])
    lock, *pairs = map(statistics.median, taken)
    assert all(bench.gate.totals()["tickets"] == len(held[count]) for count, bench in benches.items())
    return {
        "asyncio_lock_ns": round(lock),
        "ticket_ns": round(pairs[0]),
        "ratio": round(pairs[0] / lock, 2),
        "ratio_of_least": round(min(taken[1]) / min(taken[0]), 2),
        "ticket_ns_by_live_tickets": {str(count): round(ns) for count, ns in zip(LIVE, pairs[1:], strict=True)},
        "flatness": round(max(pairs[1:]) / min(pairs[1:]), 2),
        "bytes_per_live_ticket": round(bytes_per_ticket()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    show(measure(), as_json=given.json)


if __name__ == "__main__":
    main()
