"""The OpenAI routes, driven by OpenAI's own client where it can say what is wanted."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.engine_adapters.reference.tokenizer import BOS, EOS, encode_chat, encode_prompt
from http_engine import MODEL, aborted, ended, events, served, tokens

pytestmark = pytest.mark.asyncio

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def test_chat() -> None:
    async with served([*tokens(b"hi"), *tokens([EOS]), ended("stop", cached=3)]) as client:
        reply = await client.openai.chat.completions.create(
            model=MODEL, messages=HELLO, max_completion_tokens=7, temperature=0.5, top_p=0.9, seed=1
        )
    (request,) = client.engine.requests
    assert request.input_ids == tuple(encode_chat([("user", "hello")]))
    assert request.max_new_tokens == 7
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "hi")
    assert choice.finish_reason == "stop"
    assert reply.id.startswith("chatcmpl-")
    assert request.rid.startswith(reply.id)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(request.input_ids)
    assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (3, len(request.input_ids) + 3)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


async def test_chat_content_may_be_text_parts_and_every_role_of_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[Any] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    async with served([ended()]) as client:
        await client.openai.chat.completions.create(model=MODEL, messages=messages)
    pairs = [("system", "s"), ("user", "ab"), ("assistant", "c"), ("tool", "t")]
    assert client.engine.requests[0].input_ids == tuple(encode_chat(pairs))


async def test_chat_stream_with_usage() -> None:
    async with served([*tokens("grüß".encode()), ended()]) as client:
        stream = await client.openai.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    *told, usage = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == "grüß"
    assert [chunk.choices[0].finish_reason for chunk in told][-1] == "length"
    assert [chunk.usage for chunk in told] == [None] * len(told)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 6


async def test_chat_stream_without_usage_ends_with_done() -> None:
    async with served([*tokens(b"a"), ended()]) as client:
        body = {"model": MODEL, "messages": HELLO, "stream": True}
        response = await client.post("/v1/chat/completions", body)
        told = events(await response.text())
    assert told[-1] == "[DONE]"
    assert all("usage" not in chunk and chunk["choices"] for chunk in told[:-1])


async def test_completion() -> None:
    async with served([*tokens(b"hi"), ended()]) as client:
        reply = await client.openai.completions.create(model=MODEL, prompt="hey", max_tokens=2)
        await client.openai.completions.create(model=MODEL, prompt=[BOS, 65])
    assert reply.choices[0].text == "hi"
    assert reply.choices[0].finish_reason == "length"
    assert [request.input_ids for request in client.engine.requests] == [
        tuple(encode_prompt("hey")),
        (BOS, 65),
    ]
    assert [request.max_new_tokens for request in client.engine.requests] == [2, 16]


async def test_completion_stream() -> None:
    async with served([*tokens(b"hi"), ended()]) as client:
        stream = await client.openai.completions.create(model=MODEL, prompt="hey", stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hi"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_prompt_fields_of_the_gateway_are_taken_on_openai_routes() -> None:
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7, "rid": "r"}
    async with served([*tokens(b"hi"), ended()], role="decode") as client:
        reply = await client.openai.chat.completions.create(model=MODEL, messages=HELLO, extra_body=room)
    assert client.engine.requests[0].key.room == 7
    assert reply.id == "r"


async def test_models() -> None:
    async with served() as client:
        page = await client.openai.models.list()
    assert [model.id for model in page.data] == [MODEL]


async def test_unknown_model_is_not_found() -> None:
    async with served([ended()]) as client:
        with pytest.raises(openai.NotFoundError, match='model "gpt-9" is not served here') as raised:
            await client.openai.chat.completions.create(model="gpt-9", messages=HELLO)
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


CHAT_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"logprobs": True}, "logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"stop": ["x"]}, "stop"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logit_bias": {"1": 5}}, "logit_bias"),
    ({"temperature": "hot"}, "temperature"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "narrator", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x\ud800"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"model": None}, "model"),
]


@pytest.mark.parametrize(("change", "param"), CHAT_WRONG, ids=[str(change)[:40] for change, _ in CHAT_WRONG])
async def test_what_is_not_served_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    async with served([ended()]) as client:
        response = await client.post("/v1/chat/completions", {"model": MODEL, "messages": HELLO} | change)
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"] == param
    assert param.partition("[")[0] in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", None)
    assert client.engine.requests == []


async def test_what_changes_nothing_is_accepted() -> None:
    neutral = {
        "n": 1,
        "tools": [],
        "logprobs": False,
        "response_format": {"type": "text"},
        "stop": None,
        "frequency_penalty": 0,
        "user": "u",
        "metadata": {},
    }
    async with served([ended()]) as client:
        response = await client.post("/v1/chat/completions", {"model": MODEL, "messages": HELLO} | neutral)
    assert response.status == 200


@pytest.mark.parametrize(
    "change", [{"prompt": ["a", "b"]}, {"prompt": [[1]]}, {"prompt": None}, {"logprobs": 0}, {"echo": True}]
)
async def test_completions_refuse_batches_and_logprobs(change: dict[str, Any]) -> None:
    async with served([ended()]) as client:
        response = await client.post("/v1/completions", {"model": MODEL, "prompt": "x"} | change)
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"] == next(iter(change))


async def test_abort_is_an_error_of_openai_s_shape() -> None:
    async with served([*tokens(b"a"), aborted(AbortSource.INTEGRITY, "digest of c4_kv differs")]) as client:
        with pytest.raises(openai.InternalServerError, match="digest of c4_kv differs") as raised:
            await client.openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert raised.value.code == "aborted"
    assert raised.value.type == "server_error"


async def test_abort_in_mid_stream_raises_in_openai_s_client() -> None:
    async with served(tokens(b"a")) as client:
        stream = await client.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content == "a":
                break
        client.engine.emit(client.engine.requests[0], [aborted(AbortSource.DRAIN, "drained")])
        with pytest.raises(openai.APIError, match="drained"):
            async for _ in stream:
                pass
