"""What peers get wrong, as tests: a leg that fails, a client that leaves, a stream that breaks, a drain, a wedge."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import anyio
import pytest

from dsv4ctl.controlplane.config.schema import DeadlinesConfig
from dsv4ctl.controlplane.telemetry.events import Event
from running import PATIENCE, Stage, ask, events_of, pair_config, post, stage, streaming, until

pytestmark = pytest.mark.asyncio


async def _quiet_on_both_sides(running: Stage, source: str) -> None:
    """The one room there is was aborted for this `source`, acknowledged by both ranks, and no leg of it is left."""
    await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTED)))
    (aborted,) = running.telemetry.of(Event.ROOM_ABORTED)
    assert aborted["source"].value == source
    key = str(aborted["room"])
    for engine in ("prefill0", "decode0"):
        assert running.log(engine, "abort") == [key]
        assert running.ranks[engine].running == 0
    assert [record["outcome"].value for record in running.telemetry.of(Event.ABORT_ACKED)] == ["quiet"] * 2


@pytest.mark.parametrize(("failing", "waiting"), [("prefill", "decode"), ("decode", "prefill")])
async def test_a_failing_leg_answers_the_client_and_ends_its_sibling(
    tmp_path: Path, failing: str, waiting: str
) -> None:
    """Probes A and B. The clock runs from the leg's failure: it answers at once, its sibling never would.

    Reports 12 and 38.
    """
    async with stage(pair_config(tmp_path)) as running:
        body = ask(**{failing: {"status": 500}, waiting: {"silent": True}})
        began = anyio.current_time()
        status, _, answer = await post(running, "/generate", body)
        assert anyio.current_time() - began < 0.1
        assert status == 500
        assert f"{failing} engine {failing}0 answered 500: told to answer 500" in answer["error"]["message"]
        await _quiet_on_both_sides(running, "engine_fault")
        assert len(running.log(f"{waiting}0", "leg_cancelled")) == 1


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_aborts_the_room_on_both_sides(tmp_path: Path, streaming: bool) -> None:
    """Probe C, while prefill computes. Reports 9, 14 and 15: decode has not begun."""
    async with stage(pair_config(tmp_path)) as running:
        async with aiohttp.ClientSession() as client:
            body = ask(prefill={"silent": True}, decode={"silent": True}, stream=streaming)
            with anyio.move_on_after(PATIENCE) as leaving:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(lambda: client.post(running.url + "/generate", json=body))
                    await until(lambda: running.ranks["prefill0"].running == 1)
                    leaving.cancel()
        left = anyio.current_time()
        await _quiet_on_both_sides(running, "client")
        assert anyio.current_time() - left < 0.1


async def test_a_client_that_leaves_mid_stream_aborts_the_room(tmp_path: Path) -> None:
    """Probe C, while decode streams."""
    async with stage(pair_config(tmp_path)) as running:
        async with streaming(running, ask(decode={"tokens": 10_000, "interval": 0.01})) as answer:
            await answer.content.readany()
        await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTED)))
        assert running.telemetry.of(Event.ROOM_ABORTED)[0]["source"].value == "client"
        await until(lambda: running.ranks["decode0"].running == 0)


@pytest.mark.parametrize("how", ["die_after", "end_after"])
async def test_decode_dying_mid_stream_is_an_error_event_and_no_done(tmp_path: Path, how: str) -> None:
    """Probe D: the reason is kept, no half event reaches the client, nothing claims that the answer is whole."""
    async with stage(pair_config(tmp_path)) as running:
        async with streaming(running, ask(decode={"tokens": 9, how: 4})) as answer:
            assert answer.status == 200
            events = await events_of(answer)
        texts = [json.loads(event).get("text") for event in events]
        assert texts[:4] == ["0 ", "1 ", "2 ", "3 "]
        assert "decode engine decode0" in json.loads(events[4])["error"]["message"]
        assert len(events) == 5
        await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTED)))
        assert "decode engine decode0" in running.telemetry.of(Event.ROOM_ABORTED)[0]["reason"]


@pytest.mark.parametrize("closes_first", [False, True])
async def test_a_drain_finishes_the_stream_and_refuses_what_is_new(tmp_path: Path, closes_first: bool) -> None:
    """Probe E: SIGTERM during a stream, its room still open or closed already. Report 39."""
    async with stage(pair_config(tmp_path)) as running:
        decode = {"tokens": 20, "interval": 0.05, "closes_first": closes_first}
        async with streaming(running, ask(decode=decode)) as answer:
            await answer.content.readany()
            running.tasks.start_soon(running.plane.drain, [], None)
            await until(lambda: bool(running.telemetry.of(Event.DRAIN_BEGIN)))
            status, _, refused = await post(running, "/generate", ask())
            assert (status, refused["error"]["code"]) == (503, "draining")
            assert running.code is None
            events = await events_of(answer)
        assert events[-1] == "[DONE]"
        await until(running.over.is_set)
        assert running.code == 0
        assert running.telemetry.of(Event.DRAIN_DONE)[0]["rooms"] == []


async def test_a_wedged_engine_is_found_while_it_answers_health(tmp_path: Path) -> None:
    """Probe F: verdict with its cause, evidence, rooms aborted, engine restarted and serving again. Report 25."""
    config = pair_config(tmp_path, deadlines=DeadlinesConfig(wedge=1.0, ack=1.0, fence=2.0))
    async with stage(config) as running:
        wedged = running.ranks["decode0"]
        began = anyio.current_time()
        status, _, answer = await post(running, "/generate", ask(decode={"wedge": True}))
        assert anyio.current_time() - began < 1.0 + 2.0
        assert status == 502
        assert "nothing done for" in answer["error"]["message"]
        assert "decode0" in answer["error"]["message"]
        await until(lambda: running.ranks["decode0"] is not wedged)
        evidence = running.telemetry.of(Event.ENGINE_EVIDENCE)[0]
        assert "fake_engine.py" in evidence["stacks"]["answer"]
        await until(lambda: len(running.telemetry.of(Event.ENGINE_READY)) == 3)
        status, _, answer = await post(running, "/generate", ask())
        assert (status, answer["text"]) == (200, "0 1 2 ")


async def test_the_right_leg_is_blamed_and_recovery_is_immediate(tmp_path: Path) -> None:
    """Probe G: decode answers 503 thirty times, then is well again. Report 41."""
    async with stage(pair_config(tmp_path)) as running:
        for _ in range(30):
            status, _, answer = await post(running, "/generate", ask(decode={"status": 503}))
            assert status == 503
            assert "decode engine decode0 answered 503" in answer["error"]["message"]
        status, _, _ = await post(running, "/generate", ask())
        assert status == 200
