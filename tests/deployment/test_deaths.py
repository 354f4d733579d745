"""Processes that die or stop at any moment: nobody hangs, everything is given back, and it serves again."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest

from deployment import (
    DECODE,
    PAGE,
    PREFILL,
    SLOWER,
    Client,
    Deployment,
    Fault,
    Reply,
    deployed,
    expected,
    prompt,
)
from dsv4ctl.engine_adapters.agent import QUARANTINE_SHARE
from storms import BEGUN

pytestmark = pytest.mark.asyncio

#: Of the one writer that never acknowledges.
ACK = 6.0
#: Seconds from the death of an engine to the last client's error: all rooms in flight had to do with it.
TOLD_WITHIN = 5.0 * SLOWER
#: Seconds for the engines to end after the control plane was killed.
ENDED_WITHIN = 5.0 * SLOWER
#: Answers asked for while an engine dies: prompts of up to six pages, answers of up to forty tokens.
LOAD = 24


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with deployed("[deadlines]\nack = 60.0\n", faults=True) as running:
        yield running


def load(seed: int) -> list[tuple[list[int], int]]:
    """Few distinct questions, so that the oracle is soon done; some share a prefix."""
    kinds = [(prompt(at % 3, 2 * PAGE) + prompt(50 + at, at * 150), 8 + 8 * (at % 5)) for at in range(8)]
    numbers = random.Random(seed)
    return [kinds[numbers.randrange(len(kinds))] for _ in range(LOAD)]


# ---- moments ------------------------------------------------------------------------------------------

Moment = Callable[[Client], Awaitable[None]]


async def _in_state(client: Client, *states: str) -> None:
    async def there() -> bool:
        return any(room["state"] in states for room in await client.rooms())

    await client.until(f"a room is {' or '.join(states)}", there)


async def mid_prefill(client: Client) -> None:
    await _in_state(client, "loading")


async def mid_transfer(client: Client) -> None:
    await _in_state(client, *BEGUN)


async def mid_decode(client: Client) -> None:
    await _in_state(client, "decoding")


# ---- the checks ---------------------------------------------------------------------------------------


async def serves_again(client: Client, restarts: dict[str, int]) -> float:
    """Seconds until it does, restarted so often. Answers equal the oracle's, and not a page is missing."""
    began = time.monotonic()
    await client.until_restarted(restarts)
    seconds = time.monotonic() - began
    asked = load(0)[:6]
    for (ids, new), reply in zip(asked, await client.burst(asked), strict=True):
        assert reply.tokens == expected(ids, new), reply
    await client.check_no_page_lost()
    assert (await client.status())["quarantined"] == 0
    return seconds


async def check_all_ended(client: Client, asked: list[tuple[list[int], int]], replies: list[Reply]) -> None:
    """Each client has the oracle's answer or an error, and each room a terminal state."""
    assert len(replies) == len(asked)
    for (ids, new), reply in zip(asked, replies, strict=True):
        if reply.tokens is None:
            assert reply.error is not None
            assert reply.status in (0, 502, 503), reply
        else:
            assert reply.tokens == expected(ids, new)
        if reply.room is not None:
            assert (await client.until_ended(reply.room))["state"] in ("closed", "aborted")


@pytest.mark.parametrize(
    ("engine", "moment"),
    [(PREFILL, mid_prefill), (PREFILL, mid_transfer), (DECODE, mid_transfer), (DECODE, mid_decode)],
)
async def test_an_engine_killed_at_any_moment(deployment: Deployment, engine: str, moment: Moment) -> None:
    numbers = random.Random(f"{engine} {moment.__name__}")
    asked = load(numbers.randrange(1000))
    replies: list[Reply] = []
    async with deployment.client() as client:
        restarts = await client.restarts()
        await client.signal(engine, Fault.SLOW)  # it has not done with everything when it is killed

        async def ask() -> None:
            replies.extend(await client.burst(asked))

        async with anyio.create_task_group() as clients:
            clients.start_soon(ask)
            await moment(client)
            await client.signal(engine, signal.SIGKILL)
            killed = time.monotonic()
        told = time.monotonic() - killed
        assert told < TOLD_WITHIN
        await client.until_no_rooms()
        assert not deployment.events("room.quarantined"), "a dead writer is known to be quiet at once"
        await check_all_ended(client, asked, replies)
        assert any(reply.tokens is None for reply in replies), "the engine died after the last answer"
        back = await serves_again(client, {**restarts, engine: restarts[engine] + 1})
        print(f"\n{engine} {moment.__name__}: told within {told:.3f} s, restarted {back:.1f} s after the last error")


async def test_a_writer_that_stops_amid_aborts_is_fenced_and_its_pages_come_back() -> None:
    """No ack: the pages are quarantined, the writer is killed, and only then they are free."""
    with deployed(f"[deadlines]\nack = {ACK}\nwedge = 60.0\n", faults=True) as deployment:
        async with deployment.client() as client:
            await client.signal(PREFILL, Fault.SLOW)
            async with anyio.create_task_group() as clients:
                asked = [(prompt(200 + at, 2 * PAGE + 50), 50) for at in range(8)]
                clients.start_soon(client.burst, asked)
                await _in_state(client, "sending")
                stopped = await client.signal(PREFILL, signal.SIGSTOP)
                began = time.monotonic()
                assert await client.abort()
            assert time.monotonic() - began < TOLD_WITHIN, "clients do not wait for the writer"
            await client.until_no_rooms()
            assert time.monotonic() - began >= QUARANTINE_SHARE * ACK, "a time-out frees nothing"
            assert stopped not in deployment.pids(), "the writer is gone before its readers' pages are free"
            assert deployment.events("room.quarantined")
            await serves_again(client, {PREFILL: 1, DECODE: 0})


async def test_engines_end_with_a_killed_control_plane() -> None:
    """A stopped one too."""
    with deployed() as deployment:
        async with deployment.client() as client:
            engines: dict[str, Any] = await client.engines()
            await client.signal(PREFILL, signal.SIGSTOP)
        assert len(deployment.pids()) >= 1 + len(engines)
        deployment.process.kill()
        began = time.monotonic()
        deployment.process.wait(ENDED_WITHIN)
        with anyio.fail_after(ENDED_WITHIN):
            while deployment.pids():  # noqa: ASYNC110 - only /proc knows
                await anyio.sleep(0.01)
        print(f"\nengines ended {time.monotonic() - began:.3f} s after their control plane")
