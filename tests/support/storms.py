"""Waves of aborts on a real deployment: many rooms ended at once, in every way, while bytes are on their way."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from deployment import DECODE, PAGE, PREFILL, Client, Fault, Reply, expected, prompt

#: Tokens of an answer that is to be aborted: none ends before.
DOOMED_TOKENS = 1500
#: Rooms of a wave that are to be answered, where it spares some, and questions after it.
SPARED, AFTERWARDS = 8, 8
STATES = ("allocated", "bootstrapping", "loading", "sending", "landed", "verified", "decoding")
BEGUN = STATES[STATES.index("sending") :]
LANDED = STATES[STATES.index("landed") :]


class Wave(NamedTuple):
    """What one wave was like."""

    kind: str
    aborted: int
    found_in: dict[str, int]  #: rooms by the state in which the abort found them
    back_s: float  #: from the last abort until no rank held anything any more (`half`: no room of the wave)


class Storm:
    """The rooms of one wave, and the clients who wait for them. Request ids begin with the wave's."""

    def __init__(self, client: Client, clients: TaskGroup, numbers: random.Random, rooms: int) -> None:
        self.client = client
        self.clients = clients
        self.numbers = numbers
        self.name = f"wave{numbers.randrange(10**9)}-"
        self.doomed = {f"{self.name}{at}-": prompt(numbers.randrange(10**6), 2 * PAGE + 9 + at) for at in range(rooms)}
        self.replies: dict[str, Reply] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}
        for rid, ids in list(self.doomed.items()):
            self.ask(rid, ids)

    def ask(self, rid: str, ids: list[int]) -> None:
        """One room of the wave."""
        self.doomed[rid] = ids
        self._scopes[rid] = anyio.CancelScope()
        self.clients.start_soon(self._ask, rid)

    async def _ask(self, rid: str) -> None:
        with self._scopes[rid]:
            self.replies[rid] = await self.client.generate(self.doomed[rid], DOOMED_TOKENS, rid)

    def leave(self, rid: str) -> None:
        self._scopes[rid].cancel()

    async def rooms(self) -> dict[str, dict[str, object]]:
        """Those in flight, by request id."""
        return {room["request_id"]: room for room in await self.client.rooms() if room["request_id"] in self.doomed}

    async def under_way(self) -> dict[str, dict[str, object]]:
        """All rooms, once each is known and the bytes of some are on their way, or here."""

        async def holds() -> dict[str, dict[str, object]] | None:
            rooms = await self.rooms()
            begun = any(room["state"] in BEGUN for room in rooms.values())
            return rooms if begun and len(rooms) == len(self.doomed) else None

        return dict(await self.client.until("the wave is under way", holds))

    async def abort(self, rid: str) -> None:
        """As a client asks for it."""
        await self.client.http.post(f"{self.client.gateway}/abort_request", json={"rid": rid})


# ---- how a wave ends --------------------------------------------------------------------------------------


async def everyone(storm: Storm) -> None:
    await storm.under_way()
    await storm.client.abort()


async def one_after_the_other(storm: Storm) -> None:
    rooms = list((await storm.under_way()).values())
    storm.numbers.shuffle(rooms)
    for room in rooms:
        await storm.client.ask("POST", "/abort", room=room["room"])


async def half(storm: Storm) -> None:
    """Of the clients some wait for their answers, and get them."""
    spared = [(prompt(storm.numbers.randrange(4), PAGE + 50), 3) for _ in range(SPARED)]

    async def waits() -> None:
        for (ids, new), reply in zip(spared, await storm.client.burst(spared), strict=True):
            assert reply.tokens == expected(ids, new), reply

    storm.clients.start_soon(waits)
    await storm.under_way()
    async with anyio.create_task_group() as asking:
        for rid in storm.doomed:
            asking.start_soon(storm.abort, rid)


async def clients_leave(storm: Storm) -> None:
    await storm.under_way()
    for rid in storm.doomed:
        storm.leave(rid)


async def clients_leave_in_every_state(storm: Storm) -> None:
    """Each once its room is seen in the state that is drawn for it, or beyond."""
    wanted = {rid: STATES[at % len(STATES)] for at, rid in enumerate(storm.doomed)}

    async def none_waits() -> bool:
        for rid, room in (await storm.rooms()).items():
            state = str(room["state"])
            if rid in wanted and (state not in STATES or STATES.index(state) >= STATES.index(wanted[rid])):
                del wanted[rid]
                storm.leave(rid)
        return not wanted

    await storm.client.until("every client has left", none_waits)


async def before_the_room_is_known(storm: Storm) -> None:
    """The moments are random: most clients leave before their rooms are known on both sides."""
    for rid in storm.doomed:
        storm.leave(rid)
        await anyio.sleep(storm.numbers.uniform(0, 0.01))


