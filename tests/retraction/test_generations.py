"""A retracted room at the gateway: its next generation goes on with the same answer, and nobody is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from dsv4ctl.controlplane.telemetry.events import Event
from fake_engine import FakeRank
from running import Stage, pair_config, post, stage, until

pytestmark = pytest.mark.asyncio
CHAT = "/v1/chat/completions"


def asked(stream: bool = True, **decode: Any) -> dict[str, Any]:
    fake = {"decode": {"tokens": 5, **decode}}
    return {"model": "dsv4-reference", "messages": [{"role": "user", "content": "x"}], "stream": stream, "fake": fake}


def said(raw: str) -> tuple[str, list[str]]:
    """The text, and whatever else is no chunk."""
    data = [line.removeprefix("data: ") for line in raw.splitlines() if line]
    chunks = [json.loads(one) for one in data if one.startswith('{"id"') or '"choices"' in one]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    return text, [one for one in data if '"choices"' not in one]


def held(gate: list[FakeRank]) -> Callable[[FakeRank], None]:
    """The decode rank acknowledges no retraction until its event is set."""

    def change(rank: FakeRank) -> None:
        if rank.role.value == "decode":
            rank.quiet = anyio.Event()
            gate.append(rank)

    return change


def keys(running: Stage, event: Event) -> list[str]:
    return [str(record["room"]) for record in running.telemetry.of(event)]


@pytest.mark.parametrize("quietly", [False, True], ids=["the leg says so", "only the link says so"])
async def test_a_streaming_client_sees_one_answer(tmp_path: Path, quietly: bool) -> None:
    async with stage(pair_config(tmp_path)) as running:
        status, _, raw = await post(running, CHAT, asked(retract_after=3, quietly=quietly, later={"tokens": 5}))
        assert status == 200
        assert said(raw) == ("0 1 2 3 4 ", ["[DONE]"])
        first, second = keys(running, Event.ROOM_OPENED)
        assert (first.removesuffix(".1"), second[-2:]) == (second.removesuffix(".2"), ".2")
        assert keys(running, Event.ROOM_RETRACTED) == [first]
        await until(lambda: keys(running, Event.ROOM_CLOSED) == [second])
        assert running.log("decode0", "leg") == running.log("prefill0", "leg") != []
        assert [r for r in running.telemetry.records if r["level"] in ("warning", "error")] == []
        assert (await running.plane.status())["rooms"].get("aborted", 0) == 0


async def test_an_answer_that_is_not_streamed_is_the_next_generations(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        status, headers, answer = await post(running, CHAT, asked(False, retract_after=0, later={"tokens": 2}))
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "0 1 ")
        assert headers["x-dsv4ctl-room"] == keys(running, Event.ROOM_OPENED)[1]


async def test_another_answer_than_before_is_an_error_event(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        _, _, raw = await post(running, CHAT, asked(retract_after=3, later={"tokens": 5, "token": "7 "}))
        text, (error,) = said(raw)
        assert text == "0 1 2 "
        assert json.loads(error)["error"]["code"] == "integrity"
        await until(lambda: len(keys(running, Event.ROOM_ABORTED)) == 1)


async def test_the_next_generation_waits_until_both_sides_are_quiet_and_keeps_its_turn(tmp_path: Path) -> None:
    decode: list[FakeRank] = []
    turns: list[tuple[str, int]] = []

    def change(rank: FakeRank) -> None:
        held(decode)(rank)
        plain = rank._frame

        async def frame(frame: Any) -> None:
            if hasattr(frame, "turn") and rank.role.value == "decode":
                turns.append((str(frame.key), frame.turn))
            await plain(frame)

        rank._frame = frame  # type: ignore[method-assign]

    async with stage(pair_config(tmp_path), change) as running, anyio.create_task_group() as tasks:
        tasks.start_soon(post, running, CHAT, asked(retract_after=1, later={"tokens": 5}))
        await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTING)))
        await post(running, CHAT, asked())  # another room meanwhile
        assert len(turns) == 2
        decode[0].quiet.set()  # type: ignore[union-attr]
        await until(lambda: len(running.telemetry.of(Event.ROOM_CLOSED)) == 2)
        first, other, again = turns
        assert (first[1], other[1]) == (again[1], again[1] + 1)
        assert again[0] == first[0].replace(".1", ".2")


@pytest.mark.parametrize("ended", [False, True], ids=["while it ends", "between two generations"])
async def test_an_abort_of_a_retracted_room_is_the_end_of_it(tmp_path: Path, ended: bool) -> None:
    """The operator aborts all: a room without a living generation is one of them."""
    decode: list[FakeRank] = []
    async with stage(pair_config(tmp_path), held(decode)) as running, anyio.create_task_group() as tasks:
        answers: list[str] = []

        async def client() -> None:
            answers.append((await post(running, CHAT, asked(retract_after=2, later={"tokens": 5})))[2])

        async def abort() -> list[str]:
            return list((await running.plane.abort(None, "enough"))["aborted"])

        tasks.start_soon(client)
        await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTING)))
        aborted: list[str] = []
        if ended:
            plain = running.telemetry.emit

            def emit(event: Event, *args: Any, **fields: Any) -> None:
                """Before whoever waits for the room's end learns of it."""
                plain(event, *args, **fields)
                if event is Event.ROOM_RETRACTED:
                    tasks.start_soon(_into, aborted, abort)

            running.telemetry.emit = emit  # type: ignore[method-assign]
        else:
            aborted += await abort()
        decode[0].quiet.set()  # type: ignore[union-attr]
        await until(lambda: bool(answers))
        text, (error,) = said(answers[0])
        assert (text, json.loads(error)["error"]["code"]) == ("0 1 ", "admin")
        assert aborted == keys(running, Event.ROOM_OPENED)
        assert await abort() == []


async def _into(found: list[str], ask: Callable[[], Any]) -> None:
    found += await ask()


async def test_a_client_that_leaves_meanwhile_is_not_served_again(tmp_path: Path) -> None:
    decode: list[FakeRank] = []
    async with stage(pair_config(tmp_path), held(decode)) as running, aiohttp.ClientSession() as client:
        async with client.post(running.url + CHAT, json=asked(retract_after=2)) as answer:
            await answer.content.readany()
            await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTING)))
        await until(lambda: bool(running.telemetry.of(Event.GATEWAY_CLIENT_GONE)))
        decode[0].quiet.set()  # type: ignore[union-attr]
        await until(lambda: bool(running.telemetry.of(Event.ROOM_RETRACTED)))
        await anyio.wait_all_tasks_blocked()
        assert len(keys(running, Event.ROOM_OPENED)) == 1
