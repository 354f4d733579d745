"""Abort waves: many requests at once, many of them dropped on the way; how soon everything is back, and right."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import aiohttp
import anyio

from sglang_bench.ask import Client, Reply, prompt
from sglang_bench.compare import distance
from sglang_bench.machine import Deployment
from sglang_bench.results import Results, spread

REQUESTS = 80
NEW = 60
CHECKED = (700, 1500)  #: lengths of the two requests after each wave
_POLL = 0.02
Idle = Callable[[], Awaitable[None]]


async def waves(
    asked: Client, oracle: Client, idle: Idle, results: Results, key: str, *, count: int, dropped: float = 0.5
) -> None:
    """`count` waves of `REQUESTS`, of which the share `dropped` is left by its clients at random moments.

    Waves that an earlier call had are not had again.
    """
    right = {length: await oracle.ask(prompt(f"checked {length}", length), 24) for length in CHECKED}
    rows: list[dict[str, Any]] = list(results.found(key).get("waves", ()))
    for wave in range(len(rows), count):
        rows.append(await _wave(asked, idle, right, wave, dropped))
        results.put(
            key,
            waves=rows,
            hung=sum(row["hung"] for row in rows),
            wrong_after=sum(row["wrong_after"] for row in rows),
            pages_back_seconds=spread(row["back"] for row in rows if row["back"] is not None),
            never_back=sum(row["back"] is None for row in rows),
        )
        if not rows[-1]["answered"] and rows[-1]["back"] is None:
            return  # nothing is served any more


async def _wave(asked: Client, idle: Idle, right: dict[int, Reply], wave: int, dropped: float) -> dict[str, Any]:
    chance = random.Random(wave)
    plan = [
        (
            prompt(f"wave {wave} {at}", chance.choice((300, 900, 1500))),
            chance.random() < dropped,
            chance.uniform(0, 2.5),
        )
        for at in range(REQUESTS)
    ]
    replies: list[Reply] = []
    left = 0

    async def one(ids: list[int], leaves: bool, after: float) -> None:
        nonlocal left
        if not leaves:
            replies.append(await asked.ask(ids, NEW, deadline=60.0))
            return
        with anyio.move_on_after(after):
            await asked.ask(ids, 4 * NEW)
        left += 1

    began = time.monotonic()
    async with anyio.create_task_group() as tasks:
        for ids, leaves, after in plan:
            tasks.start_soon(one, ids, leaves, after)
    over = time.monotonic()
    back: float | None = None
    with anyio.move_on_after(30.0):
        await idle()
        back = round(time.monotonic() - over, 3)
    checked = {length: await asked.ask(prompt(f"checked {length}", length), 24, deadline=40.0) for length in right}
    return {
        "seconds": round(over - began, 2),
        "left": left,
        "answered": sum(reply.error is None for reply in replies),
        "hung": sum("TimeoutError" in (reply.error or "") for reply in [*replies, *checked.values()]),
        "errors": sorted({reply.error[:120] for reply in replies if reply.error})[:4],
        "back": back,
        "wrong_after": sum(not distance(checked[length], right[length]).equal for length in right),
        "after": {
            length: {**distance(checked[length], right[length])._asdict(), "error": checked[length].error}
            for length in right
        },
    }


def idle_stock(http: aiohttp.ClientSession, urls: list[str]) -> Idle:
    """Nothing runs, waits or is held in any of the servers: a flush, which is refused until then, is accepted."""

    async def idle() -> None:
        for url in urls:
            while not await _flushed(http, url):  # noqa: ASYNC110 - another process
                await anyio.sleep(_POLL)

    return idle


def idle_deployed(http: aiohttp.ClientSession, deployment: Deployment) -> Idle:
    """The same; and no rank has a room in any queue, or holds pages of an aborted one."""

    async def idle() -> None:
        while not await _empty(http, deployment.url):  # noqa: ASYNC110 - another process
            await anyio.sleep(_POLL)
        await idle_stock(http, [shape.url for shape in deployment.shapes])()

    return idle


async def _flushed(http: aiohttp.ClientSession, url: str) -> bool:
    with suppress(aiohttp.ClientError, TimeoutError, OSError):
        async with http.post(url + "/flush_cache", timeout=aiohttp.ClientTimeout(total=10)) as answer:
            return answer.status == 200
    return False


async def server_info(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """What the gateway says of engines and rooms. Raises aiohttp.ClientError, TimeoutError, ValueError."""
    async with http.get(url + "/server_info", timeout=aiohttp.ClientTimeout(total=10)) as answer:
        info: dict[str, Any] = json.loads(await answer.read())
        return info


async def _empty(http: aiohttp.ClientSession, url: str) -> bool:
    with suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
        info = await server_info(http, url)
        engines = info["engines"]
        live = sum(number for state, number in info["rooms"].items() if state not in ("closed", "aborted"))
        return not live and not any(
            any(engine["queues"].values()) or engine["counters"].get("held_pages") for engine in engines
        )
    return False
