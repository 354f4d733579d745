"""Early sends, with hooks and without, of fp8 and of bf16 index keys: engines of one rank on one card."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import anyio

from sglang_bench import aborts, early_send, equality, faults, plan
from sglang_bench.ask import Client, Oracle
from sglang_bench.bench import Bench, jit, looked_into, stock_pair
from sglang_bench.early_send import Arm, Copies


async def early(bench: Bench) -> None:
    """Early sends with hooks and without, of fp8 and of bf16 index keys; bf16 outputs; a killed prefill engine."""
    out, gpu, fake = bench.machine.out, bench.gpu, bench.fake
    off = plan.early_pair("early-off", 20310, out / "es-off", gpu, fake=fake)
    shapes = plan.early_pair("early-on", 20320, out / "es-on", gpu, fake=fake)
    on = bench.deployment("early-on", 20390, *shapes, unsafe=True)
    if not await bench.ready(on, *[bench.server(shape) for shape in off]):
        return
    copies = bench.copies(out, gpu)
    plain = stock_pair(bench, *off)
    stock, hooked = Arm("hooks_off", plain, out / "es-off"), Arm("hooks_on", Client(bench.http, on.url), out / "es-on")
    await jit(bench, plain, hooked.client)
    bf16 = bench.deployment(
        "bf16", 20590, *plan.early_pair("bf16", 20500, out / "es-bf16", gpu, fake=fake, index_k="bf16")
    )
    bf16_oracle = bench.deployment(
        "bf16-oracle", 20490, plan.single("bf16-single", 20400, gpu, fake=fake, model="model_early", index_k="bf16")
    )
    arms = [
        (stock, [("busy", "on")] * 6 + [("copies", "on")] * 4 + [("busy", "off")] * 4),
        (hooked, [("busy", "on")] * 14 + [("copies", "on")] * 8 + [("busy", "off")] * 6),
    ]

    async def sent() -> None:
        await early_send.run(arms, bench.results, "s2.early_send", copies, time.monotonic() + 140.0)

    async def switch(off: Sequence[str]) -> None:
        words = [word for name in off for word in ("--off", name)] or ["--all-on"]
        said = await on.run("guards", *words)
        if said["exit_code"]:
            raise ValueError(f"guards were not switched: {said['said']}")
        await anyio.sleep(0.5)  # told to the ranks

    async def counters() -> dict[str, Any]:
        await anyio.sleep(1.0)  # the next reports
        info = await aborts.server_info(bench.http, on.url)
        return {engine["name"]: engine["counters"] for engine in info["engines"]}

    async def digests() -> None:
        if hooked.bursts == 0:
            await hooked.warm()
        await early_send.caught(hooked, switch, counters, bench.results, "s2.digests", copies, bursts=3)

    await bench.step("s2.early_send", sent)
    await bench.step("trace.early-on", lambda: looked_into(bench, on))
    await bench.step("s2.digests", digests)

    async def killed() -> None:
        key = "s3.prefill_killed"
        await bench.step(key, lambda: faults.killed(bench.http, on, "prefill", plain, bench.results, key))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(killed)
        if await bench.ready(bf16_oracle, bf16):
            await _bf16(bench, Oracle(bench.http, bf16_oracle.url), Client(bench.http, bf16.url), copies)
    await bench.step("trace.bf16", lambda: looked_into(bench, bf16))


async def _bf16(bench: Bench, right: Client, asked: Client, copies: Copies) -> None:
    await jit(bench, right, asked)
    await bench.step("s4.lengths", lambda: equality.lengths(right, asked, bench.results, "s4.lengths.bf16"))
    arm = Arm("hooks_on_bf16", asked, bench.machine.out / "es-bf16")
    bursts = [("busy", "on")] * 6 + [("copies", "on")] * 4
    key = "s4.early_send"
    ends = time.monotonic() + 50.0
    await bench.step(key, lambda: early_send.run([(arm, bursts)], bench.results, key, copies, ends))
