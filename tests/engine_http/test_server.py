"""The server itself: clients that leave, control routes, errors of HTTP, ports."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anyio
import pytest
from aiohttp import ClientError, ClientSession, web

from dsv4ctl.engine_adapters.reference import server
from dsv4ctl.engine_adapters.reference.http import front
from dsv4ctl.engine_adapters.reference.server import ListenError, serve
from http_engine import MAX_BODY, MODEL, PATIENCE, FakeEngine, ended, next_event, running, served, soon, tokens

pytestmark = pytest.mark.asyncio

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/generate", {"input_ids": [1]}), ("/v1/chat/completions", CHAT)])
async def test_client_that_leaves_aborts_its_own_request_alone(path: str, body: dict[str, Any], stream: bool) -> None:
    """Both requests carry the same rid: SGLang's prefix rule must not hit the other one."""
    async with served() as client:
        host, port = client.url.removeprefix("http://").split(":")
        raw = json.dumps(body | {"stream": stream, "rid": "same"})
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        writers = []
        for _ in range(2):
            client.engine.submitted.clear()
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"{head}{raw}".encode())
            await soon(client.engine.submitted.wait())
            writers.append(writer)
        leaving, staying = client.engine.requests
        writers[0].close()
        await soon(client.engine.aborted.wait())
        ((rid, reason),) = client.engine.aborts
        assert rid == leaving.rid
        assert "client went away" in reason
        assert not staying.rid.startswith(leaving.rid)
        client.engine.emit(staying, [ended()])
        writers[1].close()


async def test_client_that_leaves_in_mid_stream_aborts_its_request() -> None:
    async with served(tokens(b"h")) as client:
        body = {"input_ids": [1], "stream": True}
        async with client.http.post(f"{client.url}/generate", json=body) as response:
            await next_event(response)
            response.close()
        await soon(client.engine.aborted.wait())
        assert [rid for rid, _ in client.engine.aborts] == [client.engine.requests[0].rid]


async def test_client_that_stops_reading_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: web.StreamResponse, __: bytes) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(front, "STALL_S", 0.05)
    monkeypatch.setattr(web.StreamResponse, "write", never)
    async with served(tokens(b"a")) as client:
        body = {"input_ids": [1], "stream": True}
        async with client.http.post(f"{client.url}/generate", json=body) as response:
            with pytest.raises(ClientError):
                await response.read()
        await soon(client.engine.aborted.wait())
    assert [rid for rid, _ in client.engine.aborts] == [client.engine.requests[0].rid]


async def test_client_that_never_sends_its_body_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "STALL_S", 0.05)
    async with served() as client:
        host, port = client.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        with anyio.fail_after(PATIENCE):
            assert await reader.readline() == b"HTTP/1.1 408 Request Timeout\r\n"
        writer.close()


async def test_health_tells_the_fault() -> None:
    async with served([*tokens(b"a"), ended()]) as client:
        well = [(await client.http.get(f"{client.url}{path}")).status for path in ("/health", "/health_generate")]
        client.engine.why_faulty = "no peer"
        ill = [await client.http.get(f"{client.url}{path}") for path in ("/health", "/health_generate")]
        told = [(await response.json())["error"]["message"] for response in ill]
    assert well == [200, 200]
    assert len(client.engine.requests) == 1, "/health_generate generates"
    assert [response.status for response in ill] == [503, 503]
    assert told == ["no peer", "no peer"]


async def test_health_generate_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "HEALTH_GENERATE_S", 0.05)
    async with served() as client:
        response = await client.http.get(f"{client.url}/health_generate")
        assert response.status == 503
        assert len(client.engine.aborts) == 1


async def test_health_generate_of_an_engine_that_needs_a_room_is_health() -> None:
    async with served() as client:
        client.engine.rooms_only = True
        response = await client.http.get(f"{client.url}/health_generate")
    assert response.status == 200
    assert client.engine.requests == []


async def test_abort_request() -> None:
    async with served() as client:
        some = await client.post("/abort_request", {"rid": "abc"})
        everything = await client.post("/abort_request", {"rid": "abc", "abort_all": True})
        nothing = [await client.post("/abort_request", body) for body in ({}, {"rid": ""}, {"rid": 1})]
    assert [some.status, everything.status] == [200, 200]
    assert [rid for rid, _ in client.engine.aborts] == ["abc", None]
    assert [response.status for response in nothing] == [400, 400, 400], "an empty prefix would hit all"


