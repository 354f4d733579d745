"""Seeded faults in the control plane: small changes of the real classes, each to be found by the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import anyio

from dsv4ctl.controlplane.aborts.log import AbortLog
from dsv4ctl.controlplane.gateway.completions import Completions
from dsv4ctl.controlplane.rooms.room import Room
from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.controlplane.scheduler.desk import RoomDesk
from dsv4ctl.controlplane.supervisor import draining, supervisor
from dsv4ctl.controlplane.supervisor.runner import EngineRunner


class Mutant(NamedTuple):
    """`change` makes the faulty function out of the real one; `seed` shows it."""

    fault: str
    seed: int
    owner: Any
    name: str
    change: Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def seeded(mutant: Mutant) -> Iterator[None]:
    with patch.object(mutant.owner, mutant.name, mutant.change(getattr(mutant.owner, mutant.name))):
        yield


def _sent_once(real: Any) -> Any:
    """What was handed out is forgotten."""

    def due(log: AbortLog, now: float) -> Any:
        entries = real(log, now)
        log._unreceived.clear()
        return entries

    return due


def _fence_told_to_nobody(real: Any) -> Any:
    def gone(desk: RoomDesk, incarnation: str) -> None:
        with patch.object(desk._fleet, "ranks", lambda: ()):
            real(desk, incarnation)

    return gone


def _rooms_of_fenced_forgotten(real: Any) -> Any:
    def gone(desk: RoomDesk, incarnation: str) -> None:
        with patch.object(desk, "_live", {}):
            real(desk, incarnation)

    return gone


def _acks_of_one_kind_dropped(real: Any) -> Any:
    def acked(desk: RoomDesk, rank: Any, frame: Any, now: float) -> None:
        if frame.key.room % 3:
            real(desk, rank, frame, now)

    return acked


def _first_room_forgotten(real: Any) -> Any:
    def rooms_of(desk: RoomDesk, engines: Any) -> Any:
        return real(desk, engines)[1:]

    return rooms_of


def _fenced_before_it_is_reaped(real: Any) -> Any:
    async def fence(runner: EngineRunner, started: Any) -> None:
        for process, ranks in started:
            process.kill()
            for rank in ranks:
                runner._desk.gone(rank.incarnation)
        await real(runner, started)

    return fence


def _killed_and_not_told_to_the_desk(real: Any) -> Any:
    async def fence(runner: EngineRunner, started: Any) -> None:
        with patch.object(runner._desk, "gone", lambda incarnation: None):
            await real(runner, started)

    return fence


def _never_looks(real: Any) -> Any:
    async def watch(*arguments: Any) -> None:
        return

    return watch


def _few_room_numbers(real: Any) -> Any:
    def init(desk: RoomDesk, *arguments: Any) -> None:
        real(desk, *arguments)
        bits = desk._random_bits
        desk._random_bits = lambda count: bits(count) % 8

    return init


def _no_client_abort(real: Any) -> Any:
    def abort(desk: RoomDesk, live: Any, source: AbortSource, reason: str) -> None:
        if source is not AbortSource.CLIENT:
            real(desk, live, source, reason)

    return abort


def _waits_for_ever(real: Any) -> Any:
    async def until_empty(desk: RoomDesk, engines: Any) -> None:
        await anyio.sleep_forever()

    return until_empty


def _stream_just_ends(real: Any) -> Any:
    async def end_stream(completions: Completions, response: Any, error: Any) -> Any:
        return response

    return end_stream


def _adopted_only_if_wanted(real: Any) -> Any:
    def settle(runner: EngineRunner, survivors: Any) -> None:
        real(runner, survivors if runner._wanted else ())

    return settle


MUTANTS: tuple[Mutant, ...] = (
    Mutant("an abort is not sent again", 1, AbortLog, "due", _sent_once),
    Mutant("a fence is told to no peer", 4, RoomDesk, "gone", _fence_told_to_nobody),
    Mutant("the rooms of a fenced rank wait on", 4, RoomDesk, "gone", _rooms_of_fenced_forgotten),
    Mutant("every third ack is dropped", 1, RoomDesk, "_acked", _acks_of_one_kind_dropped),
    Mutant("deadlines never tick", 7, Room, "tick", lambda real: lambda room, now: []),
    Mutant("a drain forgets a room", 0, RoomDesk, "rooms_of", _first_room_forgotten),
    Mutant("a fence is told before the process is reaped", 4, EngineRunner, "_fence", _fenced_before_it_is_reaped),
    Mutant("a restart without Fenced", 4, EngineRunner, "_fence", _killed_and_not_told_to_the_desk),
    Mutant("the watchdog never looks", 22, supervisor, "watch", _never_looks),
    Mutant("room numbers are used again", 0, RoomDesk, "__init__", _few_room_numbers),
    Mutant("a client that leaves aborts nothing", 0, RoomDesk, "abort", _no_client_abort),
    Mutant("a drain never ends", 0, RoomDesk, "until_empty", _waits_for_ever),
    Mutant("an error in the middle of a stream is not told", 1, Completions, "_end_stream", _stream_just_ends),
    Mutant("a drain stops engines without aborting what is left", 11, draining, "_abort", lambda real: lambda *_: []),
    Mutant("what is drained before it is adopted is forgotten", 8, EngineRunner, "settle", _adopted_only_if_wanted),
)
