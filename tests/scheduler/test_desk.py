"""Rooms at the desk: opened on every rank, ended on every path, whoever stays silent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from dsv4ctl.controlplane.config.schema import DeadlinesConfig, EngineConfig, PoliciesConfig
from dsv4ctl.controlplane.link.server import Link
from dsv4ctl.controlplane.link.wire import AbortAck, OpenRoom, Quarantined, Received, Role, RoomReport, ToRank
from dsv4ctl.controlplane.rooms.states import AbortSource, Cancellable, Quiet, RoomKey, RoomState
from dsv4ctl.controlplane.scheduler.estimate import transfer_bytes
from dsv4ctl.controlplane.scheduler.fleet import Engine
from dsv4ctl.controlplane.telemetry.events import Event
from fake_engine import GEOMETRY, FakeRank
from running import PATIENCE, Stage, ask, pair_config, post, stage, until

pytestmark = pytest.mark.asyncio


async def _rooms(running: Stage) -> dict[str, int]:
    counts: dict[str, int] = (await running.plane.status())["rooms"]
    return counts


async def test_an_estimate_is_in_whole_pages_by_span() -> None:
    """Full pools per page, the window's pages, one state; host mirrors move nothing."""
    one = transfer_bytes(GEOMETRY, 1)
    assert one == 2 * 8192 + 2 * 16384 + 4 * 32768 + 2 * 4096
    assert transfer_bytes(GEOMETRY, 256) == one
    many = transfer_bytes(GEOMETRY, 256 * 9 + 1)
    assert many == 10 * (2 * 8192 + 2 * 16384) + 2 * 4 * 32768 + 2 * 4096


def _allocates_after(rank: FakeRank, held: anyio.Event) -> None:
    """What it says of a room that it knows waits for `held`, and nothing else that it says."""
    plain = rank.send

    async def later(frame: Any) -> None:
        await held.wait()
        await plain(frame)

    async def send(frame: Any) -> None:
        if isinstance(frame, RoomReport) and frame.state is RoomState.ALLOCATED:
            rank._start_soon(later, frame)
        else:
            await plain(frame)

    rank.send = send  # type: ignore[method-assign]


async def test_a_room_is_known_to_every_rank_before_its_request(tmp_path: Path) -> None:
    """With the ranks of one engine slow to allocate, no leg is sent."""
    held = anyio.Event()

    def slow(rank: FakeRank) -> None:
        if rank.role is Role.DECODE:
            _allocates_after(rank, held)

    async with stage(pair_config(tmp_path), slow) as running:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: post(running, "/generate", ask()))
            await until(lambda: all(running.log(name, "open") for name in ("prefill0", "decode0")))
            await anyio.wait_all_tasks_blocked()
            assert running.log("prefill0", "leg") == []
            held.set()
        assert len(running.log("prefill0", "leg")) == 1


@pytest.mark.parametrize("others", [True, False])
async def test_the_request_of_ranks_in_order_follows_their_openings_at_once(tmp_path: Path, others: bool) -> None:
    """Of all ranks of the room: with one that is not, it waits until the room is allocated."""
    asked = anyio.Event()

    def late(rank: FakeRank) -> None:
        rank.in_order = others or rank.role is Role.DECODE
        _allocates_after(rank, asked)

    async with stage(pair_config(tmp_path), late) as running:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: post(running, "/generate", ask()))
            await until(lambda: all(running.log(name, "open") for name in ("prefill0", "decode0")))
            if others:
                await until(lambda: all(running.log(name, "leg") for name in ("prefill0", "decode0")))
            else:
                await anyio.wait_all_tasks_blocked()
                assert not running.log("prefill0", "leg")
            asked.set()
        assert all(len(running.log(name, "leg")) == 1 for name in ("prefill0", "decode0"))
        await until(lambda: bool(running.telemetry.of(Event.ROOM_CLOSED)))


async def test_no_request_follows_an_opening_that_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, held = Link.send, list[Callable[[], None]]()

    def send(link: Link, frame: ToRank, written: Callable[[], None] = lambda: None) -> None:
        late = isinstance(frame, OpenRoom) and link.hello.role is Role.DECODE
        plain(link, frame, (lambda: held.append(written)) if late else written)

    def mute(rank: FakeRank) -> None:
        rank.in_order, rank.allocates = True, rank.role is Role.PREFILL

    monkeypatch.setattr(Link, "send", send)
    async with stage(pair_config(tmp_path), mute) as running, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: post(running, "/generate", ask()))
        await until(lambda: bool(held and running.log("decode0", "open")))
        await anyio.wait_all_tasks_blocked()
        assert not running.log("prefill0", "leg")
        held[0]()
        await until(lambda: bool(running.log("prefill0", "leg")))


async def test_an_engine_is_in_order_if_all_its_ranks_are() -> None:
    def rank(in_order: bool) -> Any:
        return SimpleNamespace(link=SimpleNamespace(hello=SimpleNamespace(in_order=in_order)))

    for ranks, found in (([True, True], True), ([True, False], False), ([None, True], False)):
        links = [SimpleNamespace(link=None) if one is None else rank(one) for one in ranks]
        assert Engine.in_order.fget(SimpleNamespace(ranks=dict(enumerate(links)))) is found  # type: ignore[attr-defined]


