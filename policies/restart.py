"""Restart: how long to wait before an engine that ended is started again, and when to stop trying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from dsv4ctl.policies.defaults import count, seconds


class RestartIn(msgspec.Struct, frozen=True):
    seconds: float


class GiveUp(msgspec.Struct, frozen=True):
    reason: str


class Restart(Protocol):
    def decide(self, failures: Sequence[float], now: float) -> RestartIn | GiveUp:
        """`failures`: when the engine ended by itself, the latest included, on the clock of `now` (s)."""
        ...


class Backoff:
    """After `initial` s, doubled by each failure within `window` s up to `cap`; above `tries`: give up."""

    def __init__(
        self,
        *,
        initial: float = seconds("restart.initial"),
        cap: float = seconds("restart.cap"),
        tries: int = count("restart.tries"),
        window: float = seconds("restart.window"),
    ) -> None:
        self._initial = initial
        self._cap = cap
        self._tries = tries
        self._window = window

    def decide(self, failures: Sequence[float], now: float) -> RestartIn | GiveUp:
        recent = sum(1 for at in failures if now - at <= self._window)
        if recent > self._tries:
            return GiveUp(f"ended {recent} times within {self._window:g} s, limit {self._tries}")
        return RestartIn(min(self._cap, self._initial * 2.0 ** max(recent - 1, 0)))


class Factory(Protocol):
    def __call__(self) -> Restart: ...


POLICIES: dict[str, Factory] = {"backoff": Backoff}
