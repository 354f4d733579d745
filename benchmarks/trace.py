"""What the event trace costs while an engine serves, and how fast the race detector reads one.

    python benchmarks/trace.py [--json] [--events N] [--only check|cost]

`cost`: tokens/s of one engine of the reference kind with its ring against the same engine with one that keeps
nothing, over interleaved repeats of the same request in one process, by wall-clock time and by CPU time (which other
work on the machine disturbs less); goal: 0.98 or more. `check`: events/s of the detector over a synthetic stream of N
events made on the fly (rooms that load, read and end over reused pages; making them is part of the time), and read
from a file; goal: 100,000 or more. Peak memory is that of the process.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import queue
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import show

from dsv4ctl.controlplane.tickets.ticket import Ticket
from dsv4ctl.controlplane.tickets.types import Consumer
from dsv4ctl.controlplane.trace.check import check
from dsv4ctl.controlplane.trace.file import TraceFile, Writer
from dsv4ctl.controlplane.trace.format import FRAME_EVENTS, Event, Events, Extent, Rank, encode
from dsv4ctl.controlplane.trace.merge import Merged
from dsv4ctl.controlplane.trace.ring import Ring

LAYERS, PAGES, ROOM_PAGES, LIVE = 8, 4096, 8, 64
EVENTS = 300_000
PROMPT_TOKENS, NEW_TOKENS, REPEATS, WARM = 300, 24, 41, 6
SECONDS = 60.0


def synthetic(events: int) -> Iterator[Merged]:
    """`LIVE` rooms at a time: each leases pages, reads them layer by layer as they land, and gives them back."""
    seq = itertools.count()
    rooms = [_room(number, seq) for number in range(LIVE)]
    numbers = itertools.count(LIVE)
    made = 0
    while made < events:
        for at, room in enumerate(rooms):
            for merged in room:
                yield merged
                made += 1
                break
            else:
                rooms[at] = _room(next(numbers), seq)


def _room(number: int, seq: Iterator[int]) -> Iterator[Merged]:
    """Rooms that live at the same time have different pages; those of one place use the same ones in turn."""
    first = number * ROOM_PAGES % PAGES
    generation = 2 * (number * ROOM_PAGES // PAGES) + 2
    pages = tuple(range(first, first + ROOM_PAGES))
    bare = (Extent("full", pages),)
    leased = (Extent("full", pages, (generation,) * ROOM_PAGES, ("c128_kv", "c4_kv", "index_k")),)
    load, ticket, room = 2 * number + 2, 2 * number + 3, f"{number}.1"

    def event(kind: str, who: str, subject: int, extents: Any, **fields: Any) -> Merged:
        at = next(seq)
        return Merged("bench", Event(at, at * 1000, kind, "step", room, who, subject, 0, **fields), extents)

    yield event("allocate", "", 0, bare)
    yield event("lease", "hicache", load, leased, value=1)
    yield event("request", "indexer", ticket, leased)
    for layer in range(LAYERS):
        yield event("landed", "hicache", load, leased, value=layer + 1)
        yield event("verified", "hicache", load, leased, value=layer + 1)
        yield event("grant", "indexer", ticket, leased, value=layer + 1)
        for pool in ("index_k", "c4_kv", "c128_kv"):
            yield event("read", "indexer", ticket, leased, pool=pool, layer=layer, value=layer + 1)
    yield event("ended", "hicache", load, leased)
    yield event("release", "indexer", ticket, leased)
    yield event("free", "", 0, bare)


def check_speed(events: int) -> dict[str, Any]:
    ranks = {"bench": Rank("bench", 0, "single", "bench", 0, LAYERS, 0, 0)}
    began, cpu = time.perf_counter(), time.process_time()
    report = check(ranks, synthetic(events))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert not report.races
    assert report.events >= events
    figures = {
        "events": report.events,
        "check_events_per_s": round(report.events / seconds),
        "check_events_per_cpu_s": round(report.events / cpu),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    return figures | _from_file(ranks, min(events, EVENTS))


def _from_file(ranks: dict[str, Rank], events: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.trace"
        with Writer(path, 1 << 40) as writer:
            stream = synthetic(events)
            while batch := list(itertools.islice(stream, FRAME_EVENTS)):
                table = [one.extents for one in batch]
                for number, one in enumerate(batch):
                    one.event.extents = number
                frame = Events("bench", 0, table, [one.event for one in batch])
                writer.write("bench", encode(ranks["bench"]), encode(frame))
        began, cpu = time.perf_counter(), time.process_time()
        file = TraceFile(path)
        report = check(file.ranks, file.merged())
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        assert not report.races
        return {
            "file_events_per_s": round(report.events / seconds),
            "file_events_per_cpu_s": round(report.events / cpu),
            "file_bytes_per_event": round(path.stat().st_size / report.events),
        }


def cost() -> dict[str, Any]:
    """Imports the engine only here: the detector needs none."""
    import msgspec
    import torch

    from dsv4ctl.controlplane.config.schema import DeadlinesConfig, EngineConfig, ReferenceConfig
    from dsv4ctl.controlplane.link.wire import OpenRoom
    from dsv4ctl.controlplane.rooms.states import RoomKey
    from dsv4ctl.engine_adapters.protocol import LaunchRequest
    from dsv4ctl.engine_adapters.reference.engine import Engine
    from dsv4ctl.engine_adapters.reference.log import Log
    from dsv4ctl.engine_adapters.reference.options import EngineOptions
    from dsv4ctl.engine_adapters.reference.requests import Finished, Output, Request

    torch.set_num_threads(1)  # threads that spin for others' work would be counted as CPU time
    table = msgspec.to_builtins(EngineConfig(name="bench", role="single", reference=ReferenceConfig(device_pages=16)))
    launch = LaunchRequest(table, 0, "bench", "bench", "/nowhere", (), "read", "bench")
    engine = Engine(launch, msgspec.convert(table, EngineOptions), Log(), print)
    engine.start()
    ring, deadlines = engine.gate.trace, msgspec.to_builtins(DeadlinesConfig())
    kept = ring.record, ring.record_of
    rooms, dice = itertools.count(1), random.Random(0)

    def nothing(*_: Any, **__: Any) -> None: ...

    def tokens_per_s(traced: bool) -> tuple[float, float]:
        """By wall-clock and by CPU time."""
        ring.record, ring.record_of = kept if traced else (nothing, nothing)
        key = RoomKey(next(rooms), 1)
        engine._agent.handle(OpenRoom(key, "bench", None, None, (), deadlines, "read"))
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        prompt = tuple(dice.randrange(256) for _ in range(PROMPT_TOKENS))
        began, cpu = time.perf_counter(), time.process_time()
        engine.submit(Request(str(key), key, prompt, NEW_TOKENS, True, None, None, outputs.put))
        while not isinstance(outputs.get(timeout=SECONDS), Finished):
            pass
        return NEW_TOKENS / (time.perf_counter() - began), NEW_TOKENS / (time.process_time() - cpu)

    for _ in range(WARM):
        tokens_per_s(True)
    gc.disable()
    before = len(ring.events())
    pairs = []
    for repeat in range(REPEATS):
        order = (True, False) if repeat % 2 else (False, True)
        found = {traced: tokens_per_s(traced) for traced in order}
        pairs.append((found[True], found[False]))
    events = (len(ring.events()) - before) / REPEATS
    on, off = (statistics.median(wall for wall, _ in column) for column in zip(*pairs, strict=True))
    ratio, cpu_ratio = (statistics.median(one[by] / other[by] for one, other in pairs) for by in (0, 1))
    nanoseconds = _record_ns(ring)
    engine._loop.stop()
    return {
        "tokens_per_s_ring": round(on, 1),
        "tokens_per_s_no_ring": round(off, 1),
        "ring_to_no_ring": round(ratio, 4),
        "ring_to_no_ring_cpu": round(cpu_ratio, 4),
        "ring_to_no_ring_goal": 0.98,
        "events_per_request": round(events),
        "record_ns": round(nanoseconds),
        "recording_share": round(events * nanoseconds / 1e9 * on / NEW_TOKENS, 5),
        "repeats": REPEATS,
    }


def _record_ns(ring: Ring) -> float:
    ticket = Ticket(Consumer.INDEXER, None, True, (), ())
    begin = time.thread_time_ns()
    for _ in range(100_000):
        ring.record_of("read", ticket, ("index_k", 1, ()), 3)
    return (time.thread_time_ns() - begin) / 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--only", choices=("check", "cost"))
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    if given.only != "cost":
        figures |= check_speed(given.events)
    if given.only != "check":
        figures |= cost()
    show(figures, as_json=given.json)


if __name__ == "__main__":
    main()
