"""Abort: the ladder a room is taken down, as data, and how long each state of a room may last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Protocol

import msgspec


class Action(Enum):
    ASK = "ask"  #: tell both sides, again until acknowledged
    QUARANTINE = "quarantine"  #: the pages are never read and never reused until quiesced or fenced
    FENCE = "fence"  #: kill and reap the writer; its pages are free after that


class Rung(msgspec.Struct, frozen=True):
    """`action` is due `after` seconds from the abort if the writer has not acknowledged by then."""

    action: Action
    after: float


class Abort(Protocol):
    def rungs(self, *, poisoned: bool) -> tuple[Rung, ...]:
        """In the order to take them. `poisoned`: by its writer, who will never acknowledge."""
        ...

    def reaped_by(self, *, poisoned: bool) -> float:
        """Seconds after the abort by which the fenced writer is reaped and no page is left in quarantine."""
        ...


class Ladder:
    """Ask; no ack after `ack` seconds: quarantine, then fence, at once; reaped within `fence` seconds.

    An acknowledgement ends the ladder wherever it stands. A poisoned room has none to wait for.
    """

    def __init__(self, *, ack: float, fence: float) -> None:
        self._ack = ack
        self._fence = fence

    def rungs(self, *, poisoned: bool) -> tuple[Rung, ...]:
        unknown_at = 0.0 if poisoned else self._ack
        return (Rung(Action.ASK, 0.0), Rung(Action.QUARANTINE, unknown_at), Rung(Action.FENCE, unknown_at))

    def reaped_by(self, *, poisoned: bool) -> float:
        return self.rungs(poisoned=poisoned)[-1].after + self._fence


def due(rungs: Sequence[Rung], elapsed: float, *, taken: int) -> tuple[Rung, ...]:
    """The rungs to take now, `elapsed` seconds after the abort, when the first `taken` are behind."""
    return tuple(rung for rung in rungs[taken:] if rung.after <= elapsed)


def overdue(state: str, seconds_in_state: float, deadlines: Mapping[str, float]) -> bool:
    """Whether a room has been in `state` too long. Raises KeyError for a state without a deadline."""
    if state not in deadlines:
        raise KeyError(f"room state {state!r} has no deadline; those that have: {', '.join(sorted(deadlines))}")
    return seconds_in_state >= deadlines[state]


class Factory(Protocol):
    def __call__(self, *, ack: float, fence: float) -> Abort: ...


POLICIES: dict[str, Factory] = {"ladder": Ladder}
