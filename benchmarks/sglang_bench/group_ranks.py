"""Engines of several ranks on all cards: outputs, abort waves and what each rank did in them, verdicts of one rank."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial

import anyio

from sglang_bench import aborts, equality, faults, plan, ranks
from sglang_bench.ask import Client, Oracle
from sglang_bench.bench import Bench, drained, jit, looked_into, stock_pair
from sglang_bench.machine import Shape


async def several(bench: Bench, count: int) -> None:
    """Engines of `count` ranks on all cards: outputs, abort waves and what each rank did in them, a stopped rank."""
    gpus = ",".join(str(number) for number in range(count))
    names = {"on": (21200, "fp8", True), "bf16": (21220, "bf16", False), "off": (21210, "fp8", True)}
    folders = {name: bench.machine.out / f"ranks-{name}" for name in names}
    shapes: dict[str, tuple[Shape, Shape]] = {}
    for name, (port, index_k, overlap) in names.items():
        folders[name].mkdir(parents=True, exist_ok=True)
        shapes[name] = plan.pair(
            f"tp-{name}", port, gpus, fake=bench.fake, ranks=count, index_k=index_k, overlap=overlap,
            env={"RANK_LOG": str(folders[name])},
        )  # fmt: skip
    oracle = bench.server(plan.single("tp-oracle", 21100, gpus, fake=bench.fake, ranks=count))
    single = plan.single("tp-bf16-single", 21120, gpus, fake=bench.fake, ranks=count, index_k="bf16")
    on = bench.deployment("tp-on", 21290, *shapes["on"])
    bf16 = bench.deployment("tp-bf16", 21390, *shapes["bf16"])
    bf16_oracle = bench.deployment("tp-bf16-oracle", 21490, single)
    if not await bench.ready(oracle, on, bf16, bf16_oracle, *[bench.server(shape) for shape in shapes["off"]]):
        return
    right, plain = Oracle(bench.http, oracle.shape.url), stock_pair(bench, *shapes["off"])
    right_bf16 = Oracle(bench.http, bf16_oracle.url)
    asked = {"on": Client(bench.http, on.url), "bf16": Client(bench.http, bf16.url), "off": plain}
    await jit(bench, right, right_bf16, *asked.values())
    idle = {
        "on": aborts.idle_deployed(bench.http, on),
        "bf16": aborts.idle_deployed(bench.http, bf16),
        "off": aborts.idle_stock(bench.http, [shape.url for shape in shapes["off"]]),
    }
    results = bench.results

    async def compared() -> None:
        for name in names:
            oracle = right_bf16 if name == "bf16" else right
            await equality.lengths(oracle, asked[name], results, f"tp.lengths.{name}")

    async def waves(name: str) -> None:
        key = f"tp.aborts.{name}"
        oracle = right_bf16 if name == "bf16" else right
        try:
            await aborts.waves(asked[name], oracle, idle[name], results, key, count=20, dropped=0.75)
        finally:
            results.put(key, ranks=ranks.divergence(folders[name]))

    async def one_verdict(name: str, which: Sequence[str], deadline: float) -> None:
        key = f"tp.one_verdict.{name}"
        try:
            await faults.one_verdict(
                asked[name], right, folders[name], results, key, faults=which, rank=count - 1, deadline=deadline
            )
        finally:
            results.put(key, ranks=ranks.divergence(folders[name]))

    await bench.step("tp.lengths", compared)
    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(bench.step, f"tp.aborts.{name}", partial(waves, name))
    await bench.step("tp.one_verdict.on", partial(one_verdict, "on", ("digest", "metadata", "failed"), 20.0))
    await bench.step("trace.tp-on", lambda: looked_into(bench, on))
    key = "tp.rank_stopped"
    stopped = partial(faults.killed, bench.http, on, "decode", right, results, key, number=signal.SIGSTOP, wait=100.0)
    await bench.step(key, stopped)
    await bench.step("tp.one_verdict.off", partial(one_verdict, "off", ("metadata",), 9.0))
    await bench.step("drain", lambda: drained(bench, bf16))
