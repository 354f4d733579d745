"""A pair with hooks beside one without, and the oracle: engines of one rank on one card."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio

from sglang_bench import aborts, equality, faults, plan
from sglang_bench.ask import Client, Oracle, Pair
from sglang_bench.bench import Bench, drained, jit, looked_into, stock_pair
from sglang_bench.machine import Deployment


async def outputs(bench: Bench) -> None:
    """Outputs, aborts, frames, a killed decode engine."""
    gpu, fake = bench.gpu, bench.fake
    oracle = bench.server(plan.single("oracle", 20100, gpu, fake=fake))
    on = bench.deployment("on", 20290, *plan.pair("on", 20200, gpu, fake=fake))
    off = plan.pair("off", 20210, gpu, fake=fake)
    bf16 = bench.deployment("bf16-sessions", 20890, *plan.pair("bf16", 20800, gpu, fake=fake, index_k="bf16"))
    bf16_single = plan.single("bf16-single", 20700, gpu, fake=fake, index_k="bf16")
    bf16_oracle = bench.deployment("bf16-sessions-oracle", 20790, bf16_single)
    if not await bench.ready(oracle, on, bf16, bf16_oracle, *[bench.server(shape) for shape in off]):
        return
    right, asked, plain = Oracle(bench.http, oracle.shape.url), Client(bench.http, on.url), stock_pair(bench, *off)
    group = _Group(
        bench,
        on,
        right,
        asked,
        plain,
        bf16=Client(bench.http, bf16.url),
        right_bf16=Oracle(bench.http, bf16_oracle.url),
        idle_bf16=aborts.idle_deployed(bench.http, bf16),
        idle_on=aborts.idle_deployed(bench.http, on),
        idle_off=aborts.idle_stock(bench.http, [shape.url for shape in off]),
        ports={"on": on.shapes[0].bootstrap_port, "off": off[0].bootstrap_port},
    )
    await jit(bench, right, asked, plain, group.bf16, group.right_bf16)
    await bench.step("s1.lengths", group.lengths)
    await bench.step("s1.sessions", group.sessions)
    await bench.step("s4.sessions", group.sessions_bf16)
    await bench.step("s3.aborts.hooks_on", group.waves_on)
    await bench.step("s3.frames.hooks_on", lambda: group.frames("on", asked))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group.without_hooks)
        await bench.step("s3.decode_killed", group.killed)
    await bench.step("trace.on", lambda: looked_into(bench, on))
    await bench.step("drain", lambda: drained(bench, on))


@dataclass
class _Group:
    bench: Bench
    on: Deployment
    right: Oracle
    asked: Client
    plain: Pair
    bf16: Client
    right_bf16: Oracle
    idle_bf16: aborts.Idle
    idle_on: aborts.Idle
    idle_off: aborts.Idle
    ports: dict[str, int]  #: bootstrap ports
    stock: list[dict[str, Any]] = field(default_factory=list)  #: how far runs without hooks are from their oracle

    async def lengths(self) -> None:
        results = self.bench.results
        await equality.lengths(self.right, self.asked, results, "s1.lengths.hooks_on")
        await equality.lengths(self.right, self.plain, results, "s1.lengths.hooks_off")
        await equality.host_hit(self.right, self.asked, results, "s1.host_hit.hooks_on", fillers=12)

    async def sessions(self) -> None:
        results, answers = self.bench.results, equality.Answers()
        found: dict[str, equality.Answers] = {}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(equality.reference, self.right, answers)
            for name, client, idle in (
                ("off_1", self.plain, self.idle_off),
                ("on_1", self.asked, self.idle_on),
                ("off_2", self.plain, self.idle_off),
                ("on_2", self.asked, self.idle_on),
            ):
                await idle()  # and its caches are empty
                found[name] = await equality.concurrent(client)
            ruled = equality.ruled((found["off_1"], found["off_2"]), (found["on_1"], found["on_2"]))
            results.put("s1.sessions", **ruled)
        apart = {f"hooks_{name}": equality.against(one, answers) for name, one in found.items()}
        results.put("s1.sessions", **apart)
        self.stock = [apart["hooks_off_1"], apart["hooks_off_2"]]

    async def sessions_bf16(self) -> None:
        """Held against the runs without hooks of `sessions`, of this call or of the one that it resumes."""
        before = self.bench.results.found("s1.sessions")
        stock = self.stock or [before["hooks_off_1"], before["hooks_off_2"]]
        answers: equality.Answers = {}
        runs: list[equality.Answers] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(equality.reference, self.right_bf16, answers)
            for _ in range(2):
                await self.idle_bf16()
                runs.append(await equality.concurrent(self.bf16))
        self.bench.results.put("s4.sessions", **equality.ruled_bf16((runs[0], runs[1]), answers, stock))

    async def waves_on(self) -> None:
        await aborts.waves(self.asked, self.right, self.idle_on, self.bench.results, "s3.aborts.hooks_on", count=10)

    async def waves_off(self) -> None:
        await aborts.waves(self.plain, self.right, self.idle_off, self.bench.results, "s3.aborts.hooks_off", count=4)

    async def frames(self, name: str, client: Client) -> None:
        key = f"s3.frames.hooks_{name}"
        await faults.malformed(self.bench.http, client, self.right, self.ports[name], self.bench.results, key)

    async def without_hooks(self) -> None:
        await self.bench.step("s3.aborts.hooks_off", self.waves_off)
        await self.bench.step("s3.frames.hooks_off", lambda: self.frames("off", self.plain))

    async def killed(self) -> None:
        await faults.killed(self.bench.http, self.on, "decode", self.right, self.bench.results, "s3.decode_killed")
