"""The embedded engines on a GPU: HiCache loads by its copies, index keys behind device tickets, pages over NIXL.

    python benchmarks/cuda_engine.py [--device cuda] [--sessions 16] [--rounds 3] [--out benchmarks/cuda_engine.json]

A prefill and a decode engine share the card. Sessions of growing prompts with shared prefixes run at once, against
a prefill pool that holds a part of them, so that prefixes come back from the host while they are wanted. Every answer
is compared with the oracle's on the same device (equal shapes: the same chunks, one sequence at a time). Then the
indexer's ticket is switched off and the same is done: what is wrong then is counted, not judged. Before that, one
engine alone whose loads bring the index keys late, by work put before each copy on the loader's stream.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from deployment import DECODE, PAGE, PREFILL, Client, Deployment, deployed, prompt
from dsv4ctl.controlplane.config.schema import EngineConfig, HiCacheConfig, ReferenceConfig
from dsv4ctl.engine_adapters.reference.copies import StreamCopies
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.oracle import Oracle
from single import Single

#: Tokens of the prefix that the sessions of a group share, of what a round adds, and of an answer.
PREFIX, TURN, ANSWER = 4 * PAGE, 2 * PAGE - 16, 16
#: Sessions that share a prefix.
GROUP = 4
DTYPES = ("bf16", "fp8")
#: Of the engine whose loads come late: prompts, with two prefixes; rounds of them; device and host pages; clock cycles
#: of a multiprocessor before a copy of index keys (6 ms on an H200, of the 50 that a kernel waits).
PROMPTS, REPEATS, PAGES, HOST_PAGES, LATE_CYCLES = 6, 3, 24, 96, 11_400_000
#: Parts of a measurement, and the guards that are off in each.
PARTS: dict[str, tuple[str, ...]] = {"guards on": (), "indexer_ticket off": ("indexer_ticket",)}

Right = dict[tuple[int, int], list[int]]
"""(session, turn) -> the oracle's answer."""


def asked(session: int, turn: int) -> list[int]:
    """The prompt of a session's turn: each extends the one before."""
    turns = [prompt(1000 + 10 * session + at, TURN) for at in range(turn + 1)]
    return prompt(session // GROUP, PREFIX) + [token for one in turns for token in one]


def answers(dtype: str, device: str, sessions: int, rounds: int) -> Right:
    """The oracle's, in a process of its own."""
    oracle = Oracle(Geometry(index_k_dtype="fp8" if dtype == "fp8" else "bf16"), 0, device)
    turns = [(session, turn) for session in range(sessions) for turn in range(rounds)]
    return {at: oracle.generate(asked(*at), ANSWER).tokens for at in turns}


def late(dtype: str, device: str) -> dict[str, Any]:
    """Kernels are launched before the keys they read have come; in a process of its own, on a GPU."""
    prompts = [prompt(n % 2, PREFIX) + prompt(100 + n, 2 * PAGE + 20 + n) for n in range(PROMPTS)]
    oracle = Oracle(Geometry(index_k_dtype="fp8" if dtype == "fp8" else "bf16"), 0, device)
    right = [oracle.generate(ids, ANSWER).tokens for ids in prompts]
    load = StreamCopies.load

    def later(copies: StreamCopies, pool: str, *which: Any) -> None:
        if pool == "index_k":
            torch.cuda._sleep(LATE_CYCLES)
        load(copies, pool, *which)

    StreamCopies.load = later  # type: ignore[method-assign]
    reference = {"device": device, "device_pages": PAGES, "index_k_dtype": dtype}
    table = {"name": "late", "adapter": "reference", "role": "single"}
    hicache = HiCacheConfig(pages=HOST_PAGES)
    config = EngineConfig(**table, hicache=hicache, reference=ReferenceConfig(**reference))  # type: ignore[arg-type]
    told = {}
    for name, off in PARTS.items():
        engine, wrong = Single(config, off), 0
        for _ in range(REPEATS):
            outputs = [engine.ask(ids, ANSWER)[1] for ids in prompts]
            wrong += sum(engine.answer(out)[0] != tokens for out, tokens in zip(outputs, right, strict=True))
        told[name] = {"answers": REPEATS * PROMPTS, "wrong": wrong, "counters": engine.engine.info()["counters"]}
    return told


async def play(client: Client, sessions: int, rounds: int, right: Right) -> dict[str, Any]:
    """All sessions at once, round by round."""
    before, began = (await client.live(PREFILL))["counters"], time.monotonic()
    wrong = failed = 0
    seconds: list[float] = []
    for turn in range(rounds):
        replies = await client.burst([(asked(session, turn), ANSWER) for session in range(sessions)])
        for session, reply in enumerate(replies):
            seconds.append(reply.seconds)
            failed += reply.tokens is None
            wrong += reply.tokens is not None and reply.tokens != right[session, turn]
    took = time.monotonic() - began
    await client.until_at_rest()
    after = (await client.live(PREFILL))["counters"]
    counted = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    told = {"answers": len(seconds), "wrong": wrong, "failed": failed, "median_s": statistics.median(seconds)}
    return {**told, "all_s": took, "prefill_counters": counted}


async def run(client: Client, sessions: int, rounds: int, right: Right) -> dict[str, Any]:
    """A few sessions before the clock counts; then all of them with every guard on, and with one off."""
    found = {}
    for name, players, off in [("a few", GROUP, ()), *((name, sessions, off) for name, off in PARTS.items())]:
        await client.ask("POST", "/flush")
        await client.ask("POST", "/guards", off=list(off))
        found[name] = await play(client, min(players, sessions), rounds, right)
        print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("cuda_engine.json"))
    given = parser.parse_args()
    each = (PREFIX + given.rounds * (TURN + PAGE)) // PAGE
    pages = each * given.sessions
    held = max(2 * each, pages // 3)
    results: dict[str, Any] = {}
    with ProcessPoolExecutor(len(DTYPES), mp_context=multiprocessing.get_context("spawn")) as oracles:
        right = {d: oracles.submit(answers, d, given.device, given.sessions, given.rounds) for d in DTYPES}
        loads = {d: oracles.submit(late, d, given.device) for d in DTYPES if given.device == "cuda"}
        for dtype in DTYPES:
            shape = f'index_k_dtype = "{dtype}", device = "{given.device}"'
            prefill = f"reference = {{ {shape}, device_pages = {held} }}\nhicache = {{ pages = {2 * pages} }}"
            decode = f"reference = {{ {shape}, device_pages = {2 * pages} }}"
            with deployed("[unsafe]\nruntime = true\n", prefill=prefill, decode=decode) as here:

                async def measure(here: Deployment = here, dtype: str = dtype) -> dict[str, Any]:
                    async with here.client() as client:
                        return await run(client, given.sessions, given.rounds, right[dtype].result())

                before = {d: one.result() for d, one in loads.items()}  # nothing else runs while the clock counts
                results[dtype] = anyio.run(measure) | ({"late loads": before[dtype]} if before else {})
            figures = {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "device": torch.cuda.get_device_name() if given.device == "cuda" else platform.machine(),
                "torch": torch.__version__,
                "engines": f"{PREFILL} + {DECODE} on one device, {given.sessions} sessions, {given.rounds} rounds",
                "results": results,
            }
            given.out.write_text(json.dumps(figures, indent=2) + "\n")
    guarded = [part["guards on"] for one in results.values() for part in (one, one.get("late loads", one))]
    return int(any(part["wrong"] or part.get("failed") for part in guarded))


if __name__ == "__main__":
    sys.exit(main())
