"""Early send of a cached prefix that HiCache is still loading: bursts that provoke it, pages compared on both sides.

Two sets of prefixes, of which the device pool holds one: each burst finds its own on the host. A burst is some long
blockers, then two requests for each prefix: they enter one batch, the first of each loads, the second sends early.
The pages are summed by a probe inside both servers (`ES_LOG`): after the load where they came from, and before decode
reads them where they went. Without the probe only the times and outputs are had.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import anyio

from sglang_bench.ask import Client, Reply, many, prompt
from sglang_bench.results import Results, spread

GROUPS, PREFIX_PAGES, PAGE, SUFFIX, NEW = 16, 127, 256, 40, 8
BLOCKERS, BLOCKER, GAP = 8, 8100, 0.06
#: Copies pinned memory to the device while the file named by its argument exists; ends with `.stop` beside it.
COPIES = """
import os, sys, time, torch
file, size = sys.argv[1], 1 << 29
host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
streams = [torch.cuda.Stream() for _ in range(2)]
while not os.path.exists(file + ".stop"):
    if not os.path.exists(file):
        time.sleep(0.05)
        continue
    for to, source, stream in zip(device, host, streams):
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
"""


class Arm:
    """One pair under bursts. `folder` is where its probe writes, and reads `mode` (`on` or `off`: the early send)."""

    def __init__(self, name: str, client: Client, folder: Path) -> None:
        self.name = name
        self.client = client
        self.folder = folder
        self.bursts = 0
        self.first: dict[str, list[float]] = defaultdict(list)  #: seconds to the first token, by kind of burst
        self.errors: list[str] = []
        self.kinds: dict[int, str] = {}  #: by room
        self._mode = ""

    async def warm(self) -> None:
        """Both sets once through the pair: computed, backed up."""
        for name in "XY":
            for group in range(0, GROUPS, 2):
                questions = [[*_prefix(name, at), 11, 12, 13] for at in (group, group + 1)]
                self._noted(await many(self.client, questions, 1), "warm")

    async def mode(self, early: str) -> None:
        if early != self._mode:
            self._mode = early
            (self.folder / "mode").write_text(early)
            await anyio.sleep(0.4)  # the probe looks ten times a second

    async def burst(self, kind: str, early: str) -> None:
        await self.mode(early)
        questions = [
            _prefix("XY"[self.bursts % 2], group) + prompt(f"suffix {group} {copy}", SUFFIX)
            for group in range(GROUPS)
            for copy in range(2)
        ]
        blockers = [prompt(f"blocker {self.name} {self.bursts} {at}", BLOCKER) for at in range(BLOCKERS)]
        self.bursts += 1
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(many, self.client, blockers, 1)
            await anyio.sleep(GAP)
            replies = await many(self.client, questions, NEW, stream=True)
        self._noted(replies, f"{kind} {early}")

    def _noted(self, replies: Iterable[Reply], kind: str) -> None:
        for reply in replies:
            if reply.error is not None:
                self.errors.append(reply.error[:200])
            if reply.room is not None:
                self.kinds[reply.room] = kind
            if reply.first is not None:
                self.first[kind].append(reply.first)

    def report(self) -> dict[str, Any]:
        return {
            "bursts": self.bursts,
            "errors": self.errors[:5],
            "error_count": len(self.errors),
            "first_token_seconds": {kind: spread(found) for kind, found in self.first.items()},
            "sends": sends(_records(self.folder, "P"), _records(self.folder, "D"), self.kinds),
        }


@cache
def _prefix(name: str, group: int) -> list[int]:
    return prompt(f"prefix {name} {group}", PREFIX_PAGES * PAGE)


def _records(folder: Path, side: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for file in sorted(folder.glob(f"{side}*.jsonl")):
        for line in file.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # its writer was killed within the line
    return found


def sends(source: list[dict[str, Any]], sink: list[dict[str, Any]], kinds: dict[int, str]) -> dict[str, Any]:
    """By kind of burst: what was sent early, of that pages of the batch's own load, and what arrived wrong."""
    arrived = {record["room"]: record for record in sink if record["k"] == "dck"}
    loads = {record["t0"]: set(record["pages"]) for record in source if record["k"] == "load"}
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for record in source:
        if record["k"] != "send":
            continue
        row = table[kinds.get(record["room"], "other")]
        compared, wrong = _compared(record, arrived.get(record["room"]))
        loading = record["early"] and bool(loads.get(record["load"], set()) & set(record["pages"]))
        name = "early" if record["early"] else "last"
        row.update({f"{name}_sends": 1, f"{name}_pages_compared": compared, f"{name}_pages_wrong": wrong})
        row.update({f"{name}_sends_wrong": wrong > 0, "early_sends_of_loading_pages": loading})
    errors = [record.get("e") for record in [*source, *sink] if record["k"] == "err"]
    milliseconds = spread(record["gpu_ms"] for record in source if record["k"] == "load" and record["gpu_ms"] >= 0)
    return {
        "table": {kind: dict(row) for kind, row in table.items()},
        "probe_errors": errors[:3],
        "load_ms": milliseconds,
    }


