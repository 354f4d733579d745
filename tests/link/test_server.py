"""The control plane's end of a link, against real sockets."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest
from anyio.abc import SocketAttribute, SocketStream

from dsv4ctl.controlplane.link import server
from dsv4ctl.controlplane.link.codec import MAX_FRAME_BYTES, Decoder, FrameError, encode
from dsv4ctl.controlplane.link.handshake import Expected
from dsv4ctl.controlplane.link.server import Link, LinkLostError, LinkServer, QueryError
from dsv4ctl.controlplane.link.wire import (
    WIRE_VERSION,
    Answer,
    Fenced,
    Hello,
    Query,
    Received,
    Refused,
    Role,
    ToControlPlane,
    ToRank,
    Welcome,
)
from fake_engine import GEOMETRY
from running import until

pytestmark = pytest.mark.asyncio


class Owner:
    """A LinkHandler that remembers."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.frames: list[ToControlPlane] = []
        self.errors: list[tuple[str, int]] = []
        self.refusals: list[str] = []
        self.losses: list[str] = []

    def expected(self) -> Mapping[str, Expected]:
        return {"i": Expected("prefill0", Role.PREFILL, 0, 1)}

    def connected(self, link: Link) -> None:
        self.links.append(link)

    def received(self, link: Link, frame: ToControlPlane) -> None:
        if frame == Received(666):
            raise FrameError("seq 666 was never sent")
        if frame == Received(500):
            raise ZeroDivisionError("a fault of ours")
        self.frames.append(frame)

    def malformed(self, hello: Hello | None, error: str, count: int) -> None:
        self.errors.append((error, count))

    def refused(self, hello: Hello | None, reason: str) -> None:
        self.refusals.append(reason)

    def lost(self, link: Link, reason: str) -> None:
        self.losses.append(reason)


def _hello(wire: int = WIRE_VERSION) -> Hello:
    return Hello(wire, "prefill0", Role.PREFILL, 0, 1, "i", 1, "http://127.0.0.1:1", 9, GEOMETRY)


@asynccontextmanager
async def _serving(tmp_path: Path) -> AsyncIterator[tuple[Owner, str]]:
    owner = Owner()
    path = str(tmp_path / "link.sock")
    async with anyio.create_task_group() as tasks:
        await tasks.start(LinkServer(path, owner, 0.5).serve)
        with anyio.fail_after(60):
            yield owner, path
        tasks.cancel_scope.cancel()


async def _frames(stream: SocketStream, count: int) -> list[ToRank | FrameError]:
    decoder: Decoder[ToRank] = Decoder(ToRank)
    frames: list[ToRank | FrameError] = []
    while len(frames) < count:
        frames += decoder.feed(await stream.receive())
    return frames


@asynccontextmanager
async def _welcomed(tmp_path: Path) -> AsyncIterator[tuple[Owner, SocketStream]]:
    async with _serving(tmp_path) as (owner, path), await anyio.connect_unix(path) as stream:
        await stream.send(encode(_hello()))
        assert await _frames(stream, 1) == [Welcome(WIRE_VERSION, 0.5)]
        yield owner, stream


async def test_only_the_owner_may_connect(tmp_path: Path) -> None:
    async with _serving(tmp_path) as (_, path):
        assert stat.S_IMODE((await anyio.Path(path).stat()).st_mode) == 0o600


async def test_frames_sent_along_with_hello_are_not_lost(tmp_path: Path) -> None:
    async with _serving(tmp_path) as (owner, path), await anyio.connect_unix(path) as stream:
        await stream.send(encode(_hello()) + encode(Received(1)))
        await until(lambda: owner.frames == [Received(1)])


async def test_malformed_frames_are_counted_and_survived(tmp_path: Path) -> None:
    """Report 20: at the control plane."""
    async with _welcomed(tmp_path) as (owner, stream):
        unknown = msgspec.msgpack.encode({"type": "NoSuchFrame"})
        for body in (b"\xc1", unknown, msgspec.msgpack.encode({"type": "Received", "seq": "x"})):
            await stream.send(len(body).to_bytes(4, "big") + body)
        await stream.send(encode(Received(666)) + encode(Received(2)))
        await until(lambda: owner.frames == [Received(2)])
        assert [count for _, count in owner.errors] == [1, 2, 3, 4]
        assert "NoSuchFrame" in owner.errors[1][0]
        assert owner.errors[3][0] == "seq 666 was never sent"
        assert owner.losses == []


