"""Where a room goes, and whether one more may begin: the routing and the admission policy, asked of what is live."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection

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


class Placement:
    def __init__(self, config: Config, fleet: Fleet) -> None:
        self._fleet = fleet
        self._routing = registry.load("routing", config.policies.routing)()
        self._admission = registry.load("admission", config.policies.admission)(
            max_rooms=config.limits.max_rooms, max_bytes=config.limits.max_bytes
        )
        self._lives: deque[float] = deque(maxlen=LIVES_KEPT)

    def ended(self, seconds: float) -> None:
        """A room has lived that long."""
        self._lives.append(seconds)

    def choose(self, rooms: Collection[LiveRoom]) -> Pair:
        """Raises NotServingError."""
        pairs: dict[tuple[str, str], Pair] = {}
        for engine in self._fleet.ready(Role.SINGLE):
            pairs[engine.name, ""] = Pair(None, engine)
        for prefill in self._fleet.ready(Role.PREFILL):
            for decode in self._fleet.ready(Role.DECODE):
                pairs[prefill.name, decode.name] = Pair(prefill, decode)
        if not pairs:
            raise NotServingError(self._fleet.why_not(), draining=self._fleet.draining)
        amounts: Counter[tuple[str, str]] = Counter()
        counts: Counter[tuple[str, str]] = Counter()
        for live in rooms:
            amounts[_names(live.pair)] += live.bytes
            counts[_names(live.pair)] += 1
        chosen = self._routing.choose(
            [Candidate(first, second or None, amounts[first, second], counts[first, second])
             for first, second in pairs]
        )  # fmt: skip
        return pairs[chosen.key]

    def again(self, pair: Pair, rooms: Collection[LiveRoom]) -> Pair:
        """Where a room of `pair` begins again: there while its engines serve what they have. Raises NotServingError."""
        if all(engine.state in _SERVING for engine in pair.engines):
            return pair
        return self.choose(rooms)

    def admit(self, rooms: Collection[LiveRoom], amount: int) -> None:
        """May a room of `amount` bytes begin beside `rooms`? Raises OverAdmissionError."""
        in_flight = InFlight(
            rooms=len(rooms),
            bytes=sum(live.bytes for live in rooms),
            room_seconds=sum(self._lives) / len(self._lives) if self._lives else 0.0,
        )
        refused = self._admission.decide(in_flight, amount)
        if refused is not None:
            raise OverAdmissionError(refused.reason, refused.retry_after)


def _names(pair: Pair) -> tuple[str, str]:
    """As the routing policy names a pair: a single engine stands first, alone."""
    return (pair.decode.name, "") if pair.prefill is None else (pair.prefill.name, pair.decode.name)