def _compared(sent: dict[str, Any], there: dict[str, Any] | None) -> tuple[int, int]:
    """Pages whose sums are known on both sides, and those of them that differ."""
    if there is None:
        return 0, 0
    both = [(sums, sent["pos"] + at) for at, sums in enumerate(sent.get("ck") or ()) if sent["pos"] + at < there["n"]]
    return len(both), sum(sums != there["ck"][at] for sums, at in both)


async def run(arms: list[tuple[Arm, list[tuple[str, str]]]], results: Results, key: str, copies: Copies,
              deadline: float) -> None:  # fmt: skip
    """Each arm's plan of (kind, early send), one burst of one arm at a time, as long as time is left."""
    for arm, _ in arms:
        await arm.warm()
    plans = [list(plan) for _, plan in arms]
    order = [at for at, plan in enumerate(plans) for _ in plan]
    random.Random(1).shuffle(order)
    for at in order:
        if time.monotonic() > deadline:
            break
        arm, (kind, early) = arms[at][0], plans[at].pop(0)
        copies.on(kind == "copies")
        await arm.burst(kind, early)
        results.put(key, **{arm.name: arm.report() if arm.bursts % 4 == 0 else {"bursts": arm.bursts}})
    copies.on(False)
    await anyio.sleep(1.0)  # the probe writes twice a second
    results.put(key, **{arm.name: arm.report() for arm, _ in arms})


#: What is switched off: the sender reads at once, and then what the digests say is counted and not heeded either.
CAUGHT = {"sent_too_early": ("sender_ticket",), "sent_too_early_unheeded": ("sender_ticket", "verdict")}


async def caught(
    arm: Arm, switch: Callable[[Sequence[str]], Awaitable[Any]], counters: Callable[[], Awaitable[dict[str, Any]]],
    results: Results, key: str, copies: Copies, *, bursts: int,
) -> None:  # fmt: skip
    """Bursts with the sender's ticket switched off: what the probe sees committed wrong, and what the digests saw."""
    copies.on(True)
    try:
        for name, off in CAUGHT.items():
            await switch(off)
            before = await counters()
            for _ in range(bursts):
                await arm.burst(name, "on")
            after = await counters()
            await anyio.sleep(1.0)  # the probe writes twice a second
            table = {kind: row for kind, row in arm.report()["sends"]["table"].items() if kind == f"{name} on"}
            grown = {engine: _grown(before.get(engine, {}), found) for engine, found in after.items()}
            results.put(key, **{name: {"off": off, "bursts": bursts, "counters": grown, "committed": table}})
            results.put(key, errors=arm.errors[-5:])
    finally:
        copies.on(False)
        await switch(())


def _grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}


class Copies:
    """Another process that keeps the way from host memory to the device busy, when told to."""

    def __init__(self, folder: Path, env: dict[str, str] | None) -> None:
        self._file = folder / "copies"
        self._process = (
            None if env is None else subprocess.Popen([sys.executable, "-c", COPIES, str(self._file)], env=env)
        )

    def on(self, wanted: bool) -> None:
        if wanted:
            self._file.touch()
        else:
            self._file.unlink(missing_ok=True)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
