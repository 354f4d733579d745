"""Ten thousand rooms: what one room needs costs no look at all the others."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from dsv4ctl.controlplane.config.schema import Config, EngineConfig, LimitsConfig
from dsv4ctl.controlplane.rooms.room import ParticipantInfo, Room
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey, RoomState
from dsv4ctl.controlplane.scheduler.agenda import Agenda
from dsv4ctl.controlplane.scheduler.desk import HEARD, RoomDesk
from dsv4ctl.controlplane.scheduler.fleet import EngineState, Fleet, Pair, Rank
from dsv4ctl.controlplane.scheduler.live import LiveRoom, RoomRequest
from dsv4ctl.controlplane.telemetry.log import Telemetry
from simulation import loop as virtual
from simulation.loop import VirtualLoop

#: The age of a room that is half a second past its first deadline.
OVERDUE = 120.5


class Desk(RoomDesk):
    """With rooms that were opened `age` seconds ago on a prefill and a decode engine without links."""

    def __init__(self, rooms: int, age: float = 0.0, telemetry: Telemetry | None = None) -> None:
        engines = [EngineConfig(name=role, role=role) for role in ("prefill", "decode")]
        config = Config(engines=engines, limits=LimitsConfig(max_rooms=1_000_000))
        fleet = Fleet(engines)
        for engine in fleet:
            engine.state = EngineState.READY
            engine.ranks[engine.name] = Rank(engine.name, 0, engine.name)
        super().__init__(config, fleet, telemetry or Telemetry(), lambda *_: None, lambda _: None)
        for number in range(rooms):
            self.add(number, age)

    def add(self, number: int, age: float) -> LiveRoom:
        pair = Pair(self._fleet.engines["prefill"], self._fleet.engines["decode"])
        ranks = {name: ParticipantInfo(name, 0, name) for name in ("prefill", "decode")}
        room = Room(RoomKey(number, 1), "r", None, ranks, self._deadlines, anyio.current_time() - age)
        live = self._live[room.key] = LiveRoom(room, RoomRequest("r", None, 1), number, pair, 5)
        self._placement.began(live)
        self._keep_deadline(live)
        return live

    def end(self, live: LiveRoom) -> None:
        """Its ranks acknowledge its abort."""
        self.abort(live, AbortSource.ADMIN, "over")
        for name in live.room.participants:
            self._apply(live, live.room.fenced(name, anyio.current_time()))

    @asynccontextmanager
    async def keeping_deadlines(
        self, beat: Callable[[], None] = lambda: None
    ) -> AsyncIterator[list[tuple[str, float]]]:
        """The deadline loop runs. What is fenced is told, and when."""
        fenced: list[tuple[str, float]] = []
        self._fence = lambda incarnation, _: fenced.append((incarnation, anyio.current_time()))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.keep_deadlines, beat)
            yield fenced
            tasks.cancel_scope.cancel()

    async def look(self) -> None:
        """One turn of the deadline loop."""
        with anyio.CancelScope() as scope:
            await self.keep_deadlines(scope.cancel)


def _calls(work: Callable[[], Any]) -> int:
    """How many functions `work` calls."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.asyncio
async def test_a_place_costs_the_same_among_any_number_of_rooms() -> None:
    few, many = Desk(2), Desk(500)
    assert _calls(few._placement.choose) == _calls(many._placement.choose)
    assert _calls(lambda: few._placement.admit(5)) == _calls(lambda: many._placement.admit(5))


@pytest.mark.asyncio
async def test_what_has_ended_is_not_in_flight() -> None:
    desk = Desk(5)
    for live in list(desk.live.values()):
        desk.end(live)
    loads = [desk._placement._total, *desk._placement._loads.values()]
    assert [(load.rooms, load.bytes) for load in loads] == [(0, 0), (0, 0)]


@pytest.mark.asyncio
async def test_who_watches_a_room_is_told_of_its_abort_whenever_it_began() -> None:
    desk, told = Desk(2), list[str]()
    early, late = desk.live.values()
    desk.abort(early, AbortSource.ADMIN, "before")
    for live in (early, late):
        with live.watched(lambda error: told.append(f"{error.key} {error.reason}")):
            desk.abort(live, AbortSource.ADMIN, "meanwhile")
            desk.abort(live, AbortSource.ADMIN, "again")
    assert told == ["0.1 before", "1.1 meanwhile"]


@pytest.mark.asyncio
async def test_who_has_ceased_to_watch_a_room_is_told_nothing() -> None:
    desk = Desk(1)
    (live,) = desk.live.values()
    with live.watched(lambda error: pytest.fail(f"told: {error}")):
        pass
    desk.abort(live, AbortSource.ADMIN, "over")


@pytest.mark.asyncio
async def test_a_drain_does_not_look_at_all_rooms_whenever_one_ends() -> None:
    desk = Desk(100)
    rooms, looks = list(desk.live.values()), 0

    def engines() -> list[str]:
        nonlocal looks
        looks += 1
        return ["prefill"]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.until_empty, engines)
        for live in rooms:
            await anyio.wait_all_tasks_blocked()
            desk.end(live)
    assert looks == 2