async def from_all_sides(storm: Storm) -> None:
    """Operator, gateway, both engines and the clients themselves, all at once."""
    await storm.under_way()
    engines = [str(engine["url"]) for engine in (await storm.client.engines()).values()]

    async def ask(url: str) -> None:
        await storm.client.http.post(f"{url}/abort_request", json={"rid": storm.name})

    async with anyio.create_task_group() as asking:
        for url in (*engines, storm.client.gateway):
            asking.start_soon(ask, url)
        asking.start_soon(storm.client.abort)
        for at, rid in enumerate(storm.doomed):
            if at % 2:
                storm.leave(rid)


async def a_peer_comes_back(storm: Storm) -> None:
    """One engine is killed; its rooms end with it, and what it says next it says as another incarnation."""
    await storm.under_way()
    await storm.client.signal(storm.numbers.choice((PREFILL, DECODE)), signal.SIGKILL)
    await storm.client.abort()


async def writes_end_unknown(storm: Storm) -> None:
    """Poisoned rooms: nobody frees a page before the writer is fenced."""

    def acked_poisoned() -> int:
        return sum(event["outcome"] == "poisoned" for event in storm.client.deployment.events("abort.acked"))

    earlier = acked_poisoned()
    await storm.under_way()
    await storm.client.signal(PREFILL, Fault.WRITES_FAIL)
    # For the case that all bytes of the others were written.
    storm.ask(f"{storm.name}more-", prompt(storm.numbers.randrange(10**6), PAGE))

    async def poisoned() -> bool:
        for room in (await storm.rooms()).values():
            if room["state"] in LANDED:  # who has its bytes needs no writer, and would be answered meanwhile
                await storm.abort(str(room["request_id"]))
        return acked_poisoned() > earlier

    await storm.client.until("the log says that rooms were poisoned", poisoned)
    await storm.client.abort()


Ending = Callable[[Storm], Awaitable[None]]
#: Waves after which every engine lives on, and those that cost one.
GENTLE: tuple[Ending, ...] = (
    everyone,
    half,
    one_after_the_other,
    clients_leave,
    clients_leave_in_every_state,
    before_the_room_is_known,
    from_all_sides,
)
FATAL: tuple[Ending, ...] = (a_peer_comes_back, writes_end_unknown)


# ---- a wave -----------------------------------------------------------------------------------------------


async def wave(client: Client, ending: Ending, numbers: random.Random, rooms: int) -> Wave:
    """AssertionError or TimeoutError: a room did not end, a page is missing, or an answer is wrong."""
    restarts, quarantined = await client.restarts(), client.deployment.events("room.quarantined")
    for name in (PREFILL, DECODE):
        await client.signal(name, Fault.ACKS_REPEAT)
    async with anyio.create_task_group() as clients:
        storm = Storm(client, clients, numbers, rooms)
        await ending(storm)
        began = time.monotonic()
        await client.until("no room of the wave is left", partial(_none_of, storm))
        if ending not in FATAL and ending is not half:
            await client.until_at_rest()
        back = time.monotonic() - began
    assert all(reply.tokens is None for reply in storm.replies.values()), "an abort is never told as an answer"
    if ending in FATAL:
        await client.until("the engine was started again", partial(_restarted, client, restarts))
    else:
        assert await client.restarts() == restarts
        assert client.deployment.events("room.quarantined") == quarantined
    await client.until_ready()
    await _serves(client, numbers)
    found = await _found_in(client, storm)
    return Wave(ending.__name__, sum(found.values()), dict(found), round(back, 3))


async def _none_of(storm: Storm) -> bool:
    return not await storm.rooms()


async def _found_in(client: Client, storm: Storm) -> Counter[str]:
    """The state of each room before its abort. A client that left early enough never had one."""
    found: Counter[str] = Counter()
    for event in client.deployment.events("room.aborted"):
        if event["request_id"] in storm.doomed:
            room = await client.room(int(str(event["room"]).partition(".")[0]))
            states = [entry["state"] for entry in room["history"]]
            assert states[-1] == "aborted"
            found[states[states.index("aborting") - 1]] += 1
    closed = [event for event in client.deployment.events("room.closed") if event["request_id"] in storm.doomed]
    assert not closed, "a room of an answer that nobody waited for"
    return found


async def _restarted(client: Client, restarts: dict[str, int]) -> bool:
    return await client.restarts() != restarts


async def _serves(client: Client, numbers: random.Random) -> None:
    asked = [(prompt(5 + at % 4, 40 + 97 * (at % 4)), 3) for at in range(AFTERWARDS)]
    numbers.shuffle(asked)
    for (ids, new), reply in zip(asked, await client.burst(asked), strict=True):
        assert reply.tokens == expected(ids, new), reply
    await client.check_no_page_lost()
    assert (await client.status())["quarantined"] == 0
