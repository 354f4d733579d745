"""What must hold while a control plane and its engines run, and once they have come to rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.controlplane.scheduler.fleet import Engine, EngineState
from dsv4ctl.controlplane.scheduler.live import LiveRoom
from dsv4ctl.controlplane.telemetry.events import Event
from simulation.memory import Violated
from simulation.rank import SPACE, Rank

if TYPE_CHECKING:
    from simulation.world import World

#: Seconds that the control plane and its loops may be late: two rounds of the watchdog, lines, a reaped process.
SLACK = 1.0
#: Seconds within which every rank is told of a fence, on a line with nothing wrong.
_TOLD = 0.5
#: What is never said unless something in the control plane itself is broken.
_BROKEN = (Event.LOOP_DIED, Event.LINK_BAD_FRAME, Event.ROOM_INVALID_REPORT, Event.LINK_REFUSED)
#: What is never said as long as all faults are mild: nobody failed.
_NOT_MILD = (Event.ENGINE_WEDGED, Event.ENGINE_QUARANTINE_FULL, Event.ENGINE_RESTARTING, Event.ENGINE_GAVE_UP)


class Checks:
    def __init__(self, world: World, violated: Violated) -> None:
        self._world, self._violated = world, violated
        deadlines = world.config.deadlines
        #: Of an abort: asked, the writers fenced, then the readers, each reaped within its own deadline.
        self.abort_bound = 2 * (deadlines.ack + deadlines.fence) + SLACK
        self._quarantine_bound = deadlines.ack + deadlines.fence + SLACK
        self._forgotten: dict[tuple[str, RoomKey], float] = {}
        self._quarantined: dict[str, float] = {}
        self._behind: dict[str, float] = {}
        self._idle_since: dict[str, float] = {}
        self.slowest = 0.0  #: of the aborts: the largest share of its bound that any took

    # ---- events --------------------------------------------------------------------------------------

    def event(self, event: Event, level: str, fields: dict[str, Any]) -> None:
        if event is Event.LINK_REFUSED and "Hello" in fields["reason"]:
            return  # lines that are cut, or a suspended machine
        if event in _BROKEN or "control plane fault" in str(fields.get("reason", "")):
            self._violated("S8", f"{event.value}: {fields}")
        elif self._world.plan.mild and event in _NOT_MILD:
            self._violated("S5", f"nothing failed, and yet {event.value}: {fields}")
        elif event is Event.ENGINE_WEDGED and not self._world.injector.silenced(fields["engine"]):
            self._violated("S5", f"{fields['engine']} works, and is called wedged: {fields['cause']}")
        elif event is Event.ENGINE_STOPPING:
            self._stopping(fields["engine"])
        elif event is Event.ENGINE_FENCED:
            self._world.later(_TOLD, lambda: self._fence_told(fields["incarnation"]))
        elif event is Event.GATEWAY_CLIENT_GONE:
            self._gone(fields["room"])

    def ended(self, live: LiveRoom) -> None:
        if live.aborting_at is not None:
            taken = self._world.elapsed(live.aborting_at)
            self.slowest = max(self.slowest, taken / self.abort_bound)

    def _stopping(self, engine: str) -> None:
        """An engine is asked to end only once its rooms are over or being aborted."""
        desk = self._world.supervisor.desk
        for live in desk.live.values():
            if engine in live.engines() and not live.aborting.is_set():
                self._violated("S5", f"{engine} is stopped, and room {live.key} on it is {live.room.state.value}")

    def _fence_told(self, incarnation: str) -> None:
        """Every rank whose line is sound knows by now."""
        for rank in self._sound():
            if incarnation not in rank.fences:
                self._violated("S3", f"{rank.name} was not told that {self._world.name_of(incarnation)} is fenced")

    def _gone(self, key: RoomKey) -> None:
        live = self._world.supervisor.desk.live.get(key)
        if live is not None and live.room.source is None:
            self._violated("S5", f"the client of room {key} left, and the room is not aborted")

    def _sound(self) -> Iterator[Rank]:
        """Ranks that have been connected for a while and have nothing wrong with their lines, or themselves."""
        world = self._world
        for engine, planned in world.supervisor.fleet.ranks():
            rank = world.host.ranks.get(planned.incarnation)
            fresh = planned.link is None or planned.link.lost or world.elapsed(planned.started_at) < _TOLD + 2 * SLACK
            if rank is not None and not fresh and rank.running and not world.troubled(engine.name):
                yield rank

    # ---- a round, several times a second --------------------------------------------------------------

    def round(self) -> None:
        world = self._world
        for live in list(world.supervisor.desk.live.values()):
            self._room(live)
        for engine in world.supervisor.fleet:
            for planned in engine.ranks.values() if engine.cause is None else ():  # found, and about to be killed
                watched = engine.state in (EngineState.READY, EngineState.DRAINING) and planned.history
                if watched and self._watched(planned.history[-1].at) > world.config.deadlines.wedge + 2 * SLACK:
                    self._violated("S5", f"{engine.name} is {engine.state.value}, and nobody has heard of it")
            self._wedged(engine)
        for rank in self._sound():
            self._aborts_arrived(rank)
        for rank in world.host.ranks.values():
            self._rank(rank)

    def _watched(self, since: float) -> float:
        """Seconds that the watchdog has had: after a standstill of its own it begins anew."""
        return self._world.elapsed(max(since, self._world.awake))

    def _aborts_arrived(self, rank: Rank) -> None:
        """Whatever the line lost before: every abort has been taken, in order."""
        planned = self._world.supervisor.fleet.rank(rank.incarnation)
        taken = rank.agent._inbox.received
        if planned is None or taken == planned.aborts._seq:
            self._behind.pop(rank.name, None)
        elif self._world.elapsed(self._behind.setdefault(rank.name, self._world.loop.time())) > SLACK:
            self._violated("S5", f"{rank.name} was sent {planned.aborts._seq} aborts and has {taken}")

    def _wedged(self, engine: Engine) -> None:
        """One with work that does none of it is found out in time, which counts while its ranks are heard of.

        Of one that is stopped or cut off meanwhile it is its silence that counts (`round`): what it did just before
        the fault is told, as progress, once it goes on.
        """
        world, now = self._world, self._world.loop.time()
        ranks = [world.host.ranks[incarnation] for incarnation in engine.ranks if incarnation in world.host.ranks]
        wedged = engine.ready and ranks and ranks[0].group.wedged and ranks[0].group.work()
        heard = (
            planned.history and world.elapsed(planned.history[-1].at) <= SLACK for planned in engine.ranks.values()
        )
        if not (wedged and all(heard)):
            self._idle_since.pop(engine.name, None)
        elif self._watched(self._idle_since.setdefault(engine.name, now)) > world.config.deadlines.wedge + 2 * SLACK:
            self._violated("S5", f"{engine.name} has work and does none of it, and nobody says so")

    def _room(self, live: LiveRoom) -> None:
        due = live.room.next_deadline()
        if due is not None and self._world.elapsed(due) > SLACK:
            self._violated("S5", f"room {live.key} is {live.room.state.value} past its deadline")
        if live.aborting_at is not None and self._world.elapsed(live.aborting_at) > self.abort_bound:
            self._violated("S5", f"room {live.key} has been aborting for {self.abort_bound:.1f} s")

    def _rank(self, rank: Rank) -> None:
        """Rooms that are over in the control plane are over here soon; quarantined pages do not stay."""
        world, now = self._world, self._world.loop.time()
        live = world.supervisor.desk.live
        for key, half in rank.agent._rooms:
            if key in live or not rank.running:
                self._forgotten.pop((rank.name, key), None)
            elif world.elapsed(self._forgotten.setdefault((rank.name, key), now)) > self.abort_bound:
                self._violated("S5", f"{rank.name}: room {key} is over, and {half.state.value} here")
        quarantined = rank.gate.counts()["quarantined"][SPACE]
        if not quarantined or rank.group.wedged:  # which gives nothing back; without work nobody can tell
            self._quarantined.pop(rank.name, None)
        elif world.elapsed(self._quarantined.setdefault(rank.name, now)) > self._quarantine_bound:
            self._violated("S5", f"{rank.name}: {quarantined} pages stay in quarantine")

    # ---- at rest -------------------------------------------------------------------------------------

    def at_rest(self) -> None:
        """Every room is over on both sides, and every page is free."""
        world = self._world
        for live in world.supervisor.desk.live.values():
            self._violated("S5", f"room {live.key} is {live.room.state.value} at the end")
        if world.supervisor.desk._placement._total.rooms:
            self._violated("S5", "no room is left, and some count as in flight")
        for _, planned in world.supervisor.fleet.ranks():
            rank = world.host.ranks.get(planned.incarnation)
            if rank is not None and planned.ready and rank.agent._inbox.received != planned.aborts._seq:
                self._violated("S5", f"{rank.name} was sent {planned.aborts._seq} aborts and has not taken all")
        for rank in world.host.ranks.values():
            if rank.group.wedged:
                continue  # without work nobody can tell; it shows with the next request
            for key, half in rank.agent._rooms:
                self._violated("S5", f"{rank.name}: room {key} is {half.state.value} at the end")
            for state, spaces in rank.gate.counts().items():
                if state != "free" and spaces[SPACE]:
                    world.leaked += spaces[SPACE]
                    self._violated("S5", f"{rank.name}: {spaces[SPACE]} pages are {state} at the end")
            if rank.gate.totals()["tickets"]:
                self._violated("S5", f"{rank.name}: tickets are left at the end")
        for group in world.host.groups.values():
            self._same_order([rank.agent.applied for rank in group.ranks], group.name)

    def _same_order(self, applied: list[list[RoomKey]], engine: str) -> None:
        """Of an abort that one rank was told twice, the first time counts: the room is over the second time."""
        common = set.intersection(*map(set, applied)) if applied else set()
        orders = {tuple(key for key in dict.fromkeys(keys) if key in common) for keys in applied}
        if len(orders) > 1:
            self._violated("S4", f"{engine}: its ranks applied aborts in different orders")