async def test_a_rank_that_never_allocates_costs_the_deadline_and_no_more(tmp_path: Path) -> None:
    def mute(rank: FakeRank) -> None:
        rank.allocates = rank.role.value != "decode"

    config = pair_config(tmp_path, deadlines=DeadlinesConfig(allocated=0.2, ack=PATIENCE))
    async with stage(config, mute) as running:
        status, _, answer = await post(running, "/generate", ask())
        assert (status, answer["error"]["code"]) == (504, "deadline")
        assert "allocated lasted over 0.2 s" in answer["error"]["message"]
        await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTED)))


async def test_a_writer_that_never_acks_is_fenced_and_the_other_side_is_told(tmp_path: Path) -> None:
    """No ack by the deadline: kill and reap, then `Fenced` to the peer, then the room is over."""

    def deaf(rank: FakeRank) -> None:
        rank.acks = rank.role.value == "decode"

    config = pair_config(tmp_path, deadlines=DeadlinesConfig(ack=1.0, fence=PATIENCE))
    async with stage(config, deaf) as running:
        first = running.ranks["prefill0"]
        await post(running, "/generate", ask(prefill={"silent": True}, decode={"status": 500}))
        await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTED)))
        await until(lambda: running.log("decode0", "fenced") == [first.incarnation])
        order = [record["event"] for record in running.telemetry.records]
        assert order.index(Event.ENGINE_FENCED) < order.index(Event.ROOM_ABORTED)
        await until(lambda: running.ranks["prefill0"] is not first)


@pytest.mark.parametrize(("declared", "ack"), [(Cancellable.CHUNK, 5.0), (Cancellable.PROMPT, 65.0)])
async def test_an_engine_that_computes_prompts_to_their_end_has_the_time_for_it(
    tmp_path: Path, declared: Cancellable, ack: float
) -> None:
    """Report 16: the ranks of a room, and the room itself, have as long as the slowest of its engines declares."""

    def declares(rank: FakeRank) -> None:
        if rank.role.value == "prefill":
            rank.cancellable = declared

    config = pair_config(tmp_path, deadlines=DeadlinesConfig(ack=5.0, loading=60.0))
    async with stage(config, declares) as running:
        assert (await post(running, "/generate", ask()))[0] == 200
        assert [rank.deadlines["ack"] for rank in running.ranks.values()] == [ack, ack]
        said = {engine["name"]: engine["cancellable"] for engine in await running.plane.engines()}
        assert said == {"prefill0": declared.value, "decode0": "chunk"}


async def test_a_poisoned_room_is_released_only_by_a_fence(tmp_path: Path) -> None:
    def poisoned(rank: FakeRank) -> None:
        plain = rank.send

        async def send(frame: Any) -> None:
            await plain(AbortAck(frame.key, Quiet.POISONED) if isinstance(frame, AbortAck) else frame)

        if rank.role.value == "prefill":
            rank.send = send  # type: ignore[method-assign]

    async with stage(pair_config(tmp_path), poisoned) as running:
        await post(running, "/generate", ask(prefill={"silent": True}, decode={"status": 500}))
        await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTED)))
        order = [record["event"] for record in running.telemetry.records]
        assert order.index(Event.ENGINE_FENCED) < order.index(Event.ROOM_ABORTED)


async def test_quarantined_pages_are_released_by_fencing_the_writer_they_wait_for(tmp_path: Path) -> None:
    """The writer believes that it acknowledged; the reader never heard it. Only the writer's end settles it."""
    async with stage(pair_config(tmp_path)) as running:
        writer, reader = running.ranks["prefill0"], running.ranks["decode0"]
        gone = RoomKey(12345, 1)
        await reader.send(Quarantined(gone, writer.incarnation, {"full": 3}))
        await until(lambda: running.log("decode0", "fenced") == [writer.incarnation])
        assert running.ranks["decode0"] is reader
        # One that is gone already: the rank is told again, nobody is killed.
        await reader.send(Quarantined(gone, writer.incarnation, {"full": 3}))
        await until(lambda: running.log("decode0", "fenced") == [writer.incarnation] * 2)