async def test_a_frame_too_long_loses_the_link_and_not_the_server(tmp_path: Path) -> None:
    async with _welcomed(tmp_path) as (owner, stream):
        await stream.send((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        await until(lambda: bool(owner.losses))
        assert "the stream is lost" in owner.losses[0]


async def test_a_link_that_ends_as_a_frame_comes_says_nothing_else(tmp_path: Path) -> None:
    loop, said = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: said.append(context))
    async with _welcomed(tmp_path) as (owner, stream):
        await until(lambda: bool(owner.links))
        await anyio.wait_all_tasks_blocked()
        stream.extra(SocketAttribute.raw_socket).send(encode(Received(1)))
        loop.call_soon(owner.links[0].close, "over")  # in the turn that finds the socket readable, before it is read
        await until(lambda: owner.losses == ["over"])
    assert said == []


async def test_a_fault_of_ours_costs_one_link(tmp_path: Path) -> None:
    async with _welcomed(tmp_path) as (owner, stream):
        await stream.send(encode(Received(500)))
        await until(lambda: bool(owner.losses))
        assert "a fault of ours" in owner.losses[0]
        async with await anyio.connect_unix(str(tmp_path / "link.sock")) as again:
            await again.send(encode(_hello()))
            assert isinstance((await _frames(again, 1))[0], Welcome)


async def test_a_wrong_wire_version_is_told_and_hung_up_on(tmp_path: Path) -> None:
    async with _serving(tmp_path) as (owner, path), await anyio.connect_unix(path) as stream:
        await stream.send(encode(_hello(wire=WIRE_VERSION + 1)))
        (refused,) = await _frames(stream, 1)
        assert isinstance(refused, Refused)
        assert str(WIRE_VERSION + 1) in refused.reason
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
        assert owner.refusals == [refused.reason]


async def test_a_connection_that_says_nothing_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HELLO_DEADLINE", 0.05)
    async with _serving(tmp_path) as (owner, path), await anyio.connect_unix(path) as stream:
        (refused,) = await _frames(stream, 1)
        assert isinstance(refused, Refused)
        assert owner.refusals == ["no Hello within 0.05 s"]


async def test_a_query_is_answered_or_refused_by_the_rank(tmp_path: Path) -> None:
    async with _welcomed(tmp_path) as (owner, stream):
        answers: list[object] = []

        async def ask() -> None:
            answers.append(await owner.links[0].query("tickets", 60))
            with pytest.raises(QueryError, match="busy"):
                await owner.links[0].query("flush", 60)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            assert await _frames(stream, 1) == [Query(1, "tickets")]
            await stream.send(encode(Answer(1, {"tickets": 3})))
            assert await _frames(stream, 1) == [Query(2, "flush")]
            await stream.send(encode(Answer(2, None, error="busy")))
        assert answers == [{"tickets": 3}]


async def test_a_query_has_a_deadline_and_its_late_answer_is_nobodys(tmp_path: Path) -> None:
    async with _welcomed(tmp_path) as (owner, stream):
        with pytest.raises(TimeoutError):
            await owner.links[0].query("stacks", 0.05)
        await stream.send(encode(Answer(1, "late")) + encode(Received(1)))
        await until(lambda: owner.frames == [Received(1)])
        assert owner.errors == []


async def test_a_lost_link_fails_its_queries_and_its_sends(tmp_path: Path) -> None:
    async with _welcomed(tmp_path) as (owner, stream):
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(LinkLostError, match="the rank closed the link"):
                    await owner.links[0].query("stacks", 60)

            tasks.start_soon(ask)
            await _frames(stream, 1)
            await stream.aclose()
        assert owner.losses == ["the rank closed the link"]
        with pytest.raises(LinkLostError):
            owner.links[0].send(Fenced("x"))


async def test_a_frame_is_written_once_it_is_in_the_socket_of_the_rank(tmp_path: Path) -> None:
    async with _welcomed(tmp_path) as (owner, stream):
        link, written = owner.links[0], list[int]()
        for number in range(40):  # more than a socket holds
            link.send(Fenced("x" * 100_000), partial(written.append, number))
        assert not written
        await until(lambda: bool(written))
        await anyio.wait_all_tasks_blocked()
        there = len(stream.extra(SocketAttribute.raw_socket).recv(1 << 26, socket.MSG_PEEK))
        assert len(written) == there // len(encode(Fenced("x" * 100_000))) < 40
        await _frames(stream, 40)
        await until(lambda: len(written) == 40)
        assert written == [*range(40)]


async def test_a_rank_that_stops_reading_loses_its_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our memory is bounded, whatever a rank does."""
    monkeypatch.setattr(server, "QUEUE_FRAMES", 8)
    async with _welcomed(tmp_path) as (owner, _):
        link = owner.links[0]
        while link.lost is None:
            with suppress(LinkLostError):
                link.send(Fenced("x" * 1000))
            await anyio.lowlevel.checkpoint()
        assert "does not read" in link.lost
        await until(lambda: bool(owner.losses))
