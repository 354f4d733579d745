"""Aborts on the real deployment: one at a time in every state, eighty at once, in every way in which one is asked."""

from __future__ import annotations

import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest

from deployment import (
    DECODE,
    PAGE,
    PATIENCE,
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
from storms import STATES

pytestmark = pytest.mark.asyncio

#: Rooms aborted at once, how often in a row, and seconds for both sides to close all of them.
ROOMS, WAVES, CLOSED_WITHIN = 80, 3, 2.0 * SLOWER
#: Enough tokens that no answer ends while a test looks at its room; in a wave, that none ends before it is aborted.
LONG, WAVE_TOKENS = 4000, 1500
#: Room states in which bytes are on their way, or about to be.
TRANSFER = {"bootstrapping", "loading", "sending", "landed", "verified"}


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    # The decode engine holds a whole wave at once: no room waits for another's pages.
    with deployed(decode="reference = { device_pages = 768 }", faults=True) as running:
        yield running


def questions(first_seed: int) -> list[tuple[list[int], int]]:
    """As many short prompts as were aborted, of one to three pages."""
    return [(prompt(first_seed + at % 16, 40 + 37 * (at % 16)), 3) for at in range(ROOMS)]


def check_answers(asked: list[tuple[list[int], int]], replies: list[Reply]) -> None:
    assert [(reply.status, reply.error) for reply in replies] == [(200, None)] * len(asked)
    for (ids, new), reply in zip(asked, replies, strict=True):
        assert reply.tokens == expected(ids, new)


async def abort_all(client: Client, leave: Callable[[], None]) -> None:
    assert len(await client.abort()) == ROOMS


async def disconnect(client: Client, leave: Callable[[], None]) -> None:
    leave()


async def aborted_wave(
    client: Client, seed: int, end: Callable[[Client, Callable[[], None]], Awaitable[None]]
) -> float:
    """Rooms of three pages each, ended at once while bytes are on their way; seconds until both sides closed all."""
    doomed = [(prompt(seed + at, 2 * PAGE + 100 + at), WAVE_TOKENS) for at in range(ROOMS)]

    async def mid_transfer() -> list[int]:
        rooms = await client.rooms()
        moving = [room for room in rooms if room["state"] in TRANSFER]
        full = len(rooms) == ROOMS and any(room["state"] == "sending" for room in rooms)
        return [room["room"] for room in rooms] if full and len(moving) > ROOMS / 2 else []

    async with anyio.create_task_group() as clients:
        await client.signal(PREFILL, Fault.SLOW)
        clients.start_soon(client.burst, doomed)
        rooms = await client.until("80 rooms are mid-transfer", mid_transfer)
        await client.signal(PREFILL, Fault.SLOW)
        began = time.monotonic()
        await end(client, clients.cancel_scope.cancel)
    await client.until_no_rooms()
    seconds = time.monotonic() - began
    ended = [await client.room(room) for room in rooms]
    assert {room["state"] for room in ended} == {"aborted"}
    for room in ended:
        at = {entry["state"]: entry["at_s"] for entry in room["history"]}
        assert at["aborted"] - at["aborting"] <= CLOSED_WITHIN, room
    return seconds


@pytest.mark.parametrize("end", [abort_all, disconnect])
async def test_eighty_rooms_aborted_at_once_three_times_leave_nothing(
    deployment: Deployment,
    end: Callable[[Client, Callable[[], None]], Awaitable[None]],
    record_property: Callable[[str, object], None],
) -> None:
    """Reports 9 and 21."""
    async with deployment.client() as client:
        seconds = [await aborted_wave(client, 1000 * wave, end) for wave in range(WAVES)]
        record_property("seconds", seconds)
        print("80 aborts closed in", [round(s, 3) for s in seconds], end.__name__)
        assert max(seconds) <= CLOSED_WITHIN
        asked = questions(5)
        check_answers(asked, await client.burst(asked))
        await client.check_no_page_lost()
        assert all(engine["restarts"] == 0 for engine in (await client.engines()).values())


# ---- one room, in every state -------------------------------------------------------------------------


async def in_state(client: Client, number: int, wanted: str) -> bool:
    """Whether the room is seen in `wanted` before it has gone on or ended."""
    order = (*STATES, "closed", "aborting", "quiescing", "aborted")
    while True:
        state = (await client.room(number))["state"]
        if state == wanted or order.index(state) > order.index(wanted):
            return bool(state == wanted)


async def room_of(client: Client, rid: str) -> int:
    async def found() -> int | None:
        return next((room["room"] for room in await client.rooms() if room["request_id"] == rid), None)

    return int(await client.until(f"{rid} has a room", found))


async def aborted_from(client: Client, rid: str, ids: list[int], new: int, wanted: str) -> str:
    """The state in which the abort found the room, once that is over on both sides."""
    stopped = wanted == "allocated"  #: until both sides know the room, and one of them says nothing
    if stopped:
        await client.signal(PREFILL, signal.SIGSTOP)
    replies: list[Reply] = []

    async def ask() -> None:
        replies.append(await client.generate(ids, new, rid))

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            number = await room_of(client, rid)
            by_operator = await in_state(client, number, wanted)
            if by_operator:
                await client.ask("POST", "/abort", room=number)
                if stopped:
                    await client.signal(PREFILL, signal.SIGCONT)
            else:
                await client.http.post(f"{client.gateway}/abort_request", json={"rid": rid})
    finally:
        if stopped:
            await client.signal(PREFILL, signal.SIGCONT)
    history = [entry["state"] for entry in (await client.until_ended(number))["history"]]
    if history[-1] == "closed":
        return "closed"
    assert history[-1] == "aborted"
    assert replies[0].status == (503 if by_operator else 499), replies
    return str(history[history.index("aborting") - 1])


async def test_an_abort_in_every_state_ends_the_room_on_both_sides(deployment: Deployment) -> None:
    """States that last milliseconds last longer here, and are tried for until each was met. Report 10."""
    missing, tries = set(STATES), 0
    async with deployment.client() as client:

        async def ask_on(seed: int) -> None:
            while True:
                await client.generate(prompt(seed, 300), 20)

        for name in (PREFILL, DECODE):
            await client.signal(name, Fault.SLOW)
        # Company: decode is in the middle of a step when a room has been verified.
        async with anyio.create_task_group() as company:
            for seed in range(2):
                company.start_soon(ask_on, seed)
            with anyio.fail_after(2 * PATIENCE):
                while missing:
                    wanted = min(missing, key=STATES.index) if tries % 2 else max(missing, key=STATES.index)
                    tries += 1
                    ids = prompt(100 + tries, 2 * PAGE + 50)
                    missing.discard(await aborted_from(client, f"victim-{tries}-", ids, 50, wanted))
            company.cancel_scope.cancel()
        for name in (PREFILL, DECODE):
            await client.signal(name, Fault.SLOW)
        await client.check_no_page_lost()
        assert all(engine["restarts"] == 0 for engine in (await client.engines()).values())


# ---- one room, in every way ---------------------------------------------------------------------------


async def by_admin(client: Client, number: int, rid: str, leave: Callable[[], None]) -> None:
    assert len(await client.abort(number)) == 1


async def by_abort_request(client: Client, number: int, rid: str, leave: Callable[[], None]) -> None:
    async with client.http.post(f"{client.gateway}/abort_request", json={"rid": rid}) as answer:
        assert len((await answer.json())["aborted"]) == 1


async def by_leaving(client: Client, number: int, rid: str, leave: Callable[[], None]) -> None:
    leave()


Way = Callable[[Client, int, str, Callable[[], None]], Awaitable[None]]


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streaming"])
@pytest.mark.parametrize(("way", "source"), [(by_admin, "admin"), (by_abort_request, "client"), (by_leaving, "client")])
async def test_every_way_to_abort_ends_a_decoding_room(
    deployment: Deployment, way: Way, source: str, stream: bool
) -> None:
    """Report 37."""
    rid = f"{way.__name__}-{stream}-"
    replies: list[Reply] = []
    async with deployment.client() as client:

        async def ask() -> None:
            replies.append(await client.generate(prompt(7, 300), LONG, rid, stream))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            number = await room_of(client, rid)
            assert await in_state(client, number, "decoding")
            began = time.monotonic()
            await way(client, number, rid, tasks.cancel_scope.cancel)
        room = await client.until_ended(number)
        assert time.monotonic() - began <= CLOSED_WITHIN
        assert (room["state"], room["source"]) == ("aborted", source)
        if way is by_leaving:
            assert room["reason"] == "the client left"
        else:
            (reply,) = replies
            assert reply.tokens is None, "an abort is never told as an answer"
            assert reply.error is not None
        await client.check_no_page_lost()


async def test_a_state_that_outlives_its_deadline_ends_the_room() -> None:
    with deployed("[deadlines]\ndecoding = 2.0") as short:
        async with short.client() as client:
            reply = await client.generate(prompt(7, 300), 3 * LONG)
            assert reply.status == 504, reply
            assert reply.room is not None
            room: dict[str, Any] = await client.room(reply.room)
            assert room["source"] == "deadline"
            assert 2.0 <= room["timings"]["decoding"] < 2.0 * SLOWER
            ids = prompt(8, 300)
            assert (await client.generate(ids, 4)).tokens == expected(ids, 4)
            await client.check_no_page_lost()