async def test_flush_cache() -> None:
    async with served() as client:
        idle = await client.post("/flush_cache", {})
        client.engine.busy = True
        busy = await client.post("/flush_cache", {})
        error = (await busy.json())["error"]
    assert (idle.status, busy.status) == (200, 400)
    assert error["message"] == "2 requests are running"
    assert client.engine.flushed == 1


async def test_pause_and_continue() -> None:
    async with served() as client:
        for mode in ({"mode": "in_place"}, {"mode": "abort"}, {}):
            paused = await client.post("/pause_generation", mode)
            assert (paused.status, (await paused.json())["status"]) == (200, "ok")
        continued = await client.post("/continue_generation", {"torch_empty_cache": False})
        assert (continued.status, (await continued.json())["status"]) == (200, "ok")
        for mode, shown in (("retract", '"retract"'), ("in-place", '"in-place"'), (["abort"], "one request at a time")):
            refused = await client.post("/pause_generation", {"mode": mode})
            assert refused.status == 400
            assert shown in (await refused.json())["error"]["message"]
        assert client.engine.paused == ["keeping", "aborting", "aborting", "continued"]


async def test_pause_and_continue_without_a_body_are_as_with_an_empty_object() -> None:
    async with served() as client:
        for path in ("/pause_generation", "/continue_generation"):
            response = await client.http.post(f"{client.url}{path}")
            assert (response.status, (await response.json())["status"]) == (200, "ok")
            refused = await client.http.post(f"{client.url}{path}", data=b"[]")
            assert refused.status == 400
        assert client.engine.paused == ["aborting", "continued"]


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info(path: str) -> None:
    async with served(role="prefill") as client:
        response = await client.http.get(f"{client.url}{path}")
        assert await response.json() == {
            "served_model_name": MODEL,
            "disaggregation_mode": "prefill",
            "queues": {"waiting": 0},
        }


BAD_BODIES = [b"{", b"", b"[1]", b'{"a": "\xff"}', b"[" * 5000, b'{"n": ' + b"1" * 5000 + b"}"]


@pytest.mark.parametrize("raw", BAD_BODIES, ids=[repr(raw[:10]) for raw in BAD_BODIES])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/abort_request"])
async def test_body_that_is_no_json_object_is_a_bad_request(path: str, raw: bytes) -> None:
    async with served() as client:
        response = await client.http.post(f"{client.url}{path}", data=raw)
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["message"].startswith("the body is")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_large_body_is_refused_with_the_limit(path: str) -> None:
    async with served() as client:
        response = await client.http.post(f"{client.url}{path}", data=b" " * (MAX_BODY + 1))
        error = (await response.json())["error"]
    assert response.status == 413
    assert error["message"] == f"the body is larger than {MAX_BODY} bytes"


async def test_unknown_path_and_wrong_method_are_told_as_json() -> None:
    async with served() as client:
        nowhere = await client.http.get(f"{client.url}/v1/nothing")
        told = (await nowhere.json())["error"]
        wrong = await client.http.get(f"{client.url}/generate")
        error = (await wrong.json())["error"]
    assert nowhere.status == 404
    assert told == {
        "message": "there is nothing at /v1/nothing",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    assert wrong.status == 405
    assert wrong.headers["Allow"] == "POST"
    assert error["message"] == "/generate takes POST, not GET"


async def test_taken_port_is_told_and_a_left_one_can_be_taken_again() -> None:
    engine = FakeEngine()
    async with running(engine) as port:
        with pytest.raises(ListenError, match=f"port {port} of 127.0.0.1 is taken"):
            await serve(engine, "single", MODEL, "127.0.0.1", port, max_body_bytes=1, ready=lambda _: None)
    async with running(engine, port=port) as again:
        assert again == port


async def test_requests_under_way_are_aborted_when_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LAST_ANSWERS_S", 0.05)
    engine = FakeEngine()
    async with ClientSession() as http, anyio.create_task_group() as tasks:

        async def ask(port: int) -> None:
            with pytest.raises(ClientError):
                await http.post(f"http://127.0.0.1:{port}/generate", json={"input_ids": [1]})

        async with running(engine) as port:
            tasks.start_soon(ask, port)
            await soon(engine.submitted.wait())
    assert [rid for rid, _ in engine.aborts] == [engine.requests[0].rid]
