"""One process of a deployment under load is killed at a random moment; what everybody sees of it is checked (S5)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio

from deployment import DECODE, PAGE, PATIENCE, PREFILL, Client, Deployment, Reply, expected, prompt

#: Clients who ask one question after the other.
CLIENTS = 8
#: The kill comes within so many times of what `AFTERWARDS` answers take without company.
SPAN = 3.0
#: Questions asked once everything is back.
AFTERWARDS = 4
#: The control plane as a victim.
CONTROL_PLANE = "control plane"
#: Status of an error that a client may be given: the connection broke, an engine failed, nobody serves.
_TOLD = (0, 502, 503)

Question = tuple[list[int], int]
#: Few, so that the oracle is soon done; some share a prefix. Up to six pages, eight to forty tokens.
QUESTIONS: list[Question] = [
    (prompt(at % 3, 2 * PAGE) + prompt(50 + at, at * 150), 8 + 8 * (at % 5)) for at in range(8)
]


class Victim(NamedTuple):
    """`rank` of `engine`; the control plane has one."""

    engine: str
    rank: int = 0


class Killed(NamedTuple):
    """What was seen of one kill. Seconds are counted from it."""

    victim: str
    in_flight: dict[str, int]  #: rooms by state a moment before
    answered: int
    refused: int  #: clients that were told an error
    told_s: float  #: until the last client had an answer or an error
    ended_s: float  #: until both sides' rooms had ended; of the control plane: until its engines were gone
    back_s: float  #: until every engine was ready again; 0 for the control plane


async def kill(client: Client, victim: Victim, numbers: random.Random, span: float, survived: bool = False) -> Killed:
    """Kills it at a moment of the first `span` seconds of load; `survived`: its engines do not end with it.

    AssertionError or TimeoutError: something of S5 did not hold.
    """
    asked: list[tuple[Question, Reply]] = []
    of_plane = victim.engine == CONTROL_PLANE
    restarts = await client.restarts()
    async with _load(client, numbers, asked):
        # The moment is what is random here: nothing that follows depends on how far the load has come.
        await anyio.sleep(numbers.uniform(0, span))
        in_flight = Counter(room["state"] for room in await client.rooms())
        if of_plane:
            os.kill(client.deployment.process.pid, signal.SIGKILL)
        else:
            await client.signal(victim.engine, signal.SIGKILL, victim.rank)
        began = time.monotonic()
    told = time.monotonic() - began
    check_told(asked)
    if not of_plane:
        await client.until_no_rooms()
    elif not survived:
        await _engines_gone(client.deployment)
    ended = time.monotonic() - began
    back = 0.0 if of_plane else await _back(client, victim, restarts, asked)
    tokens = sum(reply.tokens is not None for _, reply in asked)
    name = CONTROL_PLANE if of_plane else f"{victim.engine} rank {victim.rank}"
    return Killed(name, dict(in_flight), tokens, len(asked) - tokens, round(told, 3), round(ended, 3), round(back, 3))


@asynccontextmanager
async def _load(client: Client, numbers: random.Random, asked: list[tuple[Question, Reply]]) -> AsyncIterator[None]:
    """Clients ask while the block runs; when it is left, each waits for its last answer."""
    over = False

    async def one(order: random.Random) -> None:
        while not over:
            question = order.choice(QUESTIONS)
            asked.append((question, await client.generate(*question, stream=order.random() < 0.5)))

    async with anyio.create_task_group() as clients:
        for _ in range(CLIENTS):
            clients.start_soon(one, random.Random(numbers.random()))
        yield
        over = True


def check_told(asked: list[tuple[Question, Reply]]) -> None:
    """Each client has the oracle's answer, or an error."""
    for (ids, new), reply in asked:
        if reply.tokens is None:
            assert reply.error is not None, reply
            assert reply.status in (*_TOLD, 200), reply  # 200: a stream that had begun, and ends with an error
        else:
            assert reply.tokens == expected(ids, new), reply


async def _engines_gone(deployment: Deployment) -> None:
    with anyio.fail_after(PATIENCE):
        deployment.process.poll()
        while deployment.pids():  # noqa: ASYNC110 - only /proc knows
            await anyio.sleep(0.005)


async def _back(client: Client, victim: Victim, restarts: dict[str, int], asked: list[tuple[Question, Reply]]) -> float:
    """Seconds until every engine is ready; then nothing is missing, and answers are the oracle's."""
    for _, reply in asked:
        if reply.room is not None:
            assert (await client.room(reply.room))["state"] in ("closed", "aborted")
    began = time.monotonic()
    restarts[victim.engine] += 1
    await client.until_restarted(restarts)
    seconds = time.monotonic() - began
    await serves(client)
    assert await client.restarts() == restarts
    return seconds


async def serves(client: Client) -> float:
    """Answers are the oracle's; no page is lost, and none in quarantine. Seconds that the answers took."""
    questions = QUESTIONS[:AFTERWARDS]
    for ids, new in questions:
        expected(ids, new)
    began = time.monotonic()
    replies = await client.burst(questions)
    seconds = time.monotonic() - began
    for (ids, new), reply in zip(questions, replies, strict=True):
        assert reply.tokens == expected(ids, new), reply
    await client.check_no_page_lost()
    assert (await client.status())["quarantined"] == 0
    return seconds


async def series(
    deployment: Deployment, chosen: list[Victim], numbers: random.Random, tell: Callable[[Killed], None]
) -> None:
    """Kills one after the other, each once all is back; `tell` is given each as it is over."""
    async with deployment.client() as client:
        span = SPAN * await serves(client)
        for victim in chosen:
            tell(await kill(client, victim, numbers, span))


def victims(ranks: int) -> list[Victim]:
    """The ranks of both engines."""
    return [Victim(engine, rank) for engine in (PREFILL, DECODE) for rank in range(ranks)]
