"""Engines that stand still in every way: the watchdog names what holds them up, and all goes on without them."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import pytest

from deployment import DECODE, PREFILL, Client, Deployment, Fault, Reply, deployed, expected, prompt

pytestmark = pytest.mark.asyncio

#: Seconds without progress; with the default of 8 the verdicts come as much later.
WEDGE = 4.0
CONFIG = f"[deadlines]\nwedge = {WEDGE}\n"
#: Tokens that no answer reaches before its engine is found wedged.
LONG = 8000
ASKED = 4
SECOND_DECODE = '[[engines]]\nname = "decode1"\nrole = "decode"\nhicache = { enabled = false }\n'


@pytest.fixture(scope="class")
def two_ranks() -> Iterator[Deployment]:
    with deployed(CONFIG, prefill="ranks = 2", decode="ranks = 2", faults=True) as running:
        yield running


@pytest.fixture(scope="class")
def two_decodes() -> Iterator[Deployment]:
    with deployed(CONFIG + SECOND_DECODE, faults=True) as running:
        yield running


async def decoding(client: Client, engine: str) -> None:
    async def there() -> bool:
        return any(room["state"] == "decoding" and engine in room["engines"] for room in await client.rooms())

    await client.until(f"a room of {engine} is decoding", there)


async def verdict_on(client: Client, engine: str) -> dict[str, Any]:
    """The event, once there is one."""

    async def found() -> dict[str, Any] | None:
        events = client.deployment.events("engine.wedged")
        return next((event for event in events if event["engine"] == engine), None)

    return dict(await client.until(f"{engine} is found wedged", found))


@asynccontextmanager
async def asked(client: Client, engine: str, first_seed: int) -> AsyncIterator[list[Reply]]:
    """Clients of `engine` who wait for answers that only an error ends; all have got one when the block is left."""
    await client.until_ready()  # after what an earlier test did
    replies: list[Reply] = []

    async def ask() -> None:
        replies.extend(await client.burst([(prompt(first_seed + at, 60 + 300 * at), LONG) for at in range(ASKED)]))

    async with anyio.create_task_group() as clients:
        clients.start_soon(ask)
        await decoding(client, engine)
        yield replies
    assert len(replies) == ASKED


async def healthy(client: Client, url: str) -> bool:
    """Whether the engine itself says that it is."""
    try:
        async with client.http.get(f"{url}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def check_told(client: Client, replies: list[Reply], cause: str) -> None:
    """Each client has the cause as its error, and each room has ended on both sides."""
    await client.until_no_rooms()
    for reply in replies:
        assert reply.status == 502, reply
        assert cause in str(reply.error)
        assert reply.room is not None
        assert (await client.room(reply.room))["state"] == "aborted"


async def check_serves(client: Client, engine: str) -> None:
    """It was started once more, answers are the oracle's, and no page is missing."""
    await client.until_ready()
    assert (await client.engines())[engine]["restarts"] == 1
    ids = prompt(9, 700)
    assert (await client.generate(ids, 4)).tokens == expected(ids, 4)
    await client.check_no_page_lost()


