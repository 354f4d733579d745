"""What hooks, HiCache and bf16 index keys cost: pairs of engines that differ in one thing each, asked in turns."""

from __future__ import annotations

import time
from collections.abc import Mapping

from sglang_bench import cost, plan
from sglang_bench.ask import Client
from sglang_bench.bench import Bench, jit, stock_pair


async def costs(bench: Bench) -> None:
    """One pair is asked at a time, and nothing else runs."""
    gpu, fake = bench.gpu, bench.fake
    with_hooks = plan.pair("cost-on", 22200, gpu, fake=fake)
    off = plan.pair("cost-off", 22210, gpu, fake=fake)
    on = bench.deployment("cost-on", 22290, *with_hooks)
    servers = [bench.server(shape) for shape in off]
    if not await bench.ready(on, *servers):
        return
    plain = cost.Arm(stock_pair(bench, *off), plan.ports(off))
    hooked = cost.Arm(Client(bench.http, on.url), plan.ports(with_hooks))

    async def turns(arms: Mapping[str, cost.Arm], key: str, rounds: int, seconds: float, load: cost.Load) -> None:
        ends = time.monotonic() + seconds
        await cost.turns(arms, bench.results, key, rounds=rounds, deadline=ends, load=load)

    await jit(bench, plain.client, hooked.client)
    arms = {"hooks_off": plain, "hooks_on": hooked}
    await bench.step("s5.cost", lambda: turns(arms, "s5.cost", 10, 60.0, cost.NEW))
    if not (bench.wanted("s5.hicache") or bench.wanted("s5.index_k")):
        return
    for server in servers:
        server.stop()
    without = plan.pair("cost-bare", 22300, gpu, fake=fake, hicache=False)
    wide = plan.pair("cost-bf16", 22400, gpu, fake=fake, index_k="bf16")
    bare = bench.deployment("cost-bare", 22390, *without)
    bf16 = bench.deployment("cost-bf16", 22490, *wide)
    if not await bench.ready(bare, bf16):
        return
    uncached = cost.Arm(Client(bench.http, bare.url), plan.ports(without))
    precise = cost.Arm(Client(bench.http, bf16.url), plan.ports(wide))
    await jit(bench, hooked.client, uncached.client, precise.client)

    async def hicache() -> None:
        arms = {"hicache_off": uncached, "hicache_on": hooked}
        await turns(arms, "s5.hicache.new", 3, 40.0, cost.NEW)
        await turns(arms, "s5.hicache.again", 3, 40.0, cost.AGAIN)

    async def index_k() -> None:
        await turns({"fp8": hooked, "bf16": precise}, "s5.index_k", 4, 50.0, cost.NEW)

    await bench.step("s5.hicache", hicache)
    await bench.step("s5.index_k", index_k)
