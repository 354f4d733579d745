"""The admin API as a client sees it: HTTP/1.1 and JSON over a Unix socket of the owner's alone."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest

from dsv4ctl.controlplane.admin.errors import AdminError
from dsv4ctl.controlplane.admin.registry import VERBS
from dsv4ctl.controlplane.config.schema import UnsafeConfig, embedded
from dsv4ctl.controlplane.telemetry.events import Event
from fake_plane import FakePlane, room, served

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def api(plane: FakePlane, path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        served(plane, path),
        aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(str(path))) as http,
    ):
        yield http


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
    async with http.post(path, data=body if isinstance(body, bytes) else json.dumps(body)) as response:
        return response.status, await response.json()


async def get(http: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    async with http.get(path) as response:
        return response.status, await response.json()


async def test_the_socket_is_the_owners_alone_and_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    async with served(FakePlane(), path):
        mode = (await anyio.Path(path).stat()).st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
    assert not await anyio.Path(path).exists()


async def test_a_peer_with_another_uid_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4ctl.controlplane.admin.server.peer_credentials", lambda connected: (99, 65534))
    plane = FakePlane()
    async with api(plane, tmp_path / "s") as http:
        status, answer = await get(http, "/status")
        assert (status, answer["error"]["code"]) == (403, "denied")
        assert answer["error"]["message"].startswith("uid 65534 may not call: ")
        assert (await post(http, "/abort", {"all": True}))[0] == 403
    assert plane.asked == []
    assert [one["uid"] for one in plane.telemetry.recent() if one["event"] == "admin.denied"] == [65534] * 2


@pytest.mark.parametrize("uid", [0, os.getuid()])
async def test_root_and_the_owner_may_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    monkeypatch.setattr("dsv4ctl.controlplane.admin.server.peer_credentials", lambda connected: (99, uid))
    async with api(FakePlane(), tmp_path / "s") as http:
        assert (await get(http, "/status"))[0] == 200


async def test_reading(tmp_path: Path) -> None:
    plane = FakePlane()
    async with api(plane, tmp_path / "s") as http:
        assert await get(http, "/status") == (200, await plane.status())
        assert await get(http, "/engines") == (200, await plane.engines())
        assert await get(http, "/tickets") == (200, await plane.tickets())
        assert await get(http, "/rooms") == (200, plane.live)
        assert await get(http, "/rooms/7") == (200, await plane.rooms(7))
        assert await get(http, "/rooms?room=7") == (200, await plane.rooms(7))
        status, versions = await get(http, "/version")
        assert (status, versions["pid"]) == (200, os.getpid())
        async with http.get("/metrics") as response:
            assert response.content_type == "text/plain"
            assert 'dsv4ctl:tickets{engine="decode0",rank="0"} 2.0' in await response.text()
    assert plane.asked == []


async def test_acting(tmp_path: Path) -> None:
    plane = FakePlane(msgspec.structs.replace(embedded(), unsafe=UnsafeConfig(runtime=True)))
    async with api(plane, tmp_path / "s") as http:
        assert await post(http, "/abort", {"room": 7, "reason": "test"}) == (200, {"aborted": ["7.1"]})
        assert await post(http, "/abort", {"all": True}) == (200, {"aborted": ["7.1", "8.1"]})
        assert (await post(http, "/drain", {"engines": ["prefill0"], "deadline_s": 3}))[0] == 200
        assert (await post(http, "/drain", b""))[0] == 200
        assert await post(http, "/resume", {"engines": ["prefill0"]}) == (200, {"resumed": ["prefill0"]})
        assert await post(http, "/guards", {"off": ["quiesce"]}) == (200, {"off": ["quiesce"]})
        assert await post(http, "/guards", {"all_on": True}) == (200, {"off": []})
        assert await post(http, "/guards", {}) == (200, {"off": []})
        assert (await post(http, "/flush", {}))[0] == 200
    assert plane.asked == [
        ("abort", 7, "test"),
        ("abort", None, "operator"),
        ("drain", ["prefill0"], 3.0),
        ("drain", [], None),
        ("resume", ["prefill0"]),
        ("set_guards", ["quiesce"]),
        ("set_guards", []),
        ("flush",),
    ]
    logged = [one["verb"] for one in plane.telemetry.recent() if one["event"] == "admin.request"]
    assert logged == ["abort", "abort", "drain", "drain", "resume", "guards", "guards", "guards", "flush"]


REFUSED = [
    ("POST", "/abort", {}, 400, "bad_request", "expected one room, or `--all`"),
    ("POST", "/abort", {"room": 7, "all": True}, 400, "bad_request", "expected one room, or `--all`"),
    ("POST", "/abort", {"room": 9}, 404, "not_found", "no room 9: "),
    ("POST", "/abort", {"room": 5}, 409, "refused", "room 5 has already ended: closed"),
    ("POST", "/abort", {"roon": 9}, 400, "bad_request", "`roon`. Arguments: room, all, reason"),
    ("POST", "/abort", b"{", 400, "bad_request", "abort: expected a JSON object"),
    ("POST", "/drain", {"engines": ["prefil0"]}, 400, "bad_request", 'unknown engine "prefil0". Did you mean'),
    ("POST", "/drain", {"deadline_s": 0}, 400, "bad_request", "Expected `float` > 0.0"),
    ("POST", "/resume", {"engines": ["x"]}, 400, "bad_request", "Expected one of: decode0, prefill0"),
    ("POST", "/guards", {"off": ["quiese"]}, 400, "bad_request", 'unknown guard "quiese". Did you mean quiesce?'),
    ("POST", "/guards", {"off": ["quiesce"]}, 409, "refused", "`unsafe.runtime = true`"),
    ("POST", "/guards", {"off": ["quiesce"], "all_on": True}, 400, "bad_request", "not both"),
    ("POST", "/drain", b"x" * 70_000, 413, "bad_request", "at most 65536 bytes"),
    ("POST", "/status", {}, 405, "bad_request", "/status is called with GET"),
    ("GET", "/rooms/9", None, 404, "not_found", "no room 9: "),
    ("GET", "/rooms/x", None, 400, "bad_request", "rooms: Expected `int | null`"),
    ("GET", "/status?x=1", None, 400, "bad_request", "Arguments: none"),
    ("GET", "/stats", None, 404, "not_found", "no such path /stats; there are: /status, "),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "code", "message"), REFUSED)
async def test_what_is_refused_says_why(
    tmp_path: Path, method: str, path: str, body: Any, status: int, code: str, message: str
) -> None:
    plane = FakePlane()
    plane.live.append(room(5, "closed"))
    async with api(plane, tmp_path / "s") as http:
        found, answer = await (post(http, path, body) if method == "POST" else get(http, path))
    assert (found, answer["error"]["code"]) == (status, code)
    assert message in answer["error"]["message"]
    assert plane.asked == []


async def test_a_fault_of_ours_is_told_logged_and_survived(tmp_path: Path) -> None:
    plane = FakePlane()
    async with api(plane, tmp_path / "s") as http:
        plane.error = ZeroDivisionError("oops")
        status, answer = await get(http, "/status")
        assert (status, answer["error"]) == (500, {"code": "failed", "message": "ZeroDivisionError: oops"})
        plane.error = AdminError("refused", "busy")
        assert (await get(http, "/status"))[0] == 409
        plane.error = None
        assert (await get(http, "/status"))[0] == 200
    assert [one["event"] for one in plane.telemetry.recent() if one["level"] == "error"] == ["admin.failed"]


async def test_live_events_follow_the_recent_ones_until_the_server_ends(tmp_path: Path) -> None:
    plane = FakePlane()
    plane.telemetry.emit(Event.ENGINE_READY, engine="prefill0")
    seen: list[str] = []
    async with (
        aiohttp.ClientSession("http://x", connector=aiohttp.UnixConnector(str(tmp_path / "s"))) as http,
        anyio.create_task_group() as tasks,
        served(plane, tmp_path / "s"),
    ):
        response = await http.get("/logs?follow=true")
        assert response.content_type == "application/x-ndjson"
        while "engine.ready" not in seen:
            seen.append(json.loads(await response.content.readline())["event"])
        plane.telemetry.emit(Event.LINK_LOST, "warning", engine="decode0")
        while "link.lost" not in seen:
            seen.append(json.loads(await response.content.readline())["event"])
        tasks.start_soon(response.content.read)  # the server's end must not wait for us
    assert seen == ["engine.ready", "admin.listening", "link.lost"]


async def test_recent_events_without_following(tmp_path: Path) -> None:
    plane = FakePlane()
    async with api(plane, tmp_path / "s") as http, http.get("/logs") as response:
        events = [json.loads(line)["event"] async for line in response.content]
    assert events == ["admin.listening"]


async def test_a_follower_that_leaves_is_forgotten(tmp_path: Path) -> None:
    plane = FakePlane()
    async with api(plane, tmp_path / "s") as http:
        async with http.get("/logs?follow=true") as response:
            await response.content.readline()
            assert plane.followers == 1
        await plane.unfollowed.wait()


async def test_the_openapi_document_describes_every_verb(tmp_path: Path) -> None:
    async with api(FakePlane(), tmp_path / "s") as http:
        status, document = await get(http, "/openapi.json")
    assert status == 200
    assert document["openapi"].startswith("3.1")
    assert document["info"].keys() >= {"title", "version"}
    assert set(document["paths"]) == {path for verb in VERBS for path in verb.paths}
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    for operation in operations:
        assert operation["responses"].keys() == {"200", "default"}
        for parameter in operation.get("parameters", ()):
            assert parameter.keys() >= {"name", "in", "required", "schema", "description"}
    for reference in _references(document):
        target: Any = document
        for step in reference.removeprefix("#/").split("/"):
            target = target[step]
    one = document["paths"]["/rooms/{room}"]["get"]["parameters"][0]
    assert (one["name"], one["in"], one["required"]) == ("room", "path", True)
    drain = document["components"]["schemas"]["DrainArguments"]["properties"]
    assert drain["deadline_s"]["description"]


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if "$ref" in node else []
        return own + [reference for value in node.values() for reference in _references(value)]
    if isinstance(node, list):
        return [reference for value in node for reference in _references(value)]
    return []


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_works(tmp_path: Path) -> None:
    async with served(FakePlane(), tmp_path / "s"):
        command = ["curl", "--silent", "--fail", "--unix-socket", str(tmp_path / "s"), "http://x/status"]
        done = await anyio.run_process(command)
    assert json.loads(done.stdout)["state"] == "ready"