class TestTwoRanks:
    async def test_a_paused_engine_is_no_wedged_one(self, two_ranks: Deployment) -> None:
        """It holds rooms and does nothing for longer than a wedge; they can be aborted, and it drained, as it is."""
        async with two_ranks.client() as client:
            async with asked(client, DECODE, 500) as replies:
                restarts, alarms = await client.restarts(), two_ranks.events("engine.wedged", "room.quarantined")
                await client.tell(DECODE, "pause_generation", mode="in_place")

                async def verdict() -> str:
                    return str((await client.engines())[DECODE]["verdict"])

                async def paused() -> bool:
                    return await verdict() == "paused"

                await client.until("the watchdog knows that it is paused", paused)
                steps, since = (await client.live(DECODE))["steps"], time.monotonic()
                while time.monotonic() - since < 1.25 * WEDGE:
                    assert await verdict() == "paused"
                    await anyio.sleep(0.1)
                live = await client.live(DECODE)
                assert (live["steps"], live["queues"]["decoding"] > 0) == (steps, True)

                async def all_are_open() -> bool:
                    return len(await client.rooms()) == ASKED

                await client.until("every client has its room", all_are_open)
                assert len(await client.abort()) == ASKED
            await client.until_at_rest()
            assert [reply.tokens for reply in replies] == [None] * ASKED
            assert await verdict() == "paused"
            assert await client.drain([DECODE], None) == {"drained": [DECODE], "left": []}
            assert two_ranks.events("engine.wedged", "room.quarantined") == alarms
            await client.ask("POST", "/resume", engines=[DECODE])
            await client.until_ready()
            assert await client.restarts() == restarts
            ids = prompt(9, 700)
            assert (await client.generate(ids, 4)).tokens == expected(ids, 4)

    async def test_one_of_two_ranks_that_is_stopped_is_named(self, two_ranks: Deployment) -> None:
        async with two_ranks.client() as client:
            async with asked(client, DECODE, 100) as replies:
                await client.signal(DECODE, signal.SIGSTOP, rank=1)
                began = time.monotonic()
                event = await verdict_on(client, DECODE)
                print(f"\nrank 1 stopped: {time.monotonic() - began:.2f} s, {event['cause']}")
            assert event["cause"].startswith("rank 1: no progress report for ")
            assert len(event["rooms"]) == ASKED
            await check_told(client, replies, event["cause"])
            await check_serves(client, DECODE)

    async def test_the_rank_that_does_not_enter_its_round_is_named(self, two_ranks: Deployment) -> None:
        """A collective deadlock: both ranks live, report and answer, and one waits for the other for ever."""
        async with two_ranks.client() as client:
            async with asked(client, PREFILL, 200) as replies:
                await client.signal(PREFILL, Fault.NO_ROUND, rank=1)
                began = time.monotonic()
                event = await verdict_on(client, PREFILL)
                print(f"\nrank 1 enters no round: {time.monotonic() - began:.2f} s, {event['cause']}")
            assert event["cause"].startswith("rank 1: round ")
            assert "in which rank 0 waits" in event["cause"]
            await check_told(client, replies, event["cause"])


class TestTwoDecodeEngines:
    async def test_a_decode_engine_without_a_step_loses_its_rooms_and_the_traffic(
        self, two_decodes: Deployment
    ) -> None:
        """It answers /health all the time."""
        async with two_decodes.client() as client:
            async with asked(client, DECODE, 300) as replies:
                url = (await client.engines())[DECODE]["url"]
                await client.signal(DECODE, Fault.NO_STEP)
                began = time.monotonic()
                assert await healthy(client, url) or two_decodes.events("engine.wedged")
                event = await verdict_on(client, DECODE)
                print(f"\nno step: {time.monotonic() - began:.2f} s, {event['cause']}")
                assert "decoding" in event["cause"]
                # Nobody waits for the restart: the other engine serves.
                others = [prompt(310 + at, 200) for at in range(2)]
                for ids in others:
                    reply = await client.generate(ids, 4)
                    assert reply.tokens == expected(ids, 4), reply
                    assert reply.room is not None
                    assert "decode1" in (await client.room(reply.room))["engines"]
                await client.abort()
            mine = [reply for reply in replies if str(event["cause"]) in str(reply.error)]
            assert len(mine) == len(event["rooms"]) > 0
            await client.until_ready()

    async def test_a_transfer_thread_that_dies_is_a_verdict_at_once(self, two_decodes: Deployment) -> None:
        async with two_decodes.client() as client:
            async with asked(client, PREFILL, 400) as replies:
                await client.signal(PREFILL, Fault.TRANSFER_DIES)
                began = time.monotonic()
                # The thread meets its end at the next thing it is asked to do.
                await client.generate(prompt(450, 300), 4)
                event = await verdict_on(client, PREFILL)
                print(f"\na dead transfer thread: {time.monotonic() - began:.2f} s, {event['cause']}")
                assert event["cause"].startswith("rank 0: loop transfer died: ")
                assert "a fault of the test" in event["cause"]
            assert all(reply.tokens is None for reply in replies)
            await client.until_no_rooms()
            await check_serves(client, PREFILL)
            restarted = two_decodes.events("engine.restarting")[-1]["cause"]
            assert restarted.startswith(event["cause"]), "its end is a consequence, not the cause"
