"""Writes in flight: owned by the loop, not by the room that posted them, so that each ends exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from dsv4ctl.controlplane.rooms.effects import Effect, Refusal
from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.controlplane.rooms.writer import Writer
from dsv4ctl.controlplane.tickets.hold import Held
from dsv4ctl.engine_adapters.agent import Agent, UnknownRoomError
from dsv4ctl.engine_adapters.reference.nixl import Transport, Write

#: Shortest and longest pause between two looks, in seconds.
_SHORTEST, _LONGEST = 0.0003, 0.002


@dataclass(eq=False, slots=True)
class Flight:
    """`ended` fires once the write can touch neither side any more, or nobody can say (then the room is poisoned)."""

    key: RoomKey
    peer: str
    write: Write
    held: Held
    doubt_seconds: float
    doubted_at: float | None = None  #: when it failed: a dead peer's fence is given time to come first
    ended: anyio.Event = field(default_factory=anyio.Event)


class Writes:
    """A write that fails leaves its outcome unknown: it ends well only if its peer turns out to be fenced."""

    def __init__(self, agent: Agent, transport: Transport, clock: Callable[[], float]) -> None:
        self.counters: Counter[str] = Counter()
        self._agent = agent
        self._transport = transport
        self._clock = clock
        self._flights: list[Flight] = []
        self._fenced: set[str] = set()
        self._woken = anyio.Event()
        self._idle = anyio.Event()
        self._idle.set()

    def add(self, flight: Flight) -> None:
        if not self._flights:
            self._idle = anyio.Event()
        self._flights.append(flight)
        self._woken.set()

    def fenced(self, peer: str) -> None:
        """Nothing can be written into a dead process: its flights end here."""
        self._fenced.add(peer)
        for flight in [flight for flight in self._flights if flight.peer == peer]:
            self._transport.abandon(flight.write)
            self._end(flight, ok=True)

    async def idle(self) -> None:
        """Returns once nothing is in flight; the caller sets the limit."""
        await self._idle.wait()

    async def run(self) -> None:
        pause = _SHORTEST
        while True:
            if not self._flights:
                self._woken = anyio.Event()
                await self._woken.wait()
                pause = _SHORTEST
            ended = [self._look(flight) for flight in list(self._flights)]
            pause = _SHORTEST if any(ended) else min(2 * pause, _LONGEST)
            await anyio.sleep(pause)

    def _look(self, flight: Flight) -> bool:
        if flight.doubted_at is None:
            status = self._transport.poll(flight.write)
            if status == "busy":
                return False
            if status == "done" or flight.peer in self._fenced:
                self._end(flight, ok=True)
                return True
            self.counters["failed_writes"] += 1
            flight.doubted_at = self._clock()
        if self._clock() - flight.doubted_at < flight.doubt_seconds:
            return False
        self._end(flight, ok=False)
        return True

    def _end(self, flight: Flight, ok: bool) -> None:
        def written(writer: Writer) -> list[Effect]:
            return writer.written(ok)

        self._flights.remove(flight)
        if ok:  # else it may still read its source: the ticket holds until this process is fenced
            flight.held.complete()
        try:
            self._agent.apply(flight.key, written)
        except (UnknownRoomError, Refusal):
            self.counters["late_writes"] += 1
        flight.ended.set()
        if not self._flights:
            self._idle.set()
