"""What `scripts/run` shows: the embedded deployment starts, answers three prompts, and says what happened.

`python -m dsv4ctl.controlplane.demo [--once]`. Exit code 0 only if every check held.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import anyio
import click
import msgspec

from dsv4ctl.controlplane.admin.plane import Plane
from dsv4ctl.controlplane.cli.exits import Failure
from dsv4ctl.controlplane.cli.start import configured, preflight
from dsv4ctl.controlplane.config.schema import Config, HiCacheConfig, ReferenceConfig
from dsv4ctl.controlplane.supervisor.run import run
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import Telemetry, open_telemetry

#: Prompt bytes, one token each: a prefix of 12 pages of 256 tokens, and one that needs most of the device pool.
LONG_PREFIX = "A cache line is not a lock. " * 115
CROWDING_OUT = "Nothing here is worth keeping. " * 260
#: Device pages of the demonstration's prefill engine: the long prefix and the crowd do not fit side by side.
DEVICE_PAGES = 36
#: No answer of the demonstration takes longer than this; then it has failed.
ANSWER_SECONDS = 60.0
ENDED = ("closed", "aborted")
_PROGRESS = {Event.ENGINE_STARTED, Event.ENGINE_READY, Event.START_READY}


@dataclass(frozen=True)
class Answer:
    """One request as the client saw it, and its room as the control plane tells it."""

    name: str
    text: str
    room: dict[str, Any]
    first_s: float
    total_s: float

    @property
    def detail(self) -> dict[str, Any]:
        return dict(self.room.get("detail", {}))


@click.command()
@click.option("--once", is_flag=True, help="End after the demonstration instead of serving on.")
def main(once: bool) -> None:
    """Start the embedded prefill and decode engine, send three prompts, print what happened."""
    config = demonstration(configured(None, None))
    preflight(config)
    telemetry = open_telemetry("warning", "auto", config.log.queue)
    try:
        code = anyio.run(_main, config, telemetry, once)
    finally:
        telemetry.close()
    raise SystemExit(code)


def demonstration(config: Config) -> Config:
    """The embedded default with a device pool so small that HiCache has to load."""
    prefill, *rest = config.engines
    small = msgspec.structs.replace(
        prefill, hicache=HiCacheConfig(pages=256), reference=ReferenceConfig(device_pages=DEVICE_PAGES)
    )
    return msgspec.structs.replace(config, engines=[small, *rest])


async def _main(config: Config, telemetry: Telemetry, once: bool) -> int:
    began = time.monotonic()
    works = False

    async def show(plane: Plane) -> None:
        nonlocal works
        try:
            works = await demonstrate(plane)
        except (aiohttp.ClientError, TimeoutError, LookupError) as error:
            print(f"FAILED: {type(error).__name__}: {error}")
        print(f"\n{'all of it worked' if works else 'NOT all of it worked'}, {time.monotonic() - began:.1f} s in all")
        if once:
            await plane.drain([], None)
        else:
            gateway = (await plane.status())["gateway"]
            print(f"serving at {gateway} until Ctrl-C; `dsv4ctl status` looks inside")

    async with anyio.create_task_group() as tasks:

        def ready(plane: Plane) -> None:
            tasks.start_soon(show, plane)

        tasks.start_soon(_progress, telemetry)
        code = await run(config, telemetry=telemetry, ready=ready)
        tasks.cancel_scope.cancel()
    return code if works else 1


async def _progress(telemetry: Telemetry) -> None:
    print("starting one prefill and one decode engine (a real, small model with random weights: its text is gibberish)")
    async with telemetry.subscribe() as events:
        async for record in events:
            if record["event"] in {event.value for event in _PROGRESS}:
                print(f"  {record['event']:<15} {record.get('engine', record.get('gateway', ''))}", flush=True)


async def demonstrate(plane: Plane) -> bool:
    """Sends the prompts and prints the report; whether every check held."""
    base = (await plane.status())["gateway"]
    model = plane.config.gateway.model
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    async with aiohttp.ClientSession(base, timeout=timeout) as session:
        ask = _asker(session, plane, model)
        chat = await ask("chat, streamed", "Say something.")
        cold = await ask("long prefix, cold", LONG_PREFIX + "What is it?")
        await ask("another long one", CROWDING_OUT)
        again = await ask("long prefix, again", LONG_PREFIX + "What is it?")
    checks = {
        "the repeated prompt gave the same text": cold.text == again.text != "",
        "HiCache loaded tokens for it": again.detail.get("host_tokens", 0) > 0,
        "every room ended closed": all(a.room.get("state") == "closed" for a in (chat, cold, again)),
        "every compared digest matched": all(
            a.detail.get("digests_compared", 0) > 0 and not a.detail.get("digest_mismatches")
            for a in (chat, cold, again)
        ),
        **await _at_rest(plane),
    }
    print()
    for what, held in checks.items():
        print(f"  {'ok  ' if held else 'FAIL'} {what}")
    return all(checks.values())


async def _at_rest(plane: Plane) -> dict[str, bool]:
    """Nothing may be left of ended rooms; the engines' last reports may still be on their way."""
    with anyio.move_on_after(5):
        while any(_held(engine) for engine in await plane.engines()):  # noqa: ASYNC110 - they report at their pace
            await anyio.sleep(0.05)
    engines = await plane.engines()
    for engine in engines:
        counters = engine["counters"]
        loaded, compared = counters.get("host_tokens_loaded", 0), counters.get("digests_compared", 0)
        print(
            f"  {engine['name']}: {engine['steps']} steps, {_held(engine)} tickets and loads held, "
            f"{compared} digests compared, {loaded} tokens loaded by HiCache"
        )
    return {"no ticket, load or quarantined page is left": not any(_held(engine) for engine in engines)}


