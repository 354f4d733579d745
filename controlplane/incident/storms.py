"""Storms: many requests under way, ended together; how long until nothing of them is left on the engines."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from dsv4ctl.controlplane.incident.deployment import RequestFailedError, Running, until
from dsv4ctl.controlplane.incident.evaluate import Stormed
from dsv4ctl.controlplane.incident.rows import How
from dsv4ctl.controlplane.rooms.states import LIVE, RoomState

#: Requests of a storm, tokens of a prompt, and of an answer: none is complete before it is aborted.
ROOMS, PROMPT_TOKENS, ANSWER_TOKENS = 80, 300, 1500
#: Of those that are not aborted.
_SHORT_ANSWER = 4
#: Seconds: until most rooms are under way; for what is left to go; between two aborts.
_BEGUN, _GONE, _STAGGER = 60.0, 45.0, 0.01
_MOVING = {state.value for state in LIVE - {RoomState.ALLOCATED}}


class _Storm:
    def __init__(self, running: Running, how: How, seed: int) -> None:
        self._running = running
        self._how = how
        self._dice = random.Random(f"{seed}/storm/{how}")
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self._one_failed = anyio.Event()

    async def run(self) -> Stormed:
        names = [f"storm-{self._how}-{number}" for number in range(ROOMS)]
        doomed = names[::2] if self._how == "half" else names
        async with anyio.create_task_group() as clients:
            for name in names:
                clients.start_soon(self._ask, name, ANSWER_TOKENS if name in doomed else _SHORT_ANSWER)
            await self._under_way()
            await self._strike(doomed)
            began = anyio.current_time()
            await self._until_gone(doomed)
            seconds = anyio.current_time() - began
        await self._running.ready()
        left = await pages_back(self._running)
        if self._how != "half":
            seconds = anyio.current_time() - began
        return Stormed(ROOMS, len(doomed), len(self._failed - set(doomed)), round(seconds, 3), left)

    async def _ask(self, name: str, tokens: int) -> None:
        prompt = [self._dice.randrange(256) for _ in range(PROMPT_TOKENS)]
        with anyio.CancelScope() as self._scopes[name]:
            try:
                await self._running.generate(prompt, tokens, name)
            except RequestFailedError:
                self._failed.add(name)
                self._one_failed.set()
        self._ended.add(name)

    async def _under_way(self) -> None:
        """Most rooms are; a storm that meets fewer is one all the same."""

        async def moving() -> bool:
            states = [room["state"] for room in await self._running.rooms()]
            most = sum(state in _MOVING for state in states) > ROOMS / 2
            return bool(self._ended) or (most and RoomState.SENDING.value in states)

        with anyio.move_on_after(_BEGUN):
            await until(moving)

    async def _strike(self, doomed: Sequence[str]) -> None:
        match self._how:
            case "peer-back":
                os.kill(await self._running.pid("prefill"), signal.SIGKILL)
            case "poisoned":
                with anyio.move_on_after(_BEGUN):  # the engine's staged fault: a write whose end nobody knows
                    await self._one_failed.wait()
            case _:
                for name in doomed:
                    self._scopes[name].cancel()
                    if self._how == "staggered":
                        await anyio.sleep(_STAGGER)

    async def _until_gone(self, doomed: Sequence[str]) -> None:
        names = set(doomed)

        async def gone() -> bool:
            return names <= self._ended and all(r["request_id"] not in names for r in await self._running.rooms())

        with anyio.move_on_after(_GONE):
            await until(gone)


async def storm(running: Running, how: How, seed: int) -> Stormed:
    """Raises what `Running` raises."""
    return await _Storm(running, how, seed).run()


async def pages_back(running: Running) -> int:
    """Waits for the pages of all that has ended; how many are not back after _GONE."""
    left = 0

    async def back() -> bool:
        nonlocal left
        left = sum(pages_left(info) for info in await running.engine_infos())
        return not left

    with anyio.move_on_after(_GONE):
        await until(back)
    return left


def pages_left(info: Mapping[str, Any]) -> int:
    """Pages of an idle engine that are not free; those that a prefill engine owns are cached prefixes."""
    states = ("retiring", "quarantined", "leased") + (() if info["role"] == "prefill" else ("owned",))
    return sum(sum(info["pages"][state].values()) for state in states)
