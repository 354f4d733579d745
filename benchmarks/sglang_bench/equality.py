"""Outputs against an oracle: one server, one request at a time, no cache, no hooks."""

from __future__ import annotations

from typing import Any

import anyio

from sglang_bench.ask import Client, Reply, prompt
from sglang_bench.compare import distance, summary
from sglang_bench.results import Results

#: Prompt lengths; past 2048 the indexer chooses, which needs a deterministic top-k to be repeatable at all.
LENGTHS = (40, 256, 700, 1500, 1900, 2000, 2500, 3000, 4000)
NEW = 24
#: Sessions: groups that share a system prompt, turns of each, tokens.
GROUPS, MEMBERS, TURNS, SYSTEM, TURN, TURN_NEW = 6, 8, 3, 768, 230, 10


async def lengths(oracle: Client, asked: Client, results: Results, key: str) -> None:
    """One request at a time on either side; cold."""
    rows: dict[str, Any] = {}
    found: list[tuple[Reply, Reply]] = []
    for length in LENGTHS:
        ids = prompt(f"length {length}", length)
        replies: dict[str, Reply] = {}

        async def ask(name: str, client: Client, ids: list[int] = ids, into: dict[str, Reply] = replies) -> None:
            into[name] = await client.ask(ids, NEW)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "oracle", oracle)
            tasks.start_soon(ask, "asked", asked)
        found.append((replies["asked"], replies["oracle"]))
        rows[str(length)] = {
            **distance(replies["asked"], replies["oracle"])._asdict(),
            "error": replies["asked"].error or replies["oracle"].error,
            "seconds": round(replies["asked"].seconds, 3),
        }
        results.put(key, by_length=rows, **summary(found))


async def host_hit(oracle: Client, asked: Client, results: Results, key: str, fillers: int) -> None:
    """The same prompt cold, from the device, and from the host after `fillers` others took its pages."""
    for length in (1900, 3000):
        ids = prompt(f"host {length}", length)
        cold, device = await asked.ask(ids, NEW), await asked.ask(ids, NEW)
        for filler in range(fillers):
            await asked.ask(prompt(f"filler {length} {filler}", 3000), 2)
        host = await asked.ask(ids, NEW)
        reference = await oracle.ask(ids, NEW)
        results.put(
            key,
            **{
                str(length): {
                    "errors": [reply.error for reply in (cold, device, host, reference) if reply.error],
                    "cold_against_oracle": distance(cold, reference)._asdict(),
                    "host_against_device": distance(host, device)._asdict(),
                    "device_details": device.details,
                    "host_details": host.details,
                }
            },
        )


def sessions() -> list[list[list[int]]]:
    """[turn][session] -> prompt. A turn holds all before it; what the model would have said in between is given."""
    turns: list[list[list[int]]] = []
    for turn in range(TURNS):
        turns.append([])
        for group in range(GROUPS):
            for member in range(MEMBERS):
                ids = prompt(f"system {group}", SYSTEM)
                for before in range(turn + 1):
                    ids = ids + prompt(f"turn {group} {member} {before}", TURN)
                turns[turn].append(ids)
    return turns


async def reference(oracle: Client, answers: dict[tuple[int, int], Reply]) -> None:
    """The oracle's answers to all turns, one at a time."""
    for turn, questions in enumerate(sessions()):
        for at, ids in enumerate(questions):
            answers[turn, at] = await oracle.ask(ids, TURN_NEW)


async def concurrent(asked: Client) -> dict[tuple[int, int], Reply]:
    """All sessions at once, each turn after the one before it."""
    turns = sessions()
    answers: dict[tuple[int, int], Reply] = {}

    async def one(at: int) -> None:
        for turn in range(TURNS):
            answers[turn, at] = await asked.ask(turns[turn][at], TURN_NEW)

    async with anyio.create_task_group() as tasks:
        for at in range(len(turns[0])):
            tasks.start_soon(one, at)
    return answers


def against(answers: dict[tuple[int, int], Reply], oracle: dict[tuple[int, int], Reply]) -> dict[str, Any]:
    both = sorted(answers.keys() & oracle.keys())
    cached = [answers[at].cached or 0 for at in both]
    host = sum(((answers[at].details or {}).get("host") or 0) > 0 for at in both)
    return {**summary([(answers[at], oracle[at]) for at in both]), "cached_tokens": sum(cached), "host_hits": host}
