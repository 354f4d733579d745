"""Steps by name, each with its own deadline; what a step finds is written as it comes.

Five groups: `outputs` and `early`, engines of one rank on one card each, which may run beside each other; `steady` and
`cost`, on an idle machine; `ranks`, engines of several ranks on all cards. `--plan` says what is in each.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio

from sglang_bench import plan, steps
from sglang_bench.bench import Bench
from sglang_bench.group_cost import costs
from sglang_bench.group_early import early
from sglang_bench.group_outputs import outputs
from sglang_bench.group_ranks import several
from sglang_bench.group_steady import steady
from sglang_bench.results import Results


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[None]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)  # SGLang's server closes after 5
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**22) as bench.http:
            yield
    finally:
        bench.stop()


async def run(bench: Bench, group: str, count: int) -> None:
    bench.results.put("machine", **described())
    async with running(bench):
        with anyio.move_on_after(bench.end - time.monotonic()) as budget:
            match group:
                case "outputs":
                    await outputs(bench)
                case "early":
                    await early(bench)
                case "steady":
                    await steady(bench)
                case "cost":
                    await costs(bench)
                case _:
                    await several(bench, count)
        bench.say("out of time" if budget.cancelled_caught else "all steps were had")


def described() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        cards = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().splitlines()
    except OSError:
        cards = []
    return {"gpus": cards, "cpus": os.cpu_count(), "at": time.strftime("%Y-%m-%d %H:%M:%S")}


def main() -> None:
    parser = argparse.ArgumentParser(prog="h200_sglang", description=__doc__)
    parser.add_argument("--group", choices=tuple(steps.GROUPS), default="outputs")
    parser.add_argument(
        "--gpu", default="0", help="the card of a group that takes one, or the two of `steady` and `cost`"
    )
    parser.add_argument("--tp", type=int, default=1, help="ranks of an engine, each on a card of its own")
    parser.add_argument("--seconds", type=float, help="budget of the whole")
    parser.add_argument("--only", default="", help="steps, by name, separated by commas")
    parser.add_argument("--resume", action="store_true", help="leave out steps that the results say are done")
    parser.add_argument("--plan", action="store_true", help="print the calls and their steps")
    parser.add_argument("--out", type=Path, required=True, help="folder of logs")
    parser.add_argument("--fake", action="store_true", help="servers that compute nothing")
    parser.add_argument("results", type=Path)
    given = parser.parse_args()
    if given.plan:
        print(steps.plan())
        return
    group = "ranks" if given.tp > 1 else given.group
    given.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        plan.machine(given.out.resolve(), fake=given.fake),
        Results(given.results, resume=given.resume),
        given.seconds or steps.GROUPS[group].seconds,
        group=group,
        gpu=given.gpu,
        fake=given.fake,
        only={name for name in given.only.split(",") if name},
    )
    anyio.run(run, bench, group, given.tp)


if __name__ == "__main__":
    main()
