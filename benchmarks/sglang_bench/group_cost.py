"""What hooks, HiCache and bf16 index keys cost: pairs of engines on one card that differ in one thing each."""

from __future__ import annotations

import time
from collections.abc import Mapping

from sglang_bench import cost, plan
from sglang_bench.ask import Client
from sglang_bench.bench import Bench, jit, stock_pair


async def costs(bench: Bench) -> None:
    """One pair is asked at a time, and nothing else runs."""
    gpu, fake = bench.gpu, bench.fake
    on = bench.deployment("cost-on", 22290, *plan.pair("cost-on", 22200, gpu, fake=fake))
    bare = bench.deployment("cost-bare", 22390, *plan.pair("cost-bare", 22300, gpu, fake=fake, hicache=False))
    bf16 = bench.deployment("cost-bf16", 22490, *plan.pair("cost-bf16", 22400, gpu, fake=fake, index_k="bf16"))
    off = plan.pair("cost-off", 22210, gpu, fake=fake)
    if not await bench.ready(on, bare, bf16, *[bench.server(shape) for shape in off]):
        return
    plain = stock_pair(bench, *off)
    hooked = Client(bench.http, on.url)
    others = {"hicache_off": Client(bench.http, bare.url), "bf16": Client(bench.http, bf16.url)}
    await jit(bench, plain, hooked, *others.values())

    async def turns(arms: Mapping[str, Client], key: str, rounds: int, seconds: float, load: cost.Load) -> None:
        ends = time.monotonic() + seconds
        await cost.turns(arms, bench.results, key, rounds=rounds, deadline=ends, load=load)

    async def hicache() -> None:
        arms = {"hicache_off": others["hicache_off"], "hicache_on": hooked}
        await turns(arms, "s5.hicache.new", 3, 40.0, cost.BURST)
        await turns(arms, "s5.hicache.again", 3, 40.0, cost.AGAIN)

    arms = {"hooks_off": plain, "hooks_on": hooked}
    await bench.step("s5.steady", lambda: turns(arms, "s5.steady", 6, 130.0, cost.STEADY))
    await bench.step("s5.cost", lambda: turns(arms, "s5.cost", 10, 105.0, cost.BURST))
    await bench.step("s5.hicache", hicache)
    arms = {"fp8": hooked, "bf16": others["bf16"]}
    await bench.step("s5.index_k", lambda: turns(arms, "s5.index_k", 4, 50.0, cost.BURST))