def test_only_rooms_that_are_due_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[RoomKey] = []
    real = Room.tick

    def tick(room: Room, now: float) -> Any:
        looked.append(room.key)
        return real(room, now)

    async def main(loop: VirtualLoop) -> None:
        desk = Desk(500)
        late = desk.add(500, OVERDUE)
        await desk.look()
        assert looked == [late.key]
        assert late.room.source is AbortSource.DEADLINE

    monkeypatch.setattr(Room, "tick", tick)
    virtual.run(main)


def test_a_deadline_loop_that_died_forgot_no_room() -> None:
    class Failing(Telemetry):
        failed = False

        def emit(self, *arguments: Any, **fields: Any) -> None:
            if not self.failed:
                self.failed = True
                raise RuntimeError("seeded")
            super().emit(*arguments, **fields)

    async def main(loop: VirtualLoop) -> None:
        desk = Desk(3, OVERDUE, Failing())
        with pytest.raises(RuntimeError, match="seeded"):
            await desk.look()
        await desk.look()
        assert {live.room.state for live in desk.live.values()} == {RoomState.ABORTING}
        assert desk._agenda._noted.keys() == desk.live.keys()

    virtual.run(main)


def test_after_a_standstill_acks_that_wait_in_the_sockets_are_heard_first() -> None:
    async def main(loop: VirtualLoop) -> None:
        desk = Desk(2)
        heard, silent = desk.live.values()
        async with desk.keeping_deadlines() as fenced:
            await anyio.sleep(1.0)
            for live in (heard, silent):
                desk.abort(live, AbortSource.ADMIN, "over")
            loop.jump(100.0)
            await anyio.sleep(0.1)
            assert fenced == []
            for name in heard.room.participants:
                desk._apply(heard, heard.room.ack(name, Quiet.QUIET, loop.time()))
            await anyio.sleep(1.0)
        assert [name for name, _ in fenced] == ["prefill"], "the one that said nothing then either"
        assert heard.ended.is_set()

    virtual.run(main)


def test_after_a_standstill_what_one_rank_says_hurries_no_verdict_on_the_other() -> None:
    """Its ack is next in the sockets. The room's deadline passed just before the machine went on."""

    async def main(loop: VirtualLoop) -> None:
        desk = Desk(2)
        early, late = desk.live.values()
        async with desk.keeping_deadlines() as fenced:
            desk.abort(early, AbortSource.ADMIN, "over")
            await anyio.sleep(2.0)
            desk.abort(late, AbortSource.ADMIN, "over")
            loop.jump(desk._deadlines["ack"] + 0.25)
            await anyio.sleep(0.1)
            desk._apply(late, late.room.ack("decode", Quiet.QUIET, loop.time()))
            await anyio.sleep(0.1)
            assert fenced == []
            desk._apply(late, late.room.ack("prefill", Quiet.QUIET, loop.time()))
            await anyio.sleep(1.0)
        assert [name for name, _ in fenced] == ["prefill"], "of the other room"
        assert late.ended.is_set()

    virtual.run(main)


def test_after_a_standstill_a_deadline_that_passes_while_others_are_heard_waits_too() -> None:
    async def main(loop: VirtualLoop) -> None:
        desk = Desk(2)
        early, late = desk.live.values()
        async with desk.keeping_deadlines() as fenced:
            desk.abort(early, AbortSource.ADMIN, "over")
            await anyio.sleep(2.0)
            desk.abort(late, AbortSource.ADMIN, "over")
            loop.jump(desk._deadlines["ack"] - 0.25)
            went_on = loop.time()
            await anyio.sleep(1.0)
        assert [at for _, at in fenced] == [pytest.approx(went_on + HEARD)] * 2

    virtual.run(main)


def test_a_loop_that_is_always_late_judges_all_the_same() -> None:
    async def main(loop: VirtualLoop) -> None:
        desk = Desk(1, OVERDUE)
        (live,) = desk.live.values()
        looks = 0

        def slow() -> None:
            nonlocal looks
            looks += 1
            if live.room.state is RoomState.ALLOCATED and looks < 10:
                loop.jump(5.0)

        async with desk.keeping_deadlines(slow):
            await live.aborting.wait()
        assert looks == 2

    virtual.run(main)


def test_the_earliest_moment_counts_until_the_room_is_noted_again() -> None:
    agenda, one, two = Agenda(), RoomKey(1, 1), RoomKey(2, 1)
    agenda.note(one, 5.0)
    agenda.note(one, 9.0)
    agenda.note(two, 7.0)
    agenda.note(two, 3.0)
    assert agenda.next == 3.0
    assert agenda.take(6.0) == [two, one]
    agenda.note(one, 9.0)
    agenda.note(two, 9.0)
    assert agenda.take(8.0) == []
    agenda.forget(two)
    assert agenda.take(9.0) == [one]
    assert agenda.next == float("inf")
