"""Steps by name, each with its own deadline; what a step finds is written as it comes.

Three groups: `outputs` and `early`, engines of one rank on one card each, which may run beside each other; `ranks`,
engines of several ranks on all cards.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio

from sglang_bench import aborts, cost, early_send, equality, faults, plan, ranks
from sglang_bench.ask import Client, Oracle, Pair, Reply
from sglang_bench.early_send import Arm, Copies
from sglang_bench.machine import Deployment, Machine, Server, Shape
from sglang_bench.results import Results

START = 170.0  #: seconds that servers may take to come up


class Bench:
    """The machine, the clock and the results; whatever it started it stops."""

    def __init__(
        self, machine: Machine, results: Results, seconds: float, *, gpu: str, fake: bool, only: set[str]
    ) -> None:
        self.machine = machine
        self.results = results
        self.fake = fake
        self.began = time.monotonic()
        self.end = self.began + seconds
        self.gpu = gpu
        self._only = only
        self._started: list[Server | Deployment | Copies] = []
        self.http: aiohttp.ClientSession

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f}] {text}", flush=True)

    def server(self, shape: Shape) -> Server:
        self._started.append(server := Server(self.machine, shape))
        return server

    def deployment(self, name: str, gateway: int, *shapes: Shape) -> Deployment:
        self._started.append(deployment := Deployment(self.machine, name, gateway, shapes))
        return deployment

    def copies(self, folder: Path, gpus: str) -> Copies:
        env = None if self.fake else self.machine.environment(CUDA_VISIBLE_DEVICES=gpus)
        self._started.append(copies := Copies(folder, env))
        return copies

    def wanted(self, step: str) -> bool:
        return not self._only or step in self._only

    async def ready(self, *started: Server | Deployment) -> bool:
        """All of them, each awaited at once; those that are not are told of with their last lines."""
        up: dict[str, bool] = {}

        async def wait(one: Server | Deployment) -> None:
            name = one.name if isinstance(one, Deployment) else one.shape.name
            up[name] = await one.ready(self.http, min(self.end, time.monotonic() + START))
            seconds = round(one.seconds, 1) if one.seconds else None
            self.say(f"{name}: {'ready' if up[name] else 'NOT READY'} {seconds}")
            self.results.put("starts", **{name: seconds})
            if not up[name]:
                self.say(tail(self.machine.out / f"{name}.log"))

        async with anyio.create_task_group() as tasks:
            for one in started:
                tasks.start_soon(wait, one)
        return all(up.values())

    async def step(self, name: str, seconds: float, body: Callable[[], Awaitable[None]]) -> None:
        """Runs one step; what goes wrong in it is a result, not an end."""
        if not self.wanted(name):
            return
        began, outcome = time.monotonic(), "over its time"
        try:
            with anyio.move_on_after(min(seconds, self.end - began)):
                await body()
                outcome = "done"
        except Exception as error:  # noqa: BLE001 - the other steps go on
            outcome = f"{type(error).__name__}: {error}"[:400]
            self.say(traceback.format_exc()[-1500:])
        finally:
            took = round(time.monotonic() - began, 1)
            self.results.put("steps", **{name: {"outcome": outcome, "seconds": took}})
            self.say(f"{name}: {outcome} ({took} s)")

    def stop(self) -> None:
        for one in self._started:
            one.stop()


def tail(file: Path, lines: int = 25) -> str:
    found = [line[:400] for line in file.read_text(errors="replace").splitlines() if '"level":"debug"' not in line]
    return "\n".join(found[-lines:])


def stock_pair(bench: Bench, prefill: Shape, decode: Shape) -> Pair:
    return Pair(bench.http, prefill.url, decode.url, prefill.bootstrap_port)


async def jit(*clients: Client) -> list[Reply]:
    """A first request each: kernels are compiled or loaded."""
    replies: list[Reply] = []

    async def first(client: Client) -> None:
        for length in (40, 900):
            reply = await client.ask(equality.prompt("first", length), 4, deadline=150.0)
            replies.append(reply)

    async with anyio.create_task_group() as tasks:
        for client in clients:
            tasks.start_soon(first, client)
    return replies


# ---- one rank an engine ----------------------------------------------------------------------------------


async def outputs(bench: Bench) -> None:
    """A pair with hooks beside one without, and the oracle: outputs, aborts, cost, frames, a killed decode engine."""
    oracle = bench.server(plan.single("oracle", 20100, fake=bench.fake))
    on = bench.deployment("on", 20290, *plan.pair("on", 20200, fake=bench.fake))
    off = plan.pair("off", 20210, fake=bench.fake)
    await bench.ready(oracle, on, *[bench.server(shape) for shape in off])
    right, asked, plain = Oracle(bench.http, oracle.shape.url), Client(bench.http, on.url), stock_pair(bench, *off)
    results = bench.results
    bench.say(str([(round(reply.seconds, 1), reply.error) for reply in await jit(right, asked, plain)]))

    async def compared() -> None:
        await equality.lengths(right, asked, results, "s1.lengths.hooks_on")
        await equality.lengths(right, plain, results, "s1.lengths.hooks_off")
        await equality.host_hit(right, asked, results, "s1.host_hit.hooks_on", fillers=12)

    answers: dict[tuple[int, int], Reply] = {}
    found: dict[str, dict[tuple[int, int], Reply]] = {}

    async def sessions() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(equality.reference, right, answers)
            for name, client in (("off_1", plain), ("on_1", asked), ("off_2", plain), ("on_2", asked)):
                found[name] = await equality.concurrent(client)

    async def waves_on() -> None:
        idle = aborts.idle_deployed(bench.http, on)
        await aborts.waves(asked, right, idle, results, "s3.aborts.hooks_on", count=10)

    async def waves_off() -> None:
        idle = aborts.idle_stock(bench.http, [shape.url for shape in off])
        await aborts.waves(plain, right, idle, results, "s3.aborts.hooks_off", count=4)

    async def frames(name: str, client: Client, port: int) -> None:
        await faults.malformed(bench.http, client, right, port, results, f"s3.frames.hooks_{name}")

    async def without_hooks() -> None:
        await bench.step("s3.aborts.hooks_off", 60.0, waves_off)
        await bench.step("s3.frames.hooks_off", 40.0, lambda: frames("off", plain, off[0].bootstrap_port))

    ends = time.monotonic() + 260.0
    await bench.step("s1.lengths", 75.0, compared)
    await bench.step("s1.sessions", 80.0, sessions)
    results.put("s1.sessions", **{f"hooks_{name}": equality.against(one, answers) for name, one in found.items()})
    await bench.step("s3.aborts.hooks_on", 85.0, waves_on)
    arms = {"hooks_off": plain, "hooks_on": asked}
    await bench.step("s5.cost", 60.0, lambda: cost.turns(arms, results, "s5.cost", rounds=5, deadline=ends))
    await bench.step("s3.frames.hooks_on", 30.0, lambda: frames("on", asked, on.shapes[0].bootstrap_port))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(without_hooks)
        key = "s3.decode_killed"
        await bench.step(key, 130.0, lambda: faults.killed(bench.http, on, "decode", right, results, key))
    await bench.step("trace.on", 25.0, lambda: _looked_into(bench, on))
    await bench.step("drain", 30.0, lambda: _drained(bench, on))


async def early(bench: Bench) -> None:
    """Early sends with hooks and without, of fp8 and of bf16 index keys; bf16 outputs; a killed prefill engine."""
    out, gpu, fake = bench.machine.out, bench.gpu, bench.fake
    off = plan.early_pair("early-off", 20310, out / "es-off", gpu, fake=fake)
    on = bench.deployment("early-on", 20390, *plan.early_pair("early-on", 20320, out / "es-on", gpu, fake=fake))
    await bench.ready(on, *[bench.server(shape) for shape in off])
    copies = bench.copies(out, gpu)
    plain = stock_pair(bench, *off)
    stock, hooked = Arm("hooks_off", plain, out / "es-off"), Arm("hooks_on", Client(bench.http, on.url), out / "es-on")
    bench.say(str([(round(reply.seconds, 1), reply.error) for reply in await jit(plain, hooked.client)]))
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
    key = "s2.early_send"
    ends = time.monotonic() + 140.0
    await bench.step(key, 155.0, lambda: early_send.run(arms, bench.results, key, copies, ends))

    await bench.step("trace.early-on", 25.0, lambda: _looked_into(bench, on))

    async def killed() -> None:
        key = "s3.prefill_killed"
        await bench.step(key, 130.0, lambda: faults.killed(bench.http, on, "prefill", plain, bench.results, key))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(killed)
        if await bench.ready(bf16_oracle, bf16):
            await _bf16(bench, Oracle(bench.http, bf16_oracle.url), Client(bench.http, bf16.url), copies)
    await bench.step("trace.bf16", 25.0, lambda: _looked_into(bench, bf16))


async def _bf16(bench: Bench, right: Client, asked: Client, copies: Copies) -> None:
    bench.say(str([(round(reply.seconds, 1), reply.error) for reply in await jit(right, asked)]))
    await bench.step("s4.lengths", 50.0, lambda: equality.lengths(right, asked, bench.results, "s4.lengths.bf16"))
    arm = Arm("hooks_on_bf16", asked, bench.machine.out / "es-bf16")
    bursts = [("busy", "on")] * 6 + [("copies", "on")] * 4
    key = "s4.early_send"
    ends = time.monotonic() + 50.0
    await bench.step(key, 65.0, lambda: early_send.run([(arm, bursts)], bench.results, key, copies, ends))


async def _looked_into(bench: Bench, deployment: Deployment) -> None:
    """What its ranks counted, and what the race detector says of what they recorded."""
    info = await aborts.server_info(bench.http, deployment.url)
    counters = {engine["name"]: engine["counters"] for engine in info["engines"]}
    bench.results.put(f"trace.{deployment.name}", counters=counters, rooms=info["rooms"])
    file = bench.machine.out / f"{deployment.name}.trace"
    recorded = await deployment.run("trace", "record", str(file))
    bench.results.put(
        f"trace.{deployment.name}", recorded=recorded, checked=await deployment.run("trace", "check", str(file))
    )


async def _drained(bench: Bench, deployment: Deployment) -> None:
    bench.results.put("drain", **await deployment.drain(25.0))


# ---- several ranks an engine -------------------------------------------------------------------------------


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
    on = bench.deployment("tp-on", 21290, *shapes["on"])
    bf16 = bench.deployment("tp-bf16", 21390, *shapes["bf16"])
    await bench.ready(oracle, on, bf16, *[bench.server(shape) for shape in shapes["off"]])
    right, plain = Oracle(bench.http, oracle.shape.url), stock_pair(bench, *shapes["off"])
    asked = {"on": Client(bench.http, on.url), "bf16": Client(bench.http, bf16.url), "off": plain}
    bench.say(str([(round(reply.seconds, 1), reply.error) for reply in await jit(right, *asked.values())]))
    idle = {
        "on": aborts.idle_deployed(bench.http, on),
        "bf16": aborts.idle_deployed(bench.http, bf16),
        "off": aborts.idle_stock(bench.http, [shape.url for shape in shapes["off"]]),
    }
    results = bench.results

    async def compared() -> None:
        for name in names:
            await equality.lengths(right, asked[name], results, f"tp.lengths.{name}")

    async def waves(name: str) -> None:
        key = f"tp.aborts.{name}"
        try:
            await aborts.waves(asked[name], right, idle[name], results, key, count=20, dropped=0.75)
        finally:
            results.put(key, ranks=ranks.divergence(folders[name]))

    await bench.step("tp.lengths", 60.0, compared)
    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(bench.step, f"tp.aborts.{name}", 115.0, partial(waves, name))
    key = "tp.rank_stopped"
    stopped = partial(faults.killed, bench.http, on, "decode", right, results, key, number=signal.SIGSTOP, wait=70.0)
    await bench.step("trace.tp-on", 25.0, lambda: _looked_into(bench, on))
    await bench.step(key, 110.0, stopped)
    await bench.step("drain", 30.0, lambda: _drained(bench, bf16))


# ---- everything ----------------------------------------------------------------------------------------------


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
    parser.add_argument("--group", choices=("outputs", "early", "ranks"), default="outputs")
    parser.add_argument("--gpu", default="0", help="the card of the groups `outputs` and `early`")
    parser.add_argument("--tp", type=int, default=1, help="ranks of an engine, each on a card of its own")
    parser.add_argument("--seconds", type=float, default=430.0, help="budget of the whole")
    parser.add_argument("--only", default="", help="steps, by name, separated by commas")
    parser.add_argument("--out", type=Path, required=True, help="folder of logs")
    parser.add_argument("--fake", action="store_true", help="servers that compute nothing")
    parser.add_argument("results", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        plan.machine(given.out.resolve(), fake=given.fake),
        Results(given.results),
        given.seconds,
        gpu=given.gpu,
        fake=given.fake,
        only={name for name in given.only.split(",") if name},
    )
    anyio.run(run, bench, "ranks" if given.tp > 1 else given.group, given.tp)


if __name__ == "__main__":
    main()
