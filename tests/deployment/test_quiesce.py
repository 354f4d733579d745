"""A destination page of an aborted room is not reused before its writer said that it is quiet (S3)."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import pytest

from deployment import DECODE, PAGE, PREFILL, Client, Fault, Reply, deployed, expected, prompt

pytestmark = pytest.mark.asyncio

#: Nothing but the writer's ack may end the wait: no deadline of the control plane comes first.
PATIENT = "[deadlines]\nack = 80.0\nwedge = 80.0\n"
WRITERS = (PREFILL, "prefill1")
SECOND_PREFILL = f'[[engines]]\nname = "{WRITERS[1]}"\nrole = "prefill"\n'
#: Decode pages, those that the aborted room holds, and those that the next one wants: both do not fit.
PAGES, HELD, WANTED = 16, 12, 6
#: Looks at the decode engine while the ack is held back.
LOOKS = 25
VIOLATION = "violation: pages reused before the writer was quiet"


class Held(NamedTuple):
    """The room that asks for pages while the writer of an aborted one is stopped; its `replies` are there later."""

    next_ids: list[int]
    replies: list[Reply]


@asynccontextmanager
async def ack_held_back(client: Client) -> AsyncIterator[Held]:
    """A room is aborted while its pages are being written and its writer is stopped; then another wants pages.

    The writer goes on when the block ends.
    """
    replies: list[Reply] = []
    next_ids = prompt(99, (WANTED - 1) * PAGE + 9)
    async with anyio.create_task_group() as clients:
        for name in WRITERS:  # a page takes so long that the writer is met in the middle
            await client.signal(name, Fault.SLOW)
        clients.start_soon(client.generate, prompt(1, (HELD - 1) * PAGE + 9), 8, "held")

        async def sending() -> dict[str, Any] | None:
            return next((room for room in await client.rooms() if room["state"] == "sending"), None)

        room = await client.until("the room's pages are being written", sending)
        writer = next(name for name in room["engines"] if name != DECODE)
        pid = await client.signal(writer, signal.SIGSTOP)
        for name in WRITERS:
            await client.signal(name, Fault.SLOW)
        try:
            assert await client.abort(room["room"]) == [room["key"]]

            async def dropped() -> bool:
                return not any((await client.live(DECODE))["queues"].values())

            await client.until("the decode engine dropped the aborted request", dropped)

            async def ask() -> None:
                replies.append(await client.generate(next_ids, 4, "next"))

            clients.start_soon(ask)

            async def arrived() -> bool:
                queues = (await client.live(DECODE))["queues"]
                return bool(queues["waiting"] or queues["transferring"] or replies)

            await client.until("the next room asks for pages", arrived)
            yield Held(next_ids, replies)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await client.until_ended(room["room"]))["state"] == "aborted"
    await client.until_at_rest()


def deployment_of(unsafe: str = "") -> Any:
    return deployed(PATIENT + unsafe + SECOND_PREFILL, decode=f"reference = {{ device_pages = {PAGES} }}", faults=True)


async def test_pages_wait_for_the_writers_ack() -> None:
    """Report 1: two prefill engines, one of them stopped in the middle of its writes."""
    with deployment_of() as deployment:
        async with deployment.client() as client:
            async with ack_held_back(client) as held:
                seen = [await client.live(DECODE) for _ in range(LOOKS)]
                free = {look["pages"]["free"]["full"] for look in seen}
                assert free == {PAGES - HELD}, "pages that the stopped writer may still write are not free"
                assert {look["queues"]["waiting"] for look in seen} == {1}, "who needs them waits"
                assert not held.replies
            (reply,) = held.replies
            assert reply.tokens == expected(held.next_ids, 4), reply
            assert VIOLATION not in (await client.live(DECODE))["counters"]
            await client.check_no_page_lost()


async def test_without_the_guard_the_same_pages_are_reused_at_once() -> None:
    with deployment_of('[unsafe]\noff = ["quiesce"]\n') as deployment:
        async with deployment.client() as client:
            async with ack_held_back(client) as held:

                async def admitted() -> bool:
                    return bool(held.replies or not (await client.live(DECODE))["queues"]["waiting"])

                await client.until("who needs the pages has them", admitted)
            assert (await client.live(DECODE))["counters"][VIOLATION] >= 1
