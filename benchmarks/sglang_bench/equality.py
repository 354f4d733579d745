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
GROUPS, MEMBERS, TURNS, SYSTEM, TURN, TURN_NEW = 6, 8, 3, 768, 300, 10
#: By turn and session.
Answers = dict[tuple[int, int], Reply]
#: SGLang is not batch-invariant: an answer depends on what else was in its batches, with hooks or without.
RULE = (
    "hooks hold if answers with them are no further from answers without them than those of two runs without them are "
    "from each other: median and 90th percentile of the logprob distance at most a quarter more, equal ids at most a "
    "tenth of the sessions' turns fewer; every run begins with empty caches"
)
#: Stock SGLang has no bf16 index keys.
RULE_BF16 = (
    "bf16 holds if its answers are no further from its own oracle than those of a pair without hooks are from theirs "
    "(s1.sessions): median and 90th percentile of the logprob distance at most a quarter more, equal ids at most a "
    "tenth of the sessions' turns fewer"
)


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


async def reference(oracle: Client, answers: Answers) -> None:
    """The oracle's answers to all turns, one at a time."""
    for turn, questions in enumerate(sessions()):
        for at, ids in enumerate(questions):
            answers[turn, at] = await oracle.ask(ids, TURN_NEW)


async def concurrent(asked: Client) -> Answers:
    """All sessions at once, each turn after the one before it."""
    turns = sessions()
    answers: Answers = {}

    async def one(at: int) -> None:
        for turn in range(TURNS):
            answers[turn, at] = await asked.ask(turns[turn][at], TURN_NEW)

    async with anyio.create_task_group() as tasks:
        for at in range(len(turns[0])):
            tasks.start_soon(one, at)
    return answers


def against(answers: Answers, oracle: Answers) -> dict[str, Any]:
    both = sorted(answers.keys() & oracle.keys())
    cached = [answers[at].cached or 0 for at in both]
    host = sum(((answers[at].details or {}).get("host") or 0) > 0 for at in both)
    return {**summary([(answers[at], oracle[at]) for at in both]), "cached_tokens": sum(cached), "host_hits": host}


def ruled(off: tuple[Answers, Answers], on: tuple[Answers, Answers]) -> dict[str, Any]:
    """`RULE` on two runs of the sessions without hooks and two with them."""
    plain, found = against(off[0], off[1]), [against(one, other) for one in on for other in off]
    return {"rule": RULE, "plain": plain, "hooked": found, "holds": all(_within(one, plain) for one in found)}


def ruled_bf16(runs: tuple[Answers, Answers], oracle: Answers, stock: list[dict[str, Any]]) -> dict[str, Any]:
    """`RULE_BF16`; `stock`: how far two runs without hooks, of fp8 keys, are from their own oracle."""
    furthest = max(stock, key=lambda one: one["logprob_distance"]["median"])
    found = [against(run, oracle) for run in runs]
    return {"rule": RULE_BF16, "runs": found, "holds": all(_within(one, furthest) for one in found)}


def _within(hooked: dict[str, Any], plain: dict[str, Any]) -> bool:
    if hooked["logprob_distance"] is None or plain["logprob_distance"] is None:
        return False
    apart = all(hooked["logprob_distance"][at] <= 1.25 * plain["logprob_distance"][at] for at in ("median", "p90"))
    return apart and not hooked["errors"] and hooked["ids_equal"] >= plain["ids_equal"] - 0.1 * plain["answered"]
