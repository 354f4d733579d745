"""One row: its guards, its requests in rounds, its abort waves, and what the deployment says afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import anyio

from dsv4ctl.controlplane.incident.deployment import (
    LOAD_DIFFERS,
    RETRACTIONS,
    VIOLATION,
    RequestFailedError,
    Running,
    counters,
    since,
    until,
)
from dsv4ctl.controlplane.incident.evaluate import Asked, Measured, Stormed
from dsv4ctl.controlplane.incident.rows import Row
from dsv4ctl.controlplane.incident.storms import pages_back, storm
from dsv4ctl.controlplane.incident.workload import GROUP, PAGE_TOKENS, Turn
from dsv4ctl.controlplane.rooms.states import RoomState

#: Seconds that a request may take, queues included; longer is stuck.
REQUEST_DEADLINE = 120.0
#: One group of sessions in so many is struck by the row's fault: who waits for a struck load is struck as well.
STRUCK = 2
#: A request on its way is aborted this often, then let through.
ABORTS_A_REQUEST = 2
#: A crowd in which nobody was retracted comes again this often.
MEETINGS = 5
#: Seconds between two looks for requests whose pages are on their way.
_LOOK = 0.008

#: Faults that need no page to be loaded; the others strike from the second round on.
_AT_ONCE = ("abort",)
#: States of a room whose pages are on their way.
_MOVING = {"pd": RoomState.SENDING.value, "single": RoomState.LOADING.value}

Turns = Mapping[tuple[int, int], Turn]


@dataclass
class _Row:
    """What one row gathers. `on_the_way`: requests that will be aborted in mid-transfer, by request id."""

    running: Running
    asked: list[Asked] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    on_the_way: dict[str, anyio.CancelScope] = field(default_factory=dict)
    aborts: int = 0
    fault: str = ""  #: strikes one of several ranks, and may end any request
    guarded: bool = True
    moving: str = ""  #: the state in which rooms are aborted in waves
    parted: bool = False  #: the ranks no longer met; only the end of their engine ended what was under way


async def run_row(
    running: Running,
    row: Row,
    turns: Turns,
    victims: Callable[[int], Collection[int]],
    told: Callable[[], None],
    trace: bool = False,
) -> Measured:
    """From flushed caches to no room in flight. `victims(round)`: sessions whose requests are aborted (if `waves`).

    `told` is called after each round; `trace`: its races are looked for. Raises DeploymentError,
    NoControlPlaneError, TimeoutError.
    """
    await running.ready()
    if not row.fault:
        await running.set_guards(row.off)
    await running.flush()
    before = counters(await running.engine_infos())
    stormed = None if row.storm is None else await storm(running, row.storm, len(turns))
    state = _Row(running, fault=row.fault, guarded=row.guarded, moving=_MOVING[row.deployment.topology])
    began, began_ns = anyio.current_time(), time.monotonic_ns()
    for round_ in sorted({round_ for _, round_ in turns}):
        this = [turn for turn in turns.values() if turn.round == round_]
        if not state.parted:
            await _round(state, this, victims(round_) if row.waves else ())
        told()
    if row.must_retract:
        await _again_until_retracted(state, list(turns.values()), before[RETRACTIONS])
    seconds = anyio.current_time() - began
    left = await running.idle()
    if row.must_retract:
        stormed = Stormed(len(state.asked), 0, 0, round(seconds, 3), await pages_back(running))
    after = before if state.parted else counters(await running.engine_infos())
    rooms = {key: room for key in sorted(state.keys) if (room := await running.room(key)) is not None}
    return Measured(
        asked=state.asked,
        rooms=rooms,
        left=left,
        aborts=state.aborts,
        edges=since(before, after, VIOLATION),
        host_tokens=max(after["host_tokens_loaded"] - before["host_tokens_loaded"], 0),
        seconds=seconds,
        loads_differ=since(before, after, LOAD_DIFFERS),
        stormed=stormed,
        traced=await running.traced(began_ns) if trace else None,
        retractions=max(after[RETRACTIONS] - before[RETRACTIONS], 0),
    )


async def _round(state: _Row, turns: list[Turn], victims: Collection[int]) -> None:
    """All requests of a round at the same moment."""
    async with anyio.create_task_group() as waves:
        if victims:
            waves.start_soon(_abort_in_waves, state)
        async with anyio.create_task_group() as tasks:
            growing = [turn for turn in turns if turn.new_tokens > PAGE_TOKENS]
            for turn in growing:
                tasks.start_soon(_ask, state, turn, 0)
            if growing:
                await _until_full(state)
            for turn in turns:
                if turn not in growing:
                    tasks.start_soon(_ask, state, turn, ABORTS_A_REQUEST if turn.session in victims else 0)
        waves.cancel_scope.cancel()


async def _until_full(state: _Row) -> None:
    """What grows holds the whole decode pool, so that it cannot grow; or it never will: one of it has ended."""
    answered = len(state.asked)

    async def full() -> bool:
        infos = await state.running.engine_infos()
        free = sum(info["pages"]["free"]["full"] for info in infos if info["role"] == "decode")
        return not free or len(state.asked) > answered

    with anyio.move_on_after(REQUEST_DEADLINE):
        await until(full)


async def _again_until_retracted(state: _Row, turns: list[Turn], before: int) -> None:
    """Requests that did not meet in the pool do not compete for it."""
    for _ in range(MEETINGS):
        if counters(await state.running.engine_infos())[RETRACTIONS] > before:
            return
        await _round(state, turns, ())


async def _ask(state: _Row, turn: Turn, aborts: int) -> None:
    for attempt in range(aborts):
        request_id = f"{turn.request_id}.{attempt}"
        with anyio.CancelScope() as scope:
            state.on_the_way[request_id] = scope
            state.asked.append(await _ask_once(state, turn, request_id))
        state.on_the_way.pop(request_id, None)
        if not scope.cancelled_caught:
            return
        state.aborts += 1
    struck = state.fault and turn.session // GROUP % STRUCK == 0 and (turn.round or state.fault in _AT_ONCE)
    asked = await _ask_once(state, turn, f"{turn.request_id}!{state.fault}" if struck else turn.request_id)
    if asked.error is not None and state.fault and state.guarded:
        state.aborts += 1
        await state.running.ready()
        asked = await _ask_once(state, turn, turn.request_id)
    state.asked.append(asked)


async def _ask_once(state: _Row, turn: Turn, request_id: str) -> Asked:
    output: tuple[int, ...] | None = None
    error = room = None
    try:
        with anyio.move_on_after(REQUEST_DEADLINE):
            tokens, room = await state.running.generate(turn.prompt, turn.new_tokens, request_id)
            output = tuple(tokens)
    except RequestFailedError as failed:
        room = failed.room
        if failed.engine_gone and state.fault and not state.guarded:
            state.parted = True
        else:
            error = str(failed)
    if room is not None:
        state.keys.add(room)
    return Asked(turn.session, turn.round, len(turn.prompt), output, error, room)


async def _abort_in_waves(state: _Row) -> None:
    """Clients leave, all at once, as soon as their rooms' pages are being written."""
    while True:
        for room in await state.running.rooms():
            scope = state.on_the_way.get(room["request_id"])
            if scope is not None and room["state"] == state.moving:
                state.keys.add(room["key"])
                scope.cancel()
        await anyio.sleep(_LOOK)