def _held(engine: dict[str, Any]) -> int:
    return sum(
        ledger["tickets"] + ledger["loads"] + sum(ledger["pages_quarantined"].values())
        for ledger in engine["ledger"].values()
    )


def _asker(session: aiohttp.ClientSession, plane: Plane, model: str) -> Callable[[str, str], Awaitable[Answer]]:
    counts = f"{'prompt':>7}{'cached':>7}{'loaded':>7}{'digests':>9}{'first':>9}{'all':>9}"
    print(f"\n{'request':<20}{'room':<26}{'state':<8}{counts}")

    async def ask(name: str, prompt: str) -> Answer:
        began = time.monotonic()
        first, pieces = 0.0, []
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 12, "stream": True}
        async with session.post("/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            key = response.headers["x-dsv4ctl-room"]
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if not data or data == b"[DONE]":
                    continue
                first = first or time.monotonic() - began
                pieces.append(json.loads(data)["choices"][0]["delta"].get("content", ""))
        room = await _ended(plane, int(key.partition(".")[0]))
        answer = Answer(name, "".join(pieces), room, first, time.monotonic() - began)
        detail = answer.detail
        print(
            f"{name:<20}{key:<26}{room.get('state', '?'):<8}"
            f"{detail.get('prompt_tokens', 0):>7}{detail.get('cached_tokens', 0):>7}{detail.get('host_tokens', 0):>7}"
            f"{detail.get('digests_compared', 0):>9}{first:>8.3f}s{answer.total_s:>8.3f}s",
            flush=True,
        )
        return answer

    return ask


async def _ended(plane: Plane, room: int) -> dict[str, Any]:
    """The room once both sides closed it, which is just after the client's last byte."""
    found: dict[str, Any] = {}
    with anyio.move_on_after(5):
        while (found := (await plane.rooms(room))[-1])["state"] not in ENDED:  # noqa: ASYNC110 - no notification
            await anyio.sleep(0.01)
    return found


if __name__ == "__main__":
    try:
        main(standalone_mode=True)
    except Failure as failure:
        sys.exit(f"dsv4ctl: {failure.message}")
