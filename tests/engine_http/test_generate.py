"""POST /generate, as SGLang's clients and the gateway use it."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey
from dsv4ctl.engine_adapters.reference.tokenizer import BOS, EOS, encode_prompt
from http_engine import aborted, ended, events, next_event, served, tokens

pytestmark = pytest.mark.asyncio

ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}


async def test_whole_answer_has_sglang_s_shape() -> None:
    async with served([*tokens(b"hi"), ended(cached=2)]) as client:
        response = await client.post("/generate", {"input_ids": [BOS, 65], "rid": "mine"})
        body = await response.json()
    assert response.status == 200
    assert body["text"] == "hi"
    assert body["output_ids"] == [104, 105]
    latency = body["meta_info"].pop("e2e_latency")
    assert latency >= 0
    assert body["meta_info"] == {
        "id": "mine",
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "cached_tokens": 2,
        "finish_reason": {"type": "length", "length": 2},
    }


async def test_text_is_a_prompt_that_begins_with_bos_and_sampling_params_reach_the_engine() -> None:
    sampling = {"max_new_tokens": 5, "temperature": 0.7, "ignore_eos": True}
    async with served([*tokens([97, EOS]), ended("stop")]) as client:
        response = await client.post("/generate", {"text": "hé", "sampling_params": sampling})
        body = await response.json()
        (request,) = client.engine.requests
    assert request.input_ids == tuple(encode_prompt("hé"))
    assert request.max_new_tokens == 5
    assert request.ignore_eos
    assert body["text"] == "a"
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


async def test_stream_tells_the_answer_so_far_and_then_done() -> None:
    async with served(tokens(b"h")) as client:
        body = {"input_ids": [BOS], "stream": True, "rid": "mine"}
        async with client.http.post(f"{client.url}/generate", json=body) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/event-stream")
            first = await next_event(response)
            client.engine.emit(client.engine.requests[0], [*tokens(b"i"), ended(cached=1)])
            rest = events(await response.text())
    assert (first["text"], first["output_ids"]) == ("h", [104])
    assert first["meta_info"] == {
        "id": "mine",
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "finish_reason": None,
    }
    assert rest[-1] == "[DONE]"
    last = rest[-2]
    assert (last["text"], last["output_ids"]) == ("hi", [104, 105])
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert last["meta_info"]["cached_tokens"] == 1
    assert client.engine.aborts == []


async def test_prefill_engine_tells_the_first_token_only_and_hands_the_request_on_as_it_is() -> None:
    async with served([*tokens(b"x"), ended()], role="prefill") as client:
        body = {"input_ids": [BOS], "sampling_params": {"max_new_tokens": 9}, **ROOM}
        response = await client.post("/generate", body)
        told = await response.json()
        client.engine.answer = [*tokens(b"xyz"), ended()]
        more = await (await client.post("/generate", body)).json()
    assert told["output_ids"] == more["output_ids"] == [120]
    assert more["meta_info"]["completion_tokens"] == 1
    request = client.engine.requests[0]
    assert request.max_new_tokens == 9
    assert request.key == RoomKey(7, 1)
    assert (request.bootstrap_host, request.bootstrap_port) == ("127.0.0.1", 8998)


@pytest.mark.parametrize("missing", sorted(ROOM))
async def test_decode_engine_names_the_bootstrap_field_that_is_missing(missing: str) -> None:
    async with served([ended()], role="decode") as client:
        body = {"input_ids": [BOS], **{name: value for name, value in ROOM.items() if name != missing}}
        response = await client.post("/generate", body)
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["message"].startswith(f"{missing} is missing: a decode engine")
    assert client.engine.requests == []


@pytest.mark.parametrize(
    ("named", "status", "says"),
    [
        ("3", 200, ""),
        ("2", 409, "room 7 is at generation 3, the request names 2"),
        ("new", 400, 'header x-dsv4ctl-generation is "new": a whole number expected'),
    ],
)
async def test_request_of_another_generation_is_refused(named: str, status: int, says: str) -> None:
    async with served([ended()], role="prefill") as client:
        client.engine.live_generation = 3
        body = {"input_ids": [BOS], **ROOM}
        response = await client.post("/generate", body, {"x-dsv4ctl-generation": named})
        told = await response.json()
    assert response.status == status
    assert told.get("error", {"message": ""})["message"] == says
    assert len(client.engine.requests) == (status == 200)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of text and input_ids is expected"),
    ({"text": "a", "input_ids": [1]}, "exactly one of text and input_ids is expected"),
    ({"text": ["a", "b"]}, 'text is ["a", "b"]: one prompt a request is served'),
    ({"text": "\ud800"}, "text holds an unpaired surrogate at character 0"),
    ({"input_ids": [[1], [2]]}, "input_ids is a batch: one prompt a request is served"),
    ({"input_ids": "1"}, 'input_ids is "1": a list of token ids expected'),
    ({"input_ids": [1, 264]}, "input_ids[1] is 264: a token id from 0 to 263 expected"),
    ({"input_ids": [True]}, "input_ids[0] is true: a token id"),
    ({"input_ids": [1], "return_logprob": True}, "return_logprob true is not supported"),
    ({"input_ids": [1], "stream": "yes"}, 'stream is "yes": true or false expected'),
    ({"input_ids": [1], "rid": ["a"]}, "rid is"),
    ({"input_ids": [1], "bootstrap_room": [1, 2]}, "bootstrap_room is [1, 2]: an integer"),
    ({"input_ids": [1], "bootstrap_room": 2**63}, "bootstrap_room is 9223372036854775808: an integer"),
    ({"input_ids": [1], "bootstrap_port": 65536}, "bootstrap_port is 65536: an integer from 1 to 65535"),
    ({"input_ids": [1], "sampling_params": [1]}, "sampling_params is [1]: a JSON object expected"),
    ({"input_ids": [1], "sampling_params": {"temperature": "0"}}, 'temperature is "0": a number expected'),
    ({"input_ids": [1], "sampling_params": {"temperature": float("nan")}}, "temperature is NaN: a number"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens is 0: an integer of at"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 1.0}}, "max_new_tokens is 1.0: an integer of at"),
    ({"input_ids": [1], "sampling_params": {"max_new_token": 4}}, "did you mean max_new_tokens?"),
    ({"input_ids": [1], "sampling_params": {"n": 2}}, "n 2 is not supported"),
    ({"input_ids": [1], "sampling_params": {"stop": ["x"]}}, 'stop ["x"] is not supported'),
]


@pytest.mark.parametrize(("body", "says"), WRONG, ids=[says[:40] for _, says in WRONG])
async def test_bad_request_is_told_what_is_wrong(body: dict[str, Any], says: str) -> None:
    async with served([ended()]) as client:
        response = await client.post("/generate", body)
        error = (await response.json())["error"]
    assert response.status == 400
    assert says in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)
    assert client.engine.requests == []


async def test_engine_s_own_refusals_are_bad_requests() -> None:
    async with served([ended()]) as client:
        long = await client.post("/generate", {"input_ids": [1] * 1000})
        told = await long.json()
        unknown = await client.post("/generate", {"input_ids": [1], "bootstrap_room": 404})
    assert long.status == unknown.status == 400
    assert told["error"]["message"] == "1128 tokens asked for, the context holds 1024"


ABORTS = [
    (AbortSource.INTEGRITY, 500),
    (AbortSource.ENGINE_FAULT, 500),
    (AbortSource.DEADLINE, 500),
    (None, 500),
    (AbortSource.DRAIN, 503),
    (AbortSource.ADMIN, 503),
    (AbortSource.CLIENT, 400),
]


@pytest.mark.parametrize(("source", "status"), ABORTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_abort_is_never_a_short_answer(source: AbortSource | None, status: int, stream: bool) -> None:
    """Before the first byte a stream too still has a status of its own. Report 37."""
    async with served([aborted(source)]) as client:
        response = await client.post("/generate", {"input_ids": [BOS], "stream": stream})
        error = (await response.json())["error"]
    assert response.status == status
    named = {"source": source.value} if source is not None else {}
    assert error == {"message": "why", "type": "aborted", "code": status, **named}
    assert client.engine.aborts == [], "the engine has ended it itself"


async def test_abort_in_mid_answer_is_not_hidden_by_its_tokens() -> None:
    """Report 37."""
    async with served([*tokens(b"partial"), aborted(AbortSource.INTEGRITY)]) as client:
        response = await client.post("/generate", {"input_ids": [BOS]})
    assert response.status == 500


async def test_abort_in_mid_stream_is_an_error_event_without_done() -> None:
    async with served(tokens(b"h")) as client:
        body = {"input_ids": [BOS], "stream": True}
        async with client.http.post(f"{client.url}/generate", json=body) as response:
            await next_event(response)
            client.engine.emit(client.engine.requests[0], [aborted(AbortSource.DEADLINE)])
            rest = events(await response.text())
    error = {"message": "why", "type": "aborted", "code": 500, "source": "deadline"}
    assert rest == [{"error": error}]


async def test_reason_nobody_knows_is_an_abort() -> None:
    async with served([*tokens(b"h"), ended("retracted")]) as client:
        response = await client.post("/generate", {"input_ids": [BOS]})
    assert response.status == 500


async def test_engine_that_generates_too_much_is_at_fault_and_told_to_stop() -> None:
    async with served(tokens(b"abc")) as client:
        body = {"input_ids": [BOS], "sampling_params": {"max_new_tokens": 2}}
        response = await client.post("/generate", body)
        error = (await response.json())["error"]
    assert response.status == 500
    assert error["message"] == "the engine generated more than the 2 tokens asked for"
    assert [rid for rid, _ in client.engine.aborts] == [client.engine.requests[0].rid]


async def test_faulty_engine_takes_no_request() -> None:
    async with served([ended()]) as client:
        client.engine.why_faulty = "thread scheduler died"
        response = await client.post("/generate", {"input_ids": [BOS]})
        error = (await response.json())["error"]
    assert response.status == 503
    assert error["message"] == "thread scheduler died"
    assert client.engine.requests == []
