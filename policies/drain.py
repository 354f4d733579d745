"""Drain: in which order things stop, within one total budget."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Protocol

import msgspec


class Action(Enum):
    REFUSE = "refuse"  #: new requests get 503, nothing else changes
    FINISH = "finish"  #: wait for the open rooms to close by themselves
    ABORT = "abort"  #: abort the rooms that are left, and wait for the acks
    STOP = "stop"  #: end the engines


class Step(msgspec.Struct, frozen=True):
    """`action` ends when it is done, or `until` seconds after the drain began, whichever is first."""

    action: Action
    until: float


class Drain(Protocol):
    def steps(self) -> tuple[Step, ...]:
        """In order; the last `until` is the whole budget."""
        ...

    def stop_order(self, engines: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """Names of `engines`, given as (name, role), in the order to end them."""
        ...


class Rooms:
    """Rooms get the budget less what aborting the rest (`ack`) and stopping (`fence`) may take.

    Where the budget is too short for that, rooms get half of it and the other two share the rest as `ack` to
    `fence`. Writers end before readers.
    """

    _ORDER = ("prefill", "single", "decode")

    def __init__(self, *, budget: float, ack: float, fence: float) -> None:
        self._budget = budget
        self._ack = ack
        self._fence = fence

    def steps(self) -> tuple[Step, ...]:
        reserve = min(self._ack + self._fence, self._budget / 2)
        finish = self._budget - reserve
        abort = finish + reserve * self._ack / (self._ack + self._fence)
        return (
            Step(Action.REFUSE, 0.0),
            Step(Action.FINISH, finish),
            Step(Action.ABORT, abort),
            Step(Action.STOP, self._budget),
        )

    def stop_order(self, engines: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        return tuple(name for name, role in sorted(engines, key=lambda e: (self._ORDER.index(e[1]), e[0])))


class Factory(Protocol):
    def __call__(self, *, budget: float, ack: float, fence: float) -> Drain: ...


POLICIES: dict[str, Factory] = {"rooms": Rooms}
