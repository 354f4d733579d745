"""Clients: one request to a gateway, a single server, or both halves of a stock pair; what came back, and when."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anyio
import msgspec


@dataclass
class Reply:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int | None = None
    details: dict[str, Any] | None = None
    first: float | None = None  #: seconds to the first event of a stream
    seconds: float = 0.0
    error: str | None = None
    room: int | None = None


def prompt(seed: object, length: int) -> list[int]:
    """Token ids that depend on nothing but the arguments."""
    numbers = random.Random(str(seed))
    return [numbers.randrange(10, 4000) for _ in range(length)]


def body(ids: list[int], new: int, *, stream: bool) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": stream}


class Client:
    """Asks one address."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http = http
        self.url = url

    async def ask(
        self, ids: list[int], new: int, *, stream: bool = False, deadline: float = 120.0, reply: Reply | None = None
    ) -> Reply:
        """Fills `reply`. Never raises for what the server does: `error` says it."""
        reply, began = reply or Reply(), time.monotonic()
        try:
            with anyio.fail_after(deadline):
                await self._ask(body(ids, new, stream=stream), reply, began)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
            reply.error = f"{type(error).__name__}: {error}"[:300]
        reply.seconds = time.monotonic() - began
        return reply

    async def _ask(self, question: dict[str, Any], reply: Reply, began: float) -> None:
        await post(self.http, self.url, question, reply, began)


class Oracle(Client):
    """Asks one request at a time, whoever asks: another batch has other bits."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        super().__init__(http, url)
        self._turn = anyio.Lock()

    async def ask(self, *args: Any, **kwargs: Any) -> Reply:
        async with self._turn:
            return await super().ask(*args, **kwargs)


class Pair(Client):
    """Both halves of a stock pair, asked at once with the same room: what the gateway does, and no more."""

    def __init__(self, http: aiohttp.ClientSession, prefill: str, decode: str, bootstrap_port: int) -> None:
        super().__init__(http, decode)
        self.prefill = prefill
        self._port = bootstrap_port

    async def _ask(self, question: dict[str, Any], reply: Reply, began: float) -> None:
        reply.room = random.randrange(1, 1 << 60)
        meet = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._port, "bootstrap_room": reply.room}
        other = Reply()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(post, self.http, self.prefill, {**question, **meet, "stream": False}, other, began)
                await post(self.http, self.url, {**question, **meet}, reply, began)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        reply.cached, reply.details = other.cached, other.details


async def post(http: aiohttp.ClientSession, url: str, question: dict[str, Any], reply: Reply, began: float) -> None:
    """Raises aiohttp.ClientError, ValueError (no answer in it)."""
    data = msgspec.json.encode(question)  # tens of thousands of numbers: json would take the time of a burst
    async with http.post(url + "/generate", data=data, headers={"content-type": "application/json"}) as answer:
        if answer.status != 200:
            raise ValueError(f"{answer.status} {(await answer.content.read(300)).decode(errors='replace')}")
        reply.room = reply.room or _room(answer.headers.get("x-dsv4ctl-room"))
        if not question["stream"]:
            _take(reply, json.loads(await answer.read()))
            return
        async for line in answer.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            if reply.first is None:
                reply.first = time.monotonic() - began
            _take(reply, json.loads(line[6:]))


def _take(reply: Reply, said: dict[str, Any]) -> None:
    if "meta_info" not in said:
        raise ValueError(f"no answer: {json.dumps(said)[:300]}")
    info = said["meta_info"]
    ids, logprobs = said.get("output_ids", []), [one[0] for one in info.get("output_token_logprobs", [])]
    whole = len(ids) >= len(reply.ids)  # each event of a stream says all there is so far, or only what is new
    reply.ids = ids if whole else reply.ids + ids
    reply.logprobs = logprobs if len(logprobs) >= len(reply.logprobs) else reply.logprobs + logprobs
    reply.cached, reply.details = info.get("cached_tokens"), info.get("cached_tokens_details")
    reason = info.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise ValueError(f"aborted: {reason.get('message', '')}"[:300])


def _room(key: str | None) -> int | None:
    """The number of `room/generation`."""
    digits = "".join(one if one.isdigit() else " " for one in key or "").split()
    return int(digits[0]) if digits else None


async def many(
    client: Client, questions: list[list[int]], new: int, *, stream: bool = False, deadline: float = 120.0
) -> list[Reply]:
    """All at once."""
    replies: list[Reply] = [Reply() for _ in questions]

    async def one(at: int) -> None:
        replies[at] = await client.ask(questions[at], new, stream=stream, deadline=deadline)

    async with anyio.create_task_group() as tasks:
        for at in range(len(questions)):
            tasks.start_soon(one, at)
    return replies
