"""Where a room goes, and whether one more may begin: the routing and the admission policy, asked of what is in flight.

What is in flight is counted as rooms begin and end: a request costs the same however many rooms there are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dsv4ctl.controlplane.config.schema import Config
from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.controlplane.scheduler.fleet import EngineState, Fleet, Pair
from dsv4ctl.controlplane.scheduler.live import LiveRoom
from dsv4ctl.policies import registry
from dsv4ctl.policies.admission import InFlight
from dsv4ctl.policies.routing import Pair as Candidate

#: Lives of ended rooms that the mean life is taken over.
LIVES_KEPT = 64
_SERVING = (EngineState.READY, EngineState.DRAINING)


class NotServingError(RuntimeError):
    """No engine can take the request; `draining` tells why from why."""

    def __init__(self, reason: str, draining: bool) -> None:
        super().__init__(reason)
        self.draining = draining


class OverAdmissionError(RuntimeError):
    """`retry_after`: whole seconds, or None if a room this large is never admitted."""

    def __init__(self, reason: str, retry_after: int | None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass
class _Load:
    """Rooms in flight, and their page-rounded bytes."""

    rooms: int = 0
    bytes: int = 0


class Placement:
    def __init__(self, config: Config, fleet: Fleet) -> None:
        self._fleet = fleet
        self._routing = registry.load("routing", config.policies.routing)()
        self._admission = registry.load("admission", config.policies.admission)(
            max_rooms=config.limits.max_rooms, max_bytes=config.limits.max_bytes
        )
        self._lives: deque[float] = deque(maxlen=LIVES_KEPT)
        self._loads: dict[tuple[str, str], _Load] = {}
        self._total = _Load()

    def began(self, live: LiveRoom) -> None:
        for load in (self._total, self._loads.setdefault(_key(live.pair), _Load())):
            load.rooms, load.bytes = load.rooms + 1, load.bytes + live.bytes

    def ended(self, live: LiveRoom) -> None:
        """A retracted room has not lived yet: its life goes on in the next generation."""
        for load in (self._total, self._loads[_key(live.pair)]):
            load.rooms, load.bytes = load.rooms - 1, load.bytes - live.bytes
        if not live.retracted:
            self._lives.append(live.room.history[-1][1] - live.room.opened_at)

    def choose(self) -> Pair:
        """Raises NotServingError."""
        singles, prefills, decodes = map(self._fleet.ready, (Role.SINGLE, Role.PREFILL, Role.DECODE))
        names: list[tuple[str, str]] = [(single.name, "") for single in singles]
        names += [(prefill.name, decode.name) for prefill in prefills for decode in decodes]
        if not names:
            raise NotServingError(self._fleet.why_not(), draining=self._fleet.draining)
        nothing = _Load()
        loads = [self._loads.get(pair, nothing) for pair in names]
        first, second = self._routing.choose(
            [Candidate(prefill, decode or None, load.bytes, load.rooms)
             for (prefill, decode), load in zip(names, loads, strict=True)]
        ).key  # fmt: skip
        engines = self._fleet.engines
        return Pair(engines[first], engines[second]) if second else Pair(None, engines[first])

    def again(self, pair: Pair) -> Pair:
        """Where a room of `pair` begins again: there while its engines serve what they have. Raises NotServingError."""
        if all(engine.state in _SERVING for engine in pair.engines):
            return pair
        return self.choose()

    def admit(self, amount: int) -> None:
        """May a room of `amount` bytes begin beside what is in flight? Raises OverAdmissionError."""
        in_flight = InFlight(
            rooms=self._total.rooms,
            bytes=self._total.bytes,
            room_seconds=sum(self._lives) / len(self._lives) if self._lives else 0.0,
        )
        refused = self._admission.decide(in_flight, amount)
        if refused is not None:
            raise OverAdmissionError(refused.reason, refused.retry_after)


def _key(pair: Pair) -> tuple[str, str]:
    """As the routing policy names a pair: a single engine stands first, alone."""
    return (pair.decode.name, "") if pair.prefill is None else (pair.prefill.name, pair.decode.name)
