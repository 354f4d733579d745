"""The machine, the clock and the results of one call; whatever it started it stops."""

from __future__ import annotations

import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import anyio

from sglang_bench import aborts, steps
from sglang_bench.ask import Client, Pair, Reply, prompt
from sglang_bench.early_send import Copies
from sglang_bench.machine import Deployment, Machine, Server, Shape
from sglang_bench.results import Results


class Bench:
    def __init__(
        self, machine: Machine, results: Results, seconds: float, *, group: str, gpu: str, fake: bool, only: set[str]
    ) -> None:
        self.machine = machine
        self.results = results
        self.fake = fake
        self.began = time.monotonic()
        self.end = self.began + seconds
        self.gpu = gpu
        self._steps = steps.GROUPS[group].steps
        self._only = only
        results.begin([step for step in self._steps if not only or step in only])
        self._done = {name for name, step in results.found("steps").items() if step["outcome"] == "done"}
        self._started: list[Server | Deployment | Copies] = []
        self.http: aiohttp.ClientSession

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f}] {text}", flush=True)

    def server(self, shape: Shape) -> Server:
        self._started.append(server := Server(self.machine, shape))
        return server

    def deployment(self, name: str, gateway: int, *shapes: Shape, unsafe: bool = False) -> Deployment:
        self._started.append(deployment := Deployment(self.machine, name, gateway, shapes, unsafe=unsafe))
        return deployment

    def copies(self, folder: Path, gpus: str) -> Copies:
        env = None if self.fake else self.machine.environment(CUDA_VISIBLE_DEVICES=gpus)
        self._started.append(copies := Copies(folder, env))
        return copies

    def wanted(self, step: str) -> bool:
        return step not in self._done and (not self._only or step in self._only)

    async def ready(self, *started: Server | Deployment) -> bool:
        """All of them, each awaited at once; those that are not are told of with their last lines."""
        up: dict[str, bool] = {}

        async def wait(one: Server | Deployment) -> None:
            name = one.name if isinstance(one, Deployment) else one.shape.name
            up[name] = await one.ready(self.http, min(self.end, time.monotonic() + steps.START))
            seconds = round(one.seconds, 1) if one.seconds else None
            self.say(f"{name}: {'ready' if up[name] else 'NOT READY'} {seconds}")
            self.results.put("starts", **{name: seconds})
            if not up[name]:
                self.say(tail(self.machine.out / f"{name}.log"))

        async with anyio.create_task_group() as tasks:
            for one in started:
                tasks.start_soon(wait, one)
        return all(up.values())

    async def step(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        """Runs one step; what goes wrong in it is a result, not an end."""
        seconds = self._steps[name].seconds
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


async def jit(bench: Bench, *clients: Client) -> None:
    """Two first requests each, and how long they took: kernels are compiled or loaded."""
    replies: list[Reply] = []

    async def first(client: Client) -> None:
        for length in (40, 900):
            reply = await client.ask(prompt("first", length), 4, deadline=steps.FIRST)
            replies.append(reply)

    async with anyio.create_task_group() as tasks:
        for client in clients:
            tasks.start_soon(first, client)
    bench.say(str([(round(reply.seconds, 1), reply.error) for reply in replies]))


async def looked_into(bench: Bench, deployment: Deployment) -> None:
    """What its ranks counted, and what the race detector says of what they recorded."""
    info = await aborts.server_info(bench.http, deployment.url)
    counters = {engine["name"]: engine["counters"] for engine in info["engines"]}
    bench.results.put(f"trace.{deployment.name}", counters=counters, rooms=info["rooms"])
    file = bench.machine.out / f"{deployment.name}.trace"
    recorded = await deployment.run("trace", "record", str(file))
    bench.results.put(
        f"trace.{deployment.name}", recorded=recorded, checked=await deployment.run("trace", "check", str(file))
    )


async def drained(bench: Bench, deployment: Deployment) -> None:
    bench.results.put("drain", **await deployment.drain(25.0))
