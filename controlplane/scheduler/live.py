"""One room with everything that waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anyio

from dsv4ctl.controlplane.rooms.room import Room
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey
from dsv4ctl.controlplane.scheduler.fleet import Pair


class RoomRequest(NamedTuple):
    """What the desk needs to know of a request. `tokens` is an estimate of the prompt's length."""

    request_id: str
    session: str | None
    tokens: int
    fresh: bool = False  #: without the cached prefix


class RoomAbortedError(RuntimeError):
    """The room was aborted; `source` and `reason` say by whom and why."""

    def __init__(self, key: RoomKey, source: AbortSource, reason: str) -> None:
        super().__init__(reason)
        self.key = key
        self.source = source
        self.reason = reason


@dataclass(eq=False)
class LiveRoom:
    """One generation of a room, from open to ended. `settled`: its request may be sent, or it is aborting."""

    room: Room
    request: RoomRequest
    turn: int  #: the room's place in the order in which rooms were first opened
    pair: Pair
    bytes: int
    unwritten: int = 0  #: ranks in order whose opening waits to be written
    settled: anyio.Event = field(default_factory=anyio.Event)
    aborting: anyio.Event = field(default_factory=anyio.Event)
    ended: anyio.Event = field(default_factory=anyio.Event)
    answered: anyio.Event = field(default_factory=anyio.Event)  #: its client has the whole answer, or an error
    aborting_at: float | None = None
    overruled: RoomAbortedError | None = None  #: aborted for good while it was retracted: no further generation
    _watcher: Callable[[RoomAbortedError], None] | None = None

    @property
    def key(self) -> RoomKey:
        return self.room.key

    @property
    def retracted(self) -> bool:
        return self.room.source is AbortSource.RETRACTION

    @property
    def over(self) -> bool:
        """It is aborted, and nothing of it follows."""
        return self.aborting.is_set() and (not self.retracted or self.overruled is not None)

    def aborted(self) -> RoomAbortedError | None:
        """The abort, once there is one."""
        if self.room.source is None:
            return None
        return RoomAbortedError(self.key, self.room.source, self.room.reason or "no reason was given")

    def raise_if_aborted(self) -> None:
        error = self.aborted()
        if error is not None:
            raise error

    @contextmanager
    def watched(self, told: Callable[[RoomAbortedError], None]) -> Iterator[None]:
        """Within the block, `told` is called with the abort as soon as there is one."""
        error = self.aborted()
        if error is not None:
            told(error)
        self._watcher = told
        try:
            yield
        finally:
            self._watcher = None

    def begin_abort(self, now: float) -> None:
        """Whoever waits for the room to settle, or for its abort, or watches it, learns of the abort."""
        self.aborting_at = now
        self.aborting.set()
        self.settled.set()
        error = self.aborted()
        if self._watcher is not None and error is not None:
            self._watcher(error)

    def engines(self) -> set[str]:
        return {engine.name for engine in self.pair.engines}

    def fields(self) -> dict[str, Any]:
        """What every event about the room carries."""
        return {"room": self.key, "request_id": self.room.request_id, "session": self.room.session}

    def describe(self, now: float, full: bool) -> dict[str, Any]:
        """The room for the admin API; `full` adds its history."""
        room = self.room
        ended = room.history[-1][1] if self.ended.is_set() else now
        entered = [*room.history[1:], (room.state, ended)]
        described: dict[str, Any] = {
            "key": str(room.key),
            "room": room.key.room,
            "generation": room.key.generation,
            "state": room.state.value,
            "request_id": room.request_id,
            "session": room.session,
            "engines": [engine.name for engine in self.pair.engines],
            "incarnations": list(room.participants),
            "source": room.source.value if room.source else None,
            "reason": room.reason,
            "age_s": round(ended - room.opened_at, 4),
            "bytes_estimated": self.bytes,
            "timings": {
                state.value: round(until - since, 4)
                for (state, since), (_, until) in zip(room.history, entered, strict=True)
                if not state.terminal
            },
            "detail": dict(room.details),
        }
        if full:
            described["history"] = [
                {"state": state.value, "at_s": round(at - room.opened_at, 4)} for state, at in room.history
            ]
        return described
