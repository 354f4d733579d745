"""More requests than the decode pool has room for: rooms grow, the youngest give way, and no client can tell."""

from __future__ import annotations

import anyio
import pytest

from deployment import DECODE, PAGE, PREFILL, Client, Reply, deployed, expected, prompt

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


async def test_two_ranks_retract_a_room_whose_writers_stand_and_race_with_nobody() -> None:
    """The younger of two rooms waits for a paused prefill engine, the older one for its pages: both ranks take them.

    Asked again if the older one grew before the younger one was there.
    """
    older, younger = (prompt(1, PAGE - 1), PAGE + 4), (prompt(2, 2 * PAGE - 1), 3)
    two = "ranks = 2\nreference = { device_pages = 5, state_slots = 5 }"  # the older one's two, the younger one's three
    with deployed(prefill="ranks = 2", decode=two) as deployment:
        async with deployment.client() as client:
            while not deployment.events("room.retracted"):
                answers: dict[str, Reply] = {}

                async def ask(which: str, ids: list[int], new: int, answers: dict[str, Reply] = answers) -> None:
                    answers[which] = await client.generate(ids, new)

                async def decodes(answers: dict[str, Reply] = answers) -> bool:
                    return bool(answers) or any(room["state"] == "decoding" for room in await client.rooms())

                async def has_ended(answers: dict[str, Reply] = answers) -> bool:
                    return "older" in answers

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(ask, "older", *older)
                    await client.until("the older room decodes", decodes)
                    await client.tell(PREFILL, "pause_generation", mode="in_place")
                    tasks.start_soon(ask, "younger", *younger)
                    await client.until("the older room has ended", has_ended)
                    await client.tell(PREFILL, "continue_generation")
                assert [answers[which].tokens for which in ("older", "younger")] == [
                    expected(*older),
                    expected(*younger),
                ], answers

            async def counted() -> bool:
                retracted = len(deployment.events("room.retracted"))
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
