"""Drains of the real deployment: what runs finishes, nothing new begins, what is left at the deadline is named."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import pytest

from deployment import DECODE, PATIENCE, Client, Fault, Reply, deployed, expected, prompt

pytestmark = pytest.mark.asyncio

#: A budget that no busy machine can use up, and the tokens of the stream that it lets finish.
BUDGET, STREAM = 80.0, 32
IDS = prompt(3, 300)


async def exit_code(client: Client) -> int:
    """Of `start`, which is to end by itself."""
    process = client.deployment.process
    with anyio.fail_after(PATIENCE):
        while process.poll() is None:  # noqa: ASYNC110 - asked as a service manager would
            await anyio.sleep(0.02)
    code: int = process.returncode
    return code


async def test_one_engine_drains_and_resumes_and_sigterm_lets_a_stream_finish() -> None:
    """Report 39."""
    with deployed(f"[deadlines]\ndrain = {BUDGET}\nwedge = {BUDGET}\n", faults=True) as deployment:
        async with deployment.client() as client:
            drained = await client.drain([DECODE], None)
            assert drained == {"drained": [DECODE], "left": []}
            assert (await client.engines())[DECODE]["state"] == "drained"
            assert (await client.generate(IDS, 4)).status == 503
            await client.ask("POST", "/resume", engines=[DECODE])
            await client.until_ready()
            assert (await client.generate(IDS, 4)).tokens == expected(IDS, 4)

            await client.signal(DECODE, Fault.SLOW)
            replies: list[Reply] = []

            async def stream() -> None:
                replies.append(await client.generate(IDS, STREAM, stream=True))

            async with anyio.create_task_group() as clients:
                clients.start_soon(stream)

                async def decoding() -> bool:
                    return any(room["state"] == "decoding" for room in await client.rooms())

                await client.until("the stream has begun", decoding)
                pid = await client.signal(DECODE, signal.SIGSTOP)  # it lasts as long as is looked at the drain
                os.kill(pid, Fault.SLOW)
                deployment.process.send_signal(signal.SIGTERM)

                async def draining() -> bool:
                    return bool((await client.status())["state"] == "draining")

                await client.until("the drain has begun", draining)
                refused = await client.generate(IDS, 4)
                assert refused.status == 503, refused
                assert not replies, "the stream was still running"
                os.kill(pid, signal.SIGCONT)
            (reply,) = replies
            assert reply.error is None
            assert reply.tokens == expected(IDS, STREAM)
            assert await exit_code(client) == 0
            assert deployment.pids() == []


async def test_what_is_left_at_the_deadline_is_aborted_and_named() -> None:
    """Report 39."""
    with deployed() as deployment:
        async with deployment.client() as client:
            replies: list[Reply] = []
            answers: list[dict[str, Any]] = []

            async def stream() -> None:
                replies.append(await client.generate(IDS, 12_000, rid="endless", stream=True))

            async with anyio.create_task_group() as clients:
                clients.start_soon(stream)

                async def decoding() -> list[str]:
                    return [room["key"] for room in await client.rooms() if room["state"] == "decoding"]

                (key,) = await client.until("the stream has begun", decoding)
                answers.append(await client.drain([], 1.0))
            assert answers[0]["left"] == [key]
            (reply,) = replies
            assert reply.tokens is None
            assert reply.error is not None
            assert "drain" in reply.error
            assert await exit_code(client) == 0
            assert deployment.pids() == []
            assert deployment.events("drain.leftovers")[0]["rooms"] == [key]
