"""Tokens/s with hooks and without, of pairs that are started anew each time, and what of a turn is our own code.

Where a process lies in memory, and which processors it has, is chance, and stays for its life: two starts on one
machine differ by percents that no number of slices averages out. With hooks a process does not look through what start
built when it collects the whole heap; without, it does, as SGLang comes: that is in the ratio.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import anyio

from sglang_bench import cost, own, parts, plan
from sglang_bench.ask import Client, Reply
from sglang_bench.bench import Bench, jit, stock_pair

_STARTS, _SECONDS = 16, 40.0
_WARM, _OWN_SECONDS = 10.0, 30.0


async def steady(bench: Bench) -> None:
    """As many starts as the call has time for; a resumed one counts on. Not of other code: that begins anew."""
    if not bench.fake:  # a server that computes nothing has no loop
        await bench.step("s5.own", lambda: _own(bench))

    async def starts() -> None:
        found: list[dict[str, Any]] = list(bench.results.found("s5.steady").get("starts", ()))
        while len(found) < _STARTS:
            number = len(found)
            start = await _start(bench, number) or await _start(bench, number)
            if start is None:
                raise RuntimeError(f"the servers of start {number} did not come up, twice")
            found.append(start)
            mean = cost.between([start["mean_ratio"][0] for start in found])
            bench.results.put("s5.steady", load=cost.NEW._asdict(), starts=found, mean_ratio=mean)

    await bench.step("s5.steady", starts)


async def _own(bench: Bench) -> None:
    """Of one pair with hooks and nothing beside it, with prompts that are new, and with some that come from the host.

    Raises RuntimeError if it did not come up, or did not count.
    """
    folder = bench.machine.out / "own"
    shutil.rmtree(folder, ignore_errors=True)  # of a start that was cut short
    folder.mkdir()
    shapes = plan.pair("own", 22900, bench.gpu, fake=bench.fake, env={"OWN_LOG": str(folder)})
    deployment = bench.deployment("own", 22990, *shapes)
    try:
        if not await bench.ready(deployment):
            raise RuntimeError("the servers did not come up")
        client = Client(bench.http, deployment.url)
        await jit(bench, client)
        for key, load in (("s5.own", cost.NEW), ("s5.own.again", cost.AGAIN)):
            found = await _of_load(client, load, lambda: {one.role: parts.counted(folder, one.port) for one in shapes})
            bench.results.put(key, cards=bench.gpu, load=load._asdict(), seconds=_OWN_SECONDS, **found)
    finally:
        deployment.stop()


async def _of_load(client: Client, load: cost.Load, counted: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    said: list[Reply] = []
    async with anyio.create_task_group() as tasks:
        for at in range(load.at_once):
            tasks.start_soon(cost.keep_asking, client, said, load, at)
        await anyio.sleep(_WARM)
        before = counted()
        await anyio.sleep(_OWN_SECONDS)
        after = counted()
        tasks.cancel_scope.cancel()
    errors = [reply.error for reply in said if reply.error]
    found = {role: own.share(before[role], after[role]) for role in after}
    if errors or not all(found.values()):
        raise RuntimeError(f"{len(errors)} requests failed: {errors[0]}" if errors else f"nothing was counted: {found}")
    return found


async def _start(bench: Bench, number: int) -> dict[str, Any] | None:
    """What `cost.slices` found, and CPU time a token on decode.

    Who comes up first alternates, and in every other start who takes the first slice. None if servers do not come up:
    SGLang listens at ports that were free a moment ago. Raises RuntimeError if a request fails.
    """
    folder = bench.machine.out / f"parts-{number}"
    shutil.rmtree(folder, ignore_errors=True)  # of a start that was cut short
    folder.mkdir()
    base, env = 23000 + 100 * number, {"PART_LOG": str(folder)}
    off = plan.pair(f"off-{number}", base, bench.gpu, fake=bench.fake, env=env)
    with_hooks = plan.pair(f"on-{number}", base + 10, bench.gpu, fake=bench.fake, env=env)
    early = [bench.server(shape) for shape in off] if number % 2 else []
    on = bench.deployment(f"on-{number}", base + 90, *with_hooks)
    started = [on, *(early or [bench.server(shape) for shape in off])]
    try:
        if not await bench.ready(*started):
            return None
        arms = {
            "hooks_off": cost.Arm(stock_pair(bench, *off), plan.ports(off)),
            "hooks_on": cost.Arm(Client(bench.http, on.url), plan.ports(with_hooks)),
        }
        await jit(bench, *[arm.client for arm in arms.values()])
        before = {name: parts.counted(folder, arm.ports[1]) for name, arm in arms.items()}
        found = await cost.slices(arms, seconds=_SECONDS, load=cost.NEW, turn=number // 2)
        a_token = {name: parts.a_token(before[name], parts.counted(folder, arm.ports[1])) for name, arm in arms.items()}
    finally:
        for one in started:
            one.stop()
    return {**found, "decode_us_a_token": a_token}
