"""What clients get, through the official client and through plain HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import openai
import pytest

from dsv4ctl.controlplane.config.schema import DeadlinesConfig, EngineConfig, GatewayConfig, LimitsConfig
from dsv4ctl.controlplane.gateway import app
from dsv4ctl.controlplane.telemetry.events import Event
from fake_engine import CONTEXT_TOKENS, FakeRank
from running import PATIENCE, Stage, ask, events_of, pair_config, post, stage, streaming, until

pytestmark = pytest.mark.asyncio
MODEL = "dsv4-reference"
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def _client(running: Stage, max_retries: int = 0) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="none", max_retries=max_retries) as client:
        yield client


# ---- answers ------------------------------------------------------------------------------------------


async def test_the_openai_client_gets_whole_answers(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running, _client(running) as client:
        chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert chat.choices[0].message.content == "0 1 2 "
        text = await client.completions.create(model=MODEL, prompt="hello")
        assert text.choices[0].text == "0 1 2 "
        assert [model.id async for model in client.models.list()] == [MODEL]
        await until(lambda: len(running.telemetry.of(Event.ROOM_CLOSED)) == 2)


async def test_an_idle_connection_is_not_used_again_when_the_engine_may_have_closed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert app.KEEPALIVE < 5.0, "SGLang's server keeps an idle connection that long"
    monkeypatch.setattr(app, "KEEPALIVE", 0.05)
    async with stage(pair_config(tmp_path)) as running:
        for _ in range(2):
            assert (await post(running, "/generate", ask()))[0] == 200
            await anyio.sleep(2 * app.KEEPALIVE)
        for rank in running.ranks.values():
            assert len(set(rank.ports)) == 2


async def test_the_openai_client_gets_streams(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running, _client(running) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "0 1 2 "
        texts = await client.completions.create(model=MODEL, prompt="hello", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in texts]) == "0 1 2 "


async def test_cancelling_the_openai_clients_stream_aborts_its_room(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running, _client(running) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True,
            extra_body={"fake": {"decode": {"tokens": 10_000, "interval": 0.01}}},
        )  # fmt: skip
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTED)))
        assert running.telemetry.of(Event.ROOM_ABORTED)[0]["source"].value == "client"
        assert running.telemetry.of(Event.GATEWAY_CLIENT_GONE)


async def test_events_reach_the_client_as_they_come(tmp_path: Path) -> None:
    """The first arrives while the engine still has an unbounded time to go."""
    async with stage(pair_config(tmp_path)) as running:
        with anyio.fail_after(PATIENCE):
            async with streaming(running, ask(decode={"tokens": 2, "interval": 3600})) as answer:
                assert b'"text": "0 "' in await answer.content.readany()


async def test_both_legs_get_the_same_room_and_no_other_change(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        _, headers, _ = await post(running, "/generate", ask())
        assert running.log("prefill0", "open") == running.log("decode0", "open") == [headers["x-dsv4ctl-room"]]
        assert len(running.log("prefill0", "leg")) == 1


async def test_a_client_that_leaves_ends_both_legs(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        async with streaming(running, ask(prefill={"silent": True}, decode={"tokens": 2, "interval": 3600})) as answer:
            await answer.content.readany()
            await until(lambda: bool(running.log("prefill0", "leg")))
        await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTED)))
        assert running.telemetry.of(Event.ROOM_ABORTED)[0]["source"].value == "client"
        await until(lambda: all(running.log(engine, "leg_cancelled") for engine in ("prefill0", "decode0")))


async def test_a_prefill_leg_without_an_end_keeps_no_answer_for_long(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        assert (await post(running, "/generate", ask(prefill={"silent": True})))[0] == 200


async def test_a_prefill_leg_that_fails_after_the_decode_leg_ended_fails_the_answer(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        status, _, body = await post(running, "/generate", ask(prefill={"wait": 1, "status": 500}))
        assert (status, body["error"]["code"]) == (500, "engine_fault")


async def test_a_single_engine_serves_alone(tmp_path: Path) -> None:
    config = pair_config(tmp_path, engines=[EngineConfig(name="single0", role="single")])
    async with stage(config) as running:
        status, _, answer = await post(running, "/generate", ask())
        assert (status, answer["text"]) == (200, "0 1 2 ")
        assert await running.plane.engines()
        (opened,) = running.telemetry.of(Event.ROOM_OPENED)
        assert (opened["engines"], opened["bytes"]) == (["single0"], 0)


async def test_a_request_id_is_kept_or_made_and_reaches_the_engines_and_the_log(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        _, headers, _ = await post(running, "/generate", ask(), headers={"x-request-id": "mine", "x-session-id": "s1"})
        assert headers["x-request-id"] == "mine"
        assert running.log("decode0", "leg") == ["mine"]
        (record,) = running.telemetry.of(Event.GATEWAY_REQUEST)
        assert (record["request_id"], record["session"], record["status"]) == ("mine", "s1", 200)
        _, headers, _ = await post(running, "/generate", ask())
        assert len(headers["x-request-id"]) == 32


async def test_no_prompt_text_reaches_the_log(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        await post(running, "/generate", ask("a very secret prompt"))
        await post(running, "/generate", ask("a very secret prompt", decode={"status": 500}))
        assert "very secret" not in str(running.telemetry.records)


# ---- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/generate", ask(bootstrap_room=7), "bootstrap_room", "reserved_field"),
        ("/generate", ask(bootstrap_host="x"), "bootstrap_host", "reserved_field"),
        ("/v1/chat/completions", {"model": "gpt", "messages": MESSAGES}, "model", "model_not_found"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "model", "invalid_type"),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": -1}, "max_tokens", "invalid_value"),
        ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"]}, "prompt", "one_prompt"),
        ("/v1/chat/completions", {"model": MODEL}, "messages", "invalid_type"),
        ("/generate", {}, "text", "invalid_type"),
    ],
)
async def test_what_cannot_be_served_is_refused_before_a_room_is_opened(
    tmp_path: Path, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    async with stage(pair_config(tmp_path)) as running:
        status, _, answer = await post(running, path, body)
        error = answer["error"]
        assert (status, error["param"], error["code"]) == (400, param, code)
        assert (error["type"], set(error)) == ("invalid_request_error", {"message", "type", "param", "code"})
        assert running.telemetry.of(Event.ROOM_OPENED) == []
        assert running.telemetry.of(Event.GATEWAY_REFUSED)[0]["code"] == code


async def test_invalid_json_and_unknown_paths_have_the_same_error_body(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running, aiohttp.ClientSession() as client:
        for path in ("/generate", "/abort_request"):
            for raw in (b'{"text": ', b'{"rid": "\xff"}', b'{"rid": ' + b"[" * 100_000):
                async with client.post(running.url + path, data=raw) as answer:
                    assert answer.status == 400
                    assert (await answer.json())["error"]["code"] == "invalid_json"
        async with client.post(running.url + "/v2/nothing") as answer:
            assert answer.status == 404
            assert "/v2/nothing" in (await answer.json())["error"]["message"]


async def test_a_body_too_large_is_413(tmp_path: Path) -> None:
    config = pair_config(tmp_path, gateway=GatewayConfig(port=0, max_body_bytes=1000))
    async with stage(config) as running:
        status, _, answer = await post(running, "/generate", ask("x" * 2000))
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert "1000" in answer["error"]["message"]


async def test_an_engines_refusal_is_passed_on_and_its_room_aborted(tmp_path: Path) -> None:
    """Too long a context: the engine counts tokens, its words reach the client unchanged. Report 36."""
    async with stage(pair_config(tmp_path)) as running:
        with pytest.raises(openai.BadRequestError) as refused:
            async with _client(running) as client:
                await client.completions.create(model=MODEL, prompt="x" * CONTEXT_TOKENS)
        assert refused.value.code == "context_length_exceeded"
        assert str(CONTEXT_TOKENS) in refused.value.message
        await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTED)))
        assert running.telemetry.of(Event.ROOM_ABORTED)[0]["source"].value == "client"


async def test_over_admission_is_429_with_a_time_to_come_back(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path, limits=LimitsConfig(max_rooms=1))) as running:
        async with streaming(running, ask(decode={"tokens": 2, "interval": 3600})) as answer:
            await answer.content.readany()
            status, headers, refused = await post(running, "/generate", ask())
            assert (status, refused["error"]["code"]) == (429, "over_admission")
            assert int(headers["Retry-After"]) >= 1
            assert "x-should-retry" not in headers
        await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTED)))
        status, _, _ = await post(running, "/generate", ask())
        assert status == 200


async def test_admission_counts_transfer_bytes(tmp_path: Path) -> None:
    """One full page of 256 tokens: 2 x 8,192 + 2 x 16,384 + 4 x 32,768 + 2 x 4,096 bytes."""
    async with stage(pair_config(tmp_path, limits=LimitsConfig(max_bytes=188_416))) as running:
        status, _, _ = await post(running, "/generate", ask("x" * 256))
        assert status == 200
        assert running.telemetry.of(Event.ROOM_OPENED)[0]["bytes"] == 188_416
        status, _, refused = await post(running, "/generate", ask("x" * 257))
        assert (status, refused["error"]["code"]) == (400, "too_large")


async def test_without_a_pair_every_route_says_why(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running, aiohttp.ClientSession() as client:
        async with client.get(running.url + "/health") as answer:
            assert answer.status == 200
        await running.plane.drain(["decode0"], 5.0)
        async with client.get(running.url + "/health") as answer:
            assert answer.status == 503
            assert "decode0 is drained" in (await answer.json())["error"]["message"]
        status, headers, answer_body = await post(running, "/generate", ask())
        assert (status, answer_body["error"]["code"]) == (503, "draining")
        assert "x-should-retry" not in headers, "another control plane, or the next life of the engine, serves it"
        await running.plane.resume(["decode0"])
        await until(lambda: len(running.telemetry.of(Event.ENGINE_READY)) == 3)
        status, _, _ = await post(running, "/generate", ask())
        assert status == 200


# ---- aborts and retries -------------------------------------------------------------------------------


async def test_abort_request_aborts_by_id_and_all(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        answers: list[tuple[int, Any]] = []

        async def hang(rid: str) -> None:
            status, _, answer = await post(running, "/generate", ask(decode={"silent": True}, rid=rid))
            answers.append((status, answer["error"]["message"]))

        async with anyio.create_task_group() as tasks:
            for rid in ("one", "two", "three"):
                tasks.start_soon(hang, rid)
            await until(lambda: running.ranks["decode0"].running == 3)
            _, _, aborted = await post(running, "/abort_request", {"rid": "one"})
            assert len(aborted["aborted"]) == 1
            await until(lambda: len(answers) == 1)
            _, _, aborted = await post(running, "/abort_request", {"rid": "", "abort_all": True})
            assert len(aborted["aborted"]) == 2
        assert answers == [(499, "room aborted: asked by /abort_request")] * 3
        status, _, _ = await post(running, "/abort_request", {})
        assert status == 400


async def test_an_abort_answers_its_client_even_if_no_engine_reacts(tmp_path: Path) -> None:
    def deaf(rank: FakeRank) -> None:
        rank.deaf = True

    config = pair_config(tmp_path, deadlines=DeadlinesConfig(allocated=600.0, ack=600.0))
    async with stage(config, deaf) as running:
        answers: list[tuple[int, str, str]] = []

        async def hang() -> None:
            body = ask(prefill={"silent": True}, decode={"silent": True})
            status, _, answer = await post(running, "/generate", body)
            answers.append((status, answer["error"]["type"], answer["error"]["message"]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hang)
            await until(lambda: all(rank.running for rank in running.ranks.values()))
            await running.plane.abort(None, "the operator says so")
            await until(lambda: bool(answers))
        assert answers == [(503, "server_error", "room aborted: the operator says so")]
        assert running.telemetry.of(Event.ROOM_ABORTED) == []


async def test_the_openai_client_does_not_repeat_what_an_operator_aborted(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running, _client(running, max_retries=1) as client:

        async def abort() -> None:
            await until(lambda: bool(running.ranks["decode0"].running))
            await running.plane.abort(None, "the operator says so")

        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(abort)
                with pytest.raises(openai.InternalServerError) as aborted:
                    await client.completions.create(
                        model=MODEL, prompt="hello", extra_body={"fake": {"decode": {"silent": True}}}
                    )
        assert (aborted.value.status_code, aborted.value.code) == (503, "admin")
        assert len(running.telemetry.of(Event.ROOM_OPENED)) == 1


async def test_a_mismatch_is_prefilled_once_more_in_a_new_room(tmp_path: Path) -> None:
    """No byte went out yet: the client never learns of it. The second time it does.

    The verdict comes over the link, after the HTTP error that it caused.
    """
    async with stage(pair_config(tmp_path)) as running:
        body = ask(decode={"mismatch": True})
        status, _, answer = await post(running, "/generate", body)
        assert status == 500
        assert answer["error"]["code"] == "integrity"
        assert "index_k differs" in answer["error"]["message"]
        assert len(running.telemetry.of(Event.ROOM_OPENED)) == 2
        assert running.telemetry.of(Event.DIGEST_MISMATCH)[0]["pools"] == ["index_k"]


# ---- SGLang's other routes ----------------------------------------------------------------------------


async def test_the_looking_routes(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running, aiohttp.ClientSession() as client:
        await post(running, "/generate", ask())
        async with client.get(running.url + "/health_generate") as answer:
            assert answer.status == 200
        async with client.get(running.url + "/server_info") as answer:
            info = await answer.json()
            assert info["state"] == "ready"
            assert {engine["name"] for engine in info["engines"]} == {"prefill0", "decode0"}
        async with client.get(running.url + "/metrics") as answer:
            text = await answer.text()
            assert 'dsv4ctl:requests_total{path="/generate",status="200"}' in text
            assert 'dsv4ctl:engine_state{engine="decode0",role="decode",state="ready"} 1.0' in text
        async with client.post(running.url + "/flush_cache") as answer:
            assert answer.status == 200


async def test_flush_is_refused_while_an_engine_is_busy(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        async with streaming(running, ask(decode={"tokens": 2, "interval": 3600})) as answer:
            await answer.content.readany()
            status, _, refused = await post(running, "/flush_cache", {})
        assert (status, refused["error"]["code"]) == (400, "busy")
        assert "decode0 rank 0: busy: 1 request is running" in refused["error"]["message"]


async def test_an_engines_error_event_is_the_last_of_a_stream(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        async with streaming(running, ask(decode={"tokens": 9, "error_after": 2})) as answer:
            events = await events_of(answer)
        assert len(events) == 3
        assert "told to fail" in events[-1]
        await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTED)))
