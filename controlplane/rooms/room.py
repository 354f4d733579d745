"""A whole room as the control plane sees it: a pure machine over the reports of its ranks.

Events come in with `now` (monotonic seconds); effects come out for a shell to carry out. The room is
`closed` when every rank closed it, and `aborted` when every rank acknowledged or was fenced (S5, S6).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dsv4ctl.controlplane.rooms.states import (
    ABORTS,
    LIVE,
    NEXT,
    TERMINAL,
    AbortSource,
    Cancellable,
    Quiet,
    RoomKey,
    RoomState,
)

#: Of a report: how its rank came to abort. The room's own source and reason are the first's.
_OF_ONE_RANK = frozenset({"source", "reason"})


class ParticipantInfo(NamedTuple):
    engine: str
    rank: int
    role: str  #: "prefill" (the writer), "decode" (the reader) or "single"


class SendAbort(NamedTuple):
    incarnation: str
    key: RoomKey
    source: AbortSource
    reason: str


class Fence(NamedTuple):
    """Kill and reap `incarnation`: nothing else can prove that it is quiet."""

    incarnation: str
    key: RoomKey
    reason: str


class Entered(NamedTuple):
    key: RoomKey
    state: RoomState


class Ended(NamedTuple):
    key: RoomKey
    state: RoomState
    reason: str | None


Effect = SendAbort | Fence | Entered | Ended


class StaleReport(ValueError):
    """A report by an incarnation that takes no part in the room: refused (fencing)."""


def allowed(deadlines: Mapping[str, float], declared: Iterable[Cancellable]) -> dict[str, float]:
    """The deadlines of a room whose engines have `declared` that.

    One that computes an aborted prompt to its end acknowledges after it, as late as `loading` may last: a fence before
    that would end an engine that is only slow to hear, with every other room on it.
    """
    last = deadlines[RoomState.LOADING.value] if Cancellable.PROMPT in declared else 0.0
    return {**deadlines, "ack": deadlines["ack"] + last}


@dataclass(slots=True)
class _Participant:
    info: ParticipantInfo
    state: RoomState = RoomState.ALLOCATED
    reported: bool = False
    done: bool = False  #: closed, acknowledged or fenced; a report of `aborted` alone is no proof of quiet
    fencing: bool = False
    poisoned: bool = False  #: only its fence proves that it is quiet


@dataclass(slots=True)
class Room:
    """One request's transfer. `deadlines` are seconds by state value, plus `ack` for an abort's end."""

    key: RoomKey
    request_id: str
    session: str | None
    participants: Mapping[str, ParticipantInfo]
    deadlines: Mapping[str, float]
    now: float
    state: RoomState = RoomState.ALLOCATED
    reason: str | None = None
    source: AbortSource | None = None
    details: dict[str, Any] = field(default_factory=dict)
    history: list[tuple[RoomState, float]] = field(default_factory=list)
    _ranks: dict[str, _Participant] = field(default_factory=dict)
    _due: float | None = None

    def __post_init__(self) -> None:
        self._ranks = {name: _Participant(info) for name, info in self.participants.items()}
        self._enter(RoomState.ALLOCATED, self.now)

    @property
    def opened_at(self) -> float:
        return self.history[0][1]

    @property
    def allocated(self) -> bool:
        """Every rank knows the room: the request may be sent."""
        return all(rank.reported for rank in self._ranks.values())

    def next_deadline(self) -> float | None:
        return self._due

    def report(self, incarnation: str, state: RoomState, detail: Mapping[str, Any], now: float) -> list[Effect]:
        """A rank changed its state. Raises StaleReport if `incarnation` takes no part."""
        rank = self._rank(incarnation)
        if self.state in TERMINAL:
            return []
        if rank.done:
            return self._again(incarnation, state)
        rank.reported = True
        self.details.update((name, value) for name, value in detail.items() if name not in _OF_ONE_RANK)
        if rank.state in ABORTS and state not in ABORTS:
            return []
        rank.state = state
        rank.done = state is RoomState.CLOSED
        if state in ABORTS and self.state not in ABORTS:
            reason = str(detail.get("reason") or f"{rank.info.engine} rank {rank.info.rank} aborted the room")
            return self.abort(_source(detail), reason, now)
        return list(self._settle(now) if self.state in ABORTS else self._advance(rank, now))

    def _again(self, incarnation: str, state: RoomState) -> list[Effect]:
        """A rank that acked an abort before it knew the room may have forgotten that, and opened it: told again."""
        if self.state not in ABORTS or state not in LIVE:
            return []
        return [SendAbort(incarnation, self.key, self.source or AbortSource.ENGINE_FAULT, self.reason or "")]

    def abort(self, source: AbortSource, reason: str, now: float) -> list[Effect]:
        """Begins the abort on every rank. A second call, or one on an ended room, changes nothing."""
        if self.state in ABORTS or self.state in TERMINAL:
            return []
        self.source, self.reason = source, reason
        effects: list[Effect] = [self._enter(RoomState.ABORTING, now)]
        effects += [SendAbort(name, self.key, source, reason) for name, rank in self._ranks.items() if not rank.done]
        return effects + list(self._settle(now))

    def ack(self, incarnation: str, outcome: Quiet, now: float) -> list[Effect]:
        """The rank is quiet, or poisoned: then only its fence ends the room. Raises StaleReport."""
        rank = self._rank(incarnation)
        if self.state in TERMINAL or rank.done:
            return []
        name = f"{rank.info.engine} rank {rank.info.rank}"
        if outcome is Quiet.POISONED:
            rank.poisoned, rank.state = True, RoomState.QUIESCING
            effects = self.abort(AbortSource.ENGINE_FAULT, f"{name}: writes ended without a known state", now)
            return effects + list(self._fence(incarnation, "poisoned: its writes ended without a known state"))
        rank.done = not rank.poisoned
        rank.state = RoomState.ABORTED
        effects = self.abort(AbortSource.ENGINE_FAULT, f"{name} aborted the room", now)
        return effects or list(self._settle(now))

    def fenced(self, incarnation: str, now: float) -> list[Effect]:
        """The process of `incarnation` is killed and reaped. No effect if it takes no part."""
        rank = self._ranks.get(incarnation)
        if rank is None or rank.done or self.state in TERMINAL:
            return []
        rank.done = True
        rank.state = RoomState.ABORTED
        reason = f"{rank.info.engine} rank {rank.info.rank} ended"
        if self.state not in ABORTS:
            return self.abort(AbortSource.ENGINE_FAULT, reason, now)
        self._due = now + self.deadlines["ack"]
        return list(self._settle(now))

    def tick(self, now: float) -> list[Effect]:
        """Enforces the deadline of the present state: abort first, then fence the ranks that did not ack.

        Writers are fenced before readers: a reader may only be waiting for its writer's ack.
        """
        if self._due is None or now < self._due or self.state in TERMINAL:
            return []
        if self.state not in ABORTS:
            allowed = self.deadlines[self.state.value]
            return self.abort(AbortSource.DEADLINE, f"{self.state.value} lasted over {allowed:g} s", now)
        waiting = {name: rank for name, rank in self._ranks.items() if not rank.done}
        writers = {name: rank for name, rank in waiting.items() if rank.info.role != "decode"}
        self._due = now + self.deadlines["ack"]
        reason = f"no abort-ack within {self.deadlines['ack']:g} s"
        return [effect for name in (writers or waiting) for effect in self._fence(name, reason)]

    def _rank(self, incarnation: str) -> _Participant:
        try:
            return self._ranks[incarnation]
        except KeyError:
            raise StaleReport(f"room {self.key}: {incarnation} takes no part in it") from None

    def _fence(self, incarnation: str, reason: str) -> Iterator[Effect]:
        rank = self._ranks[incarnation]
        if not rank.fencing:
            rank.fencing = True
            yield Fence(incarnation, self.key, reason)

    def _advance(self, told: _Participant, now: float) -> Iterator[Effect]:
        """Not aborted: the room is where its furthest rank is, which `told` may be now, and closed once all are."""
        if not told.done:
            if told.state in NEXT[self.state]:
                yield self._enter(told.state, now)
        elif all(rank.done for rank in self._ranks.values()):
            yield self._enter(RoomState.CLOSED, now)
            yield Ended(self.key, RoomState.CLOSED, None)

    def _settle(self, now: float) -> Iterator[Effect]:
        """Aborting: `quiescing` once every rank knows, `aborted` once every rank is quiet or fenced."""
        ranks = self._ranks.values()
        if all(rank.done for rank in ranks):
            yield self._enter(RoomState.ABORTED, now)
            yield Ended(self.key, RoomState.ABORTED, self.reason)
        elif self.state is RoomState.ABORTING and all(rank.done or rank.state in ABORTS for rank in ranks):
            yield self._enter(RoomState.QUIESCING, now)

    def _enter(self, state: RoomState, now: float) -> Entered:
        self.state = state
        self.history.append((state, now))
        if state in TERMINAL:
            self._due = None
        elif state is RoomState.ABORTING:
            self._due = now + self.deadlines["ack"]
        elif state is not RoomState.QUIESCING:
            self._due = now + self.deadlines[state.value]
        return Entered(self.key, state)


def _source(detail: Mapping[str, Any]) -> AbortSource:
    """Who asked for the abort, as the rank says; whatever it says, the room is aborted (S6)."""
    try:
        return AbortSource(detail.get("source"))
    except ValueError:
        return AbortSource.ENGINE_FAULT