async def test_a_poisoned_ack_of_an_ended_room_still_fences(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        writer = running.ranks["prefill0"]
        await writer.send(AbortAck(RoomKey(12345, 1), Quiet.POISONED))
        await until(lambda: running.log("decode0", "fenced") == [writer.incarnation])


async def test_aborts_are_sent_again_until_received(tmp_path: Path) -> None:
    """The first `Received` is lost; the rank meets the same abort again and must not ack it twice."""
    lost: list[int] = []

    def forgetful(rank: FakeRank) -> None:
        plain = rank.send

        async def send(frame: Any) -> None:
            if isinstance(frame, Received) and frame.seq not in lost:
                lost.append(frame.seq)
                return
            await plain(frame)

        if rank.role.value == "decode":
            rank.send = send  # type: ignore[method-assign]

    # Long enough that nothing but the re-send itself wakes the deadline loop.
    config = pair_config(tmp_path, deadlines=DeadlinesConfig(allocated=600.0, ack=600.0))
    async with stage(config, forgetful) as running:
        await post(running, "/generate", ask(prefill={"status": 500}, decode={"silent": True}))
        await until(lambda: any(record["resent"] for record in running.telemetry.of(Event.ABORT_SENT)))
        await until(lambda: len(running.telemetry.of(Event.ABORT_RECEIVED)) >= 2)
        assert len(running.log("decode0", "abort")) == 1


async def test_eighty_aborts_at_once_end_on_both_sides(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        for _ in range(3):
            statuses: list[int] = []

            async def hang(into: list[int] = statuses) -> None:
                status, _, _ = await post(running, "/generate", ask(prefill={"silent": True}, decode={"silent": True}))
                into.append(status)

            async with anyio.create_task_group() as tasks:
                for _ in range(80):
                    tasks.start_soon(hang)
                await until(lambda: all(rank.running == 80 for rank in running.ranks.values()))
                aborted = await running.plane.abort(None, "all of them")
                assert len(aborted["aborted"]) == 80
            assert statuses == [503] * 80
            await until(lambda: not running.plane_rooms())
        assert await _rooms(running) == {"closed": 0, "aborted": 240}
        for engine in running.ranks:
            assert len(running.log(engine, "abort")) == 240
            assert running.ranks[engine].running == 0


async def test_the_next_request_after_aborts_goes_through(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        await post(running, "/generate", ask(decode={"status": 500}))
        status, _, _ = await post(running, "/generate", ask())
        assert status == 200
        await until(lambda: not running.plane_rooms())
        assert await _rooms(running) == {"closed": 1, "aborted": 1}


async def test_frames_that_make_no_sense_are_refused_and_survived(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        rank = running.ranks["decode0"]
        unknown = RoomKey(12345, 1)
        await rank.send(Received(99))
        await rank.send(RoomReport(unknown, RoomState.LANDED))
        await rank.send(AbortAck(unknown, Quiet.QUIET))
        await rank.send(Quarantined(unknown, "peer", {"full": 3}))
        await until(lambda: bool(running.telemetry.of(Event.ROOM_QUARANTINED)))
        (bad,) = running.telemetry.of(Event.LINK_BAD_FRAME)
        assert "abort 99 was reported as received, only 0 were sent" in bad["error"]
        assert running.telemetry.of(Event.ROOM_LATE_REPORT)[0]["room"] == unknown
        await until(lambda: running.log("decode0", "abort") == [str(unknown)])  # nobody else would ever end it
        status, _, _ = await post(running, "/generate", ask())
        assert status == 200


async def test_a_report_of_an_incarnation_that_takes_no_part_is_refused(tmp_path: Path) -> None:
    engines = [
        EngineConfig(name="prefill0", role="prefill"),
        EngineConfig(name="decode0", role="decode"),
        EngineConfig(name="decode1", role="decode"),
    ]
    async with stage(pair_config(tmp_path, engines=engines)) as running, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: post(running, "/generate", ask(decode={"silent": True})))
        await until(lambda: running.ranks["decode0"].running == 1)
        (key,) = running.ranks["decode0"].rooms.values()
        await running.ranks["decode1"].send(RoomReport(key, RoomState.ABORTED))
        await until(lambda: bool(running.telemetry.of(Event.ROOM_INVALID_REPORT)))
        assert running.telemetry.of(Event.ROOM_ABORTING) == []
        await running.plane.abort(key.room, "over")


async def test_bytes_in_flight_choose_the_pair(tmp_path: Path) -> None:
    engines = [EngineConfig(name="prefill0", role="prefill")]
    engines += [EngineConfig(name=f"decode{n}", role="decode") for n in range(2)]
    config = pair_config(tmp_path, engines=engines, policies=PoliciesConfig(routing="least-bytes-in-flight"))
    async with stage(config) as running, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: post(running, "/generate", ask("x" * 600, decode={"silent": True})))
        await until(lambda: running.ranks["decode0"].running == 1)
        for _ in range(3):
            assert (await post(running, "/generate", ask()))[0] == 200
            await until(lambda: len(running.plane_rooms()) == 1)
        assert len(running.log("decode1", "leg")) == 3
        await running.plane.abort(None, "over")


async def test_an_ended_room_is_remembered_with_its_history(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        _, headers, _ = await post(running, "/generate", ask())
        await until(lambda: not running.plane_rooms())
        room = int(headers["x-dsv4ctl-room"].split(".")[0])
        (found,) = await running.plane.rooms(room)
        assert (found["state"], found["engines"]) == ("closed", ["prefill0", "decode0"])
        assert found["detail"]["digests_compared"] == 4
        assert [entry["state"] for entry in found["history"]][-1] == "closed"
        assert await running.plane.rooms(None) == []
        assert (await running.plane.abort(room, "late"))["aborted"] == []
        assert found["source"] is None
        assert AbortSource.CLIENT.value not in str(found)
