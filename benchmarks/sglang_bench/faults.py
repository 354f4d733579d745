"""Faults from outside: frames that make no sense to the bootstrap port, engines killed, a rank stopped."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import anyio

from sglang_bench.ask import Client, Reply, many, prompt
from sglang_bench.compare import distance
from sglang_bench.machine import LOOK, Deployment
from sglang_bench.results import Results

#: What is sent to the port on which a prefill rank hears of rooms.
MALFORMED: tuple[tuple[bytes, ...], ...] = (
    (b"x",),
    (b"",),
    (b"ABORT",),
    (b"ABORT", b"not a number", b"", b""),
    (b"NixlMsgGuard",),
    (b"NixlMsgGuard", b"not a number", b"", b"", b"", b"", b"", b"", b""),
    (b"NixlMsgGuard", b"7", b"1", b"\xff\xfe", b"agent", b"", b"", b"", b"", b""),
    (b"\x00" * 100_000, b"y"),
)


async def malformed(
    http: aiohttp.ClientSession, asked: Client, oracle: Client, bootstrap_port: int, results: Results, key: str
) -> None:
    """Every frame of `MALFORMED`, and then requests: cold ones, since a cached prefix gives other bits."""
    questions = [prompt(f"after frames {at}", 900) for at in range(2)]
    right = [await oracle.ask(ids, 16) for ids in questions]
    query = "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
    async with http.get(f"http://127.0.0.1:{bootstrap_port}/route?{query}") as answer:
        where = json.loads(await answer.read())
    await anyio.to_thread.run_sync(_send, where["rank_ip"], int(where["rank_port"]))
    await anyio.sleep(1.0)
    replies = [await asked.ask(ids, 16, deadline=12.0) for ids in questions]
    results.put(
        key,
        frames=len(MALFORMED),
        errors=[reply.error for reply in replies if reply.error],
        right=sum(distance(reply, one).equal for reply, one in zip(replies, right, strict=True)),
        of=len(replies),
    )


def _send(host: str, port: int) -> None:
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(f"tcp://{host}:{port}")
    for frame in MALFORMED:
        socket.send_multipart(list(frame))
    socket.close(linger=2000)
    context.term()


async def killed(
    http: aiohttp.ClientSession, deployment: Deployment, role: str, oracle: Client, results: Results, key: str,
    *, number: int = signal.SIGKILL, wait: float = 150.0,
) -> None:  # fmt: skip
    """A scheduler of the engine with this role gets a signal in mid-work; what happens to whom, and when."""
    asked = Client(http, deployment.url)
    ids = prompt(f"after {key}", 900)
    right = await oracle.ask(ids, 16)
    shape = next(shape for shape in deployment.shapes if shape.role == role)
    at: dict[str, float] = {}
    replies: list[Reply] = []

    async def load() -> None:
        replies.extend(await many(asked, [prompt(f"{key} {one}", 1200) for one in range(16)], 400, deadline=wait))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load)
        await anyio.sleep(1.5)
        before = len(deployment.events("engine.fenced"))
        at["signal"] = time.time()
        victim = schedulers(deployment, shape.name)[-1]
        os.kill(victim, number)
    answered = time.time() - at["signal"]
    results.put(
        key,
        role=role,
        signal=signal.Signals(number).name,
        signal_at=at["signal"],
        clients_answered_after_seconds=round(answered, 2),
        errors=sorted({reply.error[:150] for reply in replies if reply.error})[:4],
        hung=sum("TimeoutError" in (reply.error or "") for reply in replies),
        unharmed=sum(reply.error is None for reply in replies),
        victim_is_there=_is_there(victim),
    )
    ends = time.monotonic() + wait
    # Until then it would still be asked.
    while len(deployment.events("engine.fenced")) <= before and time.monotonic() < ends:  # noqa: ASYNC110
        await anyio.sleep(LOOK)
    came_back = await deployment.ready(http, ends)
    reply = await asked.ask(ids, 16, deadline=60.0) if came_back else Reply(error="it did not come back")
    fenced = deployment.events("engine.fenced")[before:]
    results.put(
        key,
        fenced=[{"rank": one.get("rank"), "ts": one.get("ts")} for one in fenced],
        verdict=[one.get("cause") for one in deployment.events("engine.wedged")][-1:],
        serves_again_after_seconds=round(time.time() - at["signal"], 1) if came_back else None,
        right_after=distance(reply, right).equal,
        error_after=reply.error,
    )


async def one_verdict(
    asked: Client, oracle: Client, folder: Path, results: Results, key: str, *, faults: Sequence[str], rank: int,
    deadline: float,
) -> None:  # fmt: skip
    """For each fault: rank `rank` alone sees it in the next room that arrives (`ranks.Notes`); what clients get."""
    for name in faults:
        questions = [prompt(f"{key} {name} {at}", 900) for at in range(4)]
        right = [await oracle.ask(ids, 16) for ids in questions]
        order, part = folder / f"fault.{rank}", folder / "part"
        part.write_text(name)
        part.replace(order)
        replies = [await asked.ask(ids, 16, deadline=deadline) for ids in questions]
        fired = not order.exists()
        order.unlink(missing_ok=True)
        results.put(
            key,
            **{
                name: {
                    "seen_by_rank": rank if fired else None,
                    "right": sum(distance(reply, one).equal for reply, one in zip(replies, right, strict=True)),
                    "of": len(replies),
                    "errors": [reply.error for reply in replies if reply.error],
                    "hung": sum("TimeoutError" in (reply.error or "") for reply in replies),
                    "seconds": [round(reply.seconds, 2) for reply in replies],
                }
            },
        )


def schedulers(deployment: Deployment, engine: str) -> list[int]:
    """Processes of the engine's ranks, as their Hellos said, by rank."""
    last: dict[int, int] = {}
    for record in deployment.events("link.connected"):
        if record["engine"] == engine:
            last[record["rank"]] = record["pid"]
    return [last[rank] for rank in sorted(last)]


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
