"""The embedded engines on a GPU: HiCache loads by its copies, index keys behind device tickets, pages over NIXL.

    python benchmarks/cuda_engine.py [--device cuda] [--sessions 16] [--rounds 4] [--out benchmarks/cuda_engine.json]

A prefill and a decode engine share the card. Sessions of growing prompts with shared prefixes run at once, against
a prefill pool that holds a part of them, so that prefixes come back from the host while they are wanted. Every answer
is compared with the oracle's on the same device (equal shapes: the same chunks, one sequence at a time). Then the
indexer's ticket is switched off and the same is done: what is wrong then is counted, not judged.
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
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.oracle import Oracle

#: Tokens of the prefix that the sessions of a group share, of what a round adds, and of an answer.
PREFIX, TURN, ANSWER = 4 * PAGE, 2 * PAGE - 16, 16
#: Sessions that share a prefix.
GROUP = 4
DTYPES = ("bf16", "fp8")

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
    parts: tuple[tuple[str, int, list[str]], ...] = (
        ("a few", min(GROUP, sessions), []),
        ("guards on", sessions, []),
        ("indexer_ticket off", sessions, ["indexer_ticket"]),
    )
    for name, players, off in parts:
        await client.ask("POST", "/flush")
        await client.ask("POST", "/guards", off=off)
        found[name] = await play(client, players, rounds, right)
        print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("cuda_engine.json"))
    given = parser.parse_args()
    pages = (PREFIX + given.rounds * (TURN + PAGE)) // PAGE * given.sessions
    results: dict[str, Any] = {}
    with ProcessPoolExecutor(len(DTYPES), mp_context=multiprocessing.get_context("spawn")) as oracles:
        right = {d: oracles.submit(answers, d, given.device, given.sessions, given.rounds) for d in DTYPES}
        for dtype in DTYPES:
            shape = f'index_k_dtype = "{dtype}", device = "{given.device}"'
            prefill = f"reference = {{ {shape}, device_pages = {pages // 3} }}\nhicache = {{ pages = {2 * pages} }}"
            decode = f"reference = {{ {shape}, device_pages = {2 * pages} }}"
            with deployed("[unsafe]\nruntime = true\n", prefill=prefill, decode=decode) as here:

                async def measure(here: Deployment = here, dtype: str = dtype) -> dict[str, Any]:
                    async with here.client() as client:
                        return await run(client, given.sessions, given.rounds, right[dtype].result())

                results[dtype] = anyio.run(measure)
            figures = {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "device": torch.cuda.get_device_name() if given.device == "cuda" else platform.machine(),
                "torch": torch.__version__,
                "engines": f"{PREFILL} + {DECODE} on one device, {given.sessions} sessions, {given.rounds} rounds",
                "results": results,
            }
            given.out.write_text(json.dumps(figures, indent=2) + "\n")
    return int(any(one["guards on"]["wrong"] or one["guards on"]["failed"] for one in results.values()))


if __name__ == "__main__":
    sys.exit(main())
