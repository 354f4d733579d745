"""Many sessions, few pages: prefixes are evicted, loaded from the host and shared while they load."""

from __future__ import annotations

import random

import pytest

from deployment import DECODE, PAGE, PREFILL, Client, deployed, expected, prompt

pytestmark = pytest.mark.asyncio

#: Groups share a prefix of pages; every session grows its own prompt from round to round.
GROUPS, SESSIONS, ROUNDS, SHARED, NEW = 4, 16, 3, 6, 4
#: The working set is about four times that.
DEVICE_PAGES, HOST_PAGES = 32, 160
TICKETS = ["attention_ticket", "indexer_ticket", "compressor_ticket", "sender_ticket", "backup_ticket", "load_ticket"]


def rounds() -> list[list[tuple[list[int], int]]]:
    """One list of questions a round: all sessions at once, in another order each time."""
    numbers = random.Random(1)
    asked = []
    for turn in range(ROUNDS):
        sessions = list(range(SESSIONS))
        numbers.shuffle(sessions)
        asked.append([(prompt(s % GROUPS, SHARED * PAGE) + prompt(100 + s, 90 + turn * 120), NEW) for s in sessions])
    return asked


async def converse(client: Client) -> list[bool]:
    """Whether each answer is the oracle's."""
    equal = []
    for asked in rounds():
        replies = await client.burst(asked)
        assert all(reply.status == 200 for reply in replies), [r for r in replies if r.status != 200]
        equal += [reply.tokens == expected(ids, new) for (ids, new), reply in zip(asked, replies, strict=True)]
    return equal


def small(unsafe: str = "") -> dict[str, str]:
    return {
        "config": unsafe,
        "prefill": f"hicache = {{ pages = {HOST_PAGES} }}\nreference = {{ device_pages = {DEVICE_PAGES} }}",
    }


async def test_evicted_and_shared_prefixes_give_the_oracles_tokens() -> None:
    with deployed(**small()) as deployment:
        async with deployment.client() as client:
            assert await converse(client) == [True] * (SESSIONS * ROUNDS)
            for name in (PREFILL, DECODE):
                counters = (await client.live(name))["counters"]
                assert counters["digests_compared"] > 0
                assert counters.get("digest_mismatches", 0) == 0
            counters = (await client.live(PREFILL))["counters"]
            assert counters["host_tokens_loaded"] > SHARED * PAGE, "nothing was evicted: this test shows nothing"
            await client.check_no_page_lost()


async def test_without_tickets_the_same_sessions_read_what_has_not_landed() -> None:
    """Report 30."""
    off = ", ".join(f'"{name}"' for name in TICKETS)
    with deployed(**small(f'[unsafe]\noff = [{off}]\n[policies]\nintegrity = "off"\n')) as deployment:
        async with deployment.client() as client:
            equal = await converse(client)
            live = await client.live(PREFILL)
            assert live["tickets"]["violations"] > 0
            print(f"\nwithout tickets: {equal.count(False)} of {len(equal)} answers wrong, {live['counters']}")
