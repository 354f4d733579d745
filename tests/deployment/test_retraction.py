"""More requests than the decode pool has room for: rooms grow, the youngest give way, and no client can tell."""

from __future__ import annotations

import anyio
import pytest

from deployment import DECODE, PAGE, Client, Reply, deployed, expected, prompt

pytestmark = pytest.mark.asyncio

#: Room for eight short prompts, each with a page to grow into.
POOL = 16
#: Four long ones fill it with four pages each, and each needs a fifth. They share prompts, so that the oracle is quick.
LONG, SHORT = 4, 36
DECODE_CONFIG = f"reference = {{ device_pages = {POOL}, state_slots = {POOL} }}"


def asked() -> list[tuple[list[int], int]]:
    long = [(prompt(at % 2, 3 * PAGE - 1 - at % 2), PAGE + 4) for at in range(LONG)]
    return long + [(prompt(100 + at % 12, 90 + 5 * (at % 12)), 3) for at in range(SHORT)]


async def ask_all(client: Client) -> None:
    """The long ones first, until they hold the pool; every other one as a stream. Each gets the oracle's tokens."""
    replies: dict[int, Reply] = {}

    async def one(at: int, ids: list[int], new: int) -> None:
        replies[at] = await client.generate(ids, new, stream=at % 2 == 0)

    async def full() -> bool:
        return bool((await client.live(DECODE))["pages"]["free"]["full"] == 0 or len(replies))

    async with anyio.create_task_group() as tasks:
        for at, (ids, new) in enumerate(asked()):
            if at == LONG:
                await client.until("the pool is full", full)
            tasks.start_soon(one, at, ids, new)
    for at, (ids, new) in enumerate(asked()):
        assert replies[at].tokens == expected(ids, new), (at, replies[at])


async def test_two_ranks_retract_the_same_room_and_race_with_nobody() -> None:
    """Two long rooms fill the pool, and one gives way: on both ranks, and its next generation gets its pages."""
    two = "ranks = 2\nreference = { device_pages = 8, state_slots = 8 }"
    with deployed("[deadlines]\nallocated = 600.0", prefill="ranks = 2", decode=two) as deployment:
        async with deployment.client() as client:
            while not deployment.events("room.retracted"):
                replies = await client.burst(asked()[:2])
                assert [reply.tokens for reply in replies] == [expected(ids, new) for ids, new in asked()[:2]], replies
            retracted = len(deployment.events("room.retracted"))

            async def counted() -> bool:
                return bool((await client.engines())[DECODE]["counters"]["retractions"] == 2 * retracted)

            await client.until("each rank has counted each retraction", counted)
            assert deployment.events("gateway.leg_failed", "room.aborted", "room.quarantined") == []
            found = await client.traced()
            assert (found.races, found.gaps) == (0, 0)
            assert found.events > 1000
            await client.check_no_page_lost()


async def test_forty_requests_in_a_pool_for_eight() -> None:
    with deployed("[deadlines]\nallocated = 600.0", decode=DECODE_CONFIG) as deployment:
        async with deployment.client() as client:
            while not deployment.events("room.retracted"):  # rooms that never met in the pool do not compete for it
                await ask_all(client)
            assert (await client.live(DECODE))["counters"]["retractions"] > 0
            assert deployment.events("gateway.leg_failed", "room.aborted", "room.quarantined") == []
            # Alone it would not fit either: refused at once, with the figures.
            refused = await client.generate(prompt(1, PAGE), POOL * PAGE)
            assert refused.status == 400
            assert f"need {POOL + 1} pages, this engine has {POOL}" in str(refused.error)
            await client.check_no_page_lost()
