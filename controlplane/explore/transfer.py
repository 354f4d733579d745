"""The world of rooms: a control plane, the ranks of a prefill and of a decode engine, and everything between them.

Its state is four numbers: the nodes, the channels, the writes in flight, and what is left of the faults. Actions are
taken one at a time in every order; a frame, a landing, a completion, a round of the ranks and a time-out are actions
of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Any

from dsv4ctl.controlplane.explore.choices import Choices
from dsv4ctl.controlplane.explore.decode import DecodeRank
from dsv4ctl.controlplane.explore.nodes import Event, Nodes, Output, Violation
from dsv4ctl.controlplane.explore.plan import FAULTS, SIDES, Env, Flight, Layout, Plan, capped, eager_may_be
from dsv4ctl.controlplane.explore.plane import Plane, PlaneView
from dsv4ctl.controlplane.explore.prefill import PrefillRank
from dsv4ctl.controlplane.explore.rank import Facts, RankView, is_free
from dsv4ctl.controlplane.explore.search import Step
from dsv4ctl.controlplane.explore.silence import Silence
from dsv4ctl.controlplane.explore.words import describe
from dsv4ctl.controlplane.rooms.states import RoomKey

#: Link frames that nobody sends again: what is lost with them ends by a deadline and, if need be, a fence.
_ONCE = frozenset({"open", "report", "acked", "fenced", "quarantined"})
#: Of a rank: read only once a connection was made again, which does not happen in such a world.
_UNREAD_IF_EAGER = frozenset({"unacked"})


class _Draft:
    """A state being changed."""

    __slots__ = ("channels", "env", "flights", "nodes", "ops", "strike")

    def __init__(
        self, nodes: tuple[int, ...], channels: tuple[Any, ...], flights: tuple[Flight, ...], env: Env
    ) -> None:
        self.nodes = list(nodes)
        self.channels = list(channels)
        self.flights = list(flights)
        self.env = env
        self.ops: dict[int, list[Output]] = {}
        self.strike: list[Any] = []  #: [how many frames on, how]: a fault of an instant link, until it strikes


class Transfer:
    def __init__(self, plan: Plan) -> None:
        self.name = plan.name
        self.plan = plan
        if plan.eager and not eager_may_be(plan):
            raise ValueError(f"world {plan.name}: its frames may not arrive early, for they may be lost or forgotten")
        self.nodes = Nodes(_UNREAD_IF_EAGER if plan.eager else frozenset())
        self._layout = Layout(plan)
        self._choices = Choices(plan, self._layout, self.nodes)
        self._silence = Silence(plan, self._layout, self.nodes)
        self._parts: list[dict[Any, int]] = [{}, {}, {}, {}]
        self._values: list[list[Any]] = [[], [], [], []]

    # ---- World -----------------------------------------------------------------------------------------------------

    def initial(self) -> tuple[int, ...]:
        plan, first = self.plan, (1, 1)
        names = (tuple(self._layout.name(rank, first) for rank in self._layout.of_side[side]) for side in SIDES)
        nodes = (self.nodes.add(Plane(*names)), *(self._new_rank(rank, first) for rank in self._layout.ranks))
        budget = {field: getattr(plan, field) for field in FAULTS}
        return self._close(_Draft(nodes, ((),) * len(self._layout.lines), (), Env(opened=0, **budget)))

    def steps(self, state: tuple[int, ...]) -> Iterator[Step]:
        nodes, channels, flights, env = self._open(state)
        moved = False
        for action, fair in self._choices.actions(nodes, channels, flights, env):
            step = self._take(state, action, fair)
            if step is not None:
                moved = moved or fair
                yield step
                if env.link_faults and self.plan.link == "instant":
                    yield from self._struck(state, action)
        if self.plan.setup.hasty or not moved:
            for action in self._choices.time_outs(nodes):
                step = self._take(state, action, True)
                if step is not None:
                    yield step if self.plan.setup.hasty or env.lost else step._replace(violation=_WAITS)

    def check(self, state: tuple[int, ...]) -> None:
        nodes, _, flights, env = self._open(state)
        for flight in flights:
            self._check_flight(flight, nodes, env)
        plane = self.nodes.view(nodes[0])
        for rank in self._layout.ranks:
            if nodes[rank] >= 0:
                name = self._layout.name(rank, env.epochs)
                for key in self._living(plane, name, self.nodes.view(nodes[rank])):
                    raise Violation("S5", f"room {key} has ended, and lives on {name}")

    def done(self, state: tuple[int, ...]) -> bool:
        nodes, _, flights, env = self._open(state)
        plane = self.nodes.view(nodes[0])
        if plane.rooms or flights or any(env.ending) or any(env.unnoticed):
            return False
        if env.opened < len(self.plan.rooms) and (all(plane.fleet.values()) or env.restarts):
            return False
        return all(self.nodes.view(nodes[rank]).empty for rank in self._layout.ranks if nodes[rank] >= 0)

    # ---- what may happen -------------------------------------------------------------------------------------------

    def _struck(self, state: tuple[int, ...], action: Event) -> Iterator[Step]:
        """A fault strikes one of the frames that the action sends to ranks over an instant link, in each way."""
        for frame in count():
            for how in ("lost", "repeated", "late"):
                step = self._take(state, action, False, strike := [frame, how])
                if strike:
                    return
                if step is not None:
                    yield step._replace(action=("struck", action, frame, how))

    def _take(self, state: tuple[int, ...], action: Event, fair: bool, strike: list[Any] | None = None) -> Step | None:
        """None if the action changes nothing. `strike` is emptied when it strikes."""
        draft = _Draft(*self._open(state))
        draft.strike = [] if strike is None else strike
        try:
            getattr(self, f"_do_{action[0]}")(draft, *action[1:])
            if self.plan.eager:
                self.hush(draft)
        except Violation as violation:
            return Step(action, fair, None, violation)
        if self.plan.at_most is not None:
            draft.env = capped(draft.env, self.plan, self.plan.at_most)
        after = self._close(draft)
        return None if after == state else Step(action, fair, after)

    # ---- actions ---------------------------------------------------------------------------------------------------

    def _do_open(self, draft: _Draft, key: RoomKey) -> None:
        draft.env = draft.env._replace(opened=draft.env.opened + 1)
        self._send(draft, 0, ("open", key))

    def _do_abort(self, draft: _Draft, key: RoomKey) -> None:
        draft.env = draft.env._replace(aborts=draft.env.aborts - 1)
        self._send(draft, 0, ("abort", key))

    def _do_tick(self, draft: _Draft, key: RoomKey) -> None:
        self._send(draft, 0, ("tick", key))

    def _do_resend(self, draft: _Draft, name: str) -> None:
        at = self._layout.line["down", 0, self._layout.rank(name)]
        if not any(frame[0] == "abort" for frame in draft.channels[at]):
            self._send(draft, 0, ("resend", name))

    def _do_fault(self, draft: _Draft, rank: int, key: RoomKey) -> None:
        draft.env = draft.env._replace(aborts=draft.env.aborts - 1)
        self._send(draft, rank, ("fault", key))

    def _do_rank(self, draft: _Draft, rank: int, move: Event) -> None:
        self._send(draft, rank, move)

    def _do_submit(self, draft: _Draft, side: str, key: RoomKey) -> None:
        draft.env = draft.env._replace(submitted=tuple(sorted({*draft.env.submitted, (side, key)})))
        first, *others = self._layout.of_side[side]
        before = draft.nodes[first]
        self._send(draft, first, ("submit", key, True))
        if draft.nodes[first] != before:
            for rank in others:
                self._send(draft, rank, ("submit", key, False))

    def _do_round(self, draft: _Draft, side: str) -> None:
        views = [self.nodes.view(draft.nodes[rank]) for rank in self._layout.of_side[side]]
        if len({tuple(key for key, _ in view.facts) for view in views}) > 1:
            raise Violation("S4", f"the ranks of {side} have not the same sequences in the same order")
        agreed = self.agreed([tuple(facts for _, facts in view.facts) for view in views])
        self._together(draft, side, [("round", facts) for facts in agreed])

    def _do_admit(self, draft: _Draft, side: str) -> None:
        free = [self.nodes.view(draft.nodes[rank]).budget for rank in self._layout.of_side[side]]
        self._together(draft, side, [("admit", budget) for budget in self.agreed_budget(free)])

    def _do_step(self, draft: _Draft, side: str, key: RoomKey) -> None:
        found = [dict(self.nodes.view(draft.nodes[rank]).working).get(key) for rank in self._layout.of_side[side]]
        if None in found:
            raise Violation("S4", f"room {key} is in the step of some ranks of {side} and not of others")
        if all(found):
            self._together(draft, side, [("step", key)] * len(found))

    def _do_deliver(self, draft: _Draft, at: int) -> None:
        frame, *rest = draft.channels[at]
        draft.channels[at] = tuple(rest)
        self._arrive(draft, self._layout.lines[at], frame)

    def _do_lose(self, draft: _Draft, at: int) -> None:
        frame = draft.channels[at][0]
        self._spend_fault(draft, at)
        draft.channels[at] = draft.channels[at][1:]
        if self._layout.lines[at][0] == "peer" or frame[0] in _ONCE:
            draft.env = draft.env._replace(lost=True)

    def _do_repeat(self, draft: _Draft, at: int) -> None:
        self._spend_fault(draft, at)
        draft.channels[at] = (draft.channels[at][0], *draft.channels[at])

    def _do_overtake(self, draft: _Draft, at: int) -> None:
        self._spend_fault(draft, at)
        first, second, *rest = draft.channels[at]
        draft.channels[at] = (second, first, *rest)

    def _spend_fault(self, draft: _Draft, at: int) -> None:
        which = "peer_faults" if self._layout.lines[at][0] == "peer" else "link_faults"
        draft.env = draft.env._replace(**{which: getattr(draft.env, which) - 1})

    def _do_break(self, draft: _Draft, at: int) -> None:
        """All that is on the connection is lost; the decode rank dials again and repeats what it waits for."""
        _, p, d = self._layout.lines[at]
        draft.env = draft.env._replace(breaks=draft.env.breaks - 1)
        draft.channels[at] = draft.channels[self._layout.line["peer", d, p]] = ()
        if draft.nodes[d] >= 0 and draft.nodes[p] >= 0:
            self._send(draft, d, ("connected", self._layout.name(p, draft.env.epochs)))

    def _do_land(self, draft: _Draft, flight: Flight) -> None:
        draft.flights.remove(flight)
        if flight.state == "posted":
            draft.flights.append(flight._replace(state="landed"))
        reader = self._layout.rank(flight.reader)
        self._send(draft, reader, ("land", flight.target, flight.key, flight.logical, flight.writer))
        at = self._layout.line["note", self._layout.rank(flight.writer), reader]
        draft.channels[at] = (*draft.channels[at], (flight.writer, flight.reader, flight.key, flight.logical))

    def _do_complete(self, draft: _Draft, flight: Flight, ok: bool = True) -> None:
        draft.flights.remove(flight)
        event = ("written", flight.key, flight.logical, flight.reader, ok)
        self._send(draft, self._layout.rank(flight.writer), event)

    def _do_fail(self, draft: _Draft, flight: Flight) -> None:
        env, at = draft.env, SIDES.index(flight.writer[0])
        draft.env = env._replace(poisons=env.poisons - 1, faulty=_set(env.faulty, at, True))
        draft.flights.append(flight._replace(state="unknown"))
        self._do_complete(draft, flight, ok=False)

    def _do_crash(self, draft: _Draft, rank: int) -> None:
        """The process is gone; what it had posted may still land until it is reaped."""
        at = SIDES.index(self._layout.name(rank, draft.env.epochs)[0])
        env = draft.env._replace(crashes=draft.env.crashes - 1, faulty=_set(draft.env.faulty, at, True))
        draft.env = env._replace(unnoticed=_set(env.unnoticed, at, not env.ending[at]))
        draft.nodes[rank] = -1
        draft.channels[self._layout.line["down", 0, rank]] = ()
        for line, (kind, _, to) in enumerate(self._layout.lines):
            if kind in ("peer", "note") and to == rank:
                draft.channels[line] = ()

    def _do_notice(self, draft: _Draft, side: str) -> None:
        at = SIDES.index(side)
        draft.env = draft.env._replace(unnoticed=_set(draft.env.unnoticed, at, False))
        for node, event in self._condemn(draft, side):
            self._send(draft, node, event)

    def _do_reap(self, draft: _Draft, side: str) -> None:
        """Every process of the engine is killed and reaped: what it had in flight is over."""
        at = SIDES.index(side)
        env = draft.env
        if not (self.plan.setup.hasty or env.lost or env.faulty[at]):
            raise Violation("S5", f"engine {side} is fenced, though none of its ranks failed")
        for rank in self._layout.of_side[side]:
            draft.nodes[rank] = -1
        names = {self._layout.name(rank, env.epochs) for rank in self._layout.of_side[side]}
        draft.flights = self.ended_with(names, draft.flights)
        draft.env = env._replace(ending=_set(env.ending, at, False), faulty=_set(env.faulty, at, False))
        for line, (kind, one, other) in enumerate(self._layout.lines):
            if other in self._layout.of_side[side] or (kind == "up" and one in self._layout.of_side[side]):
                draft.channels[line] = ()
        self._send(draft, 0, ("gone", side))

    def ended_with(self, reaped: set[str], flights: list[Flight]) -> list[Flight]:
        """The writes that are still in flight once these processes are reaped."""
        return [flight for flight in flights if flight.writer not in reaped]

    def _do_restart(self, draft: _Draft, side: str) -> None:
        at = SIDES.index(side)
        env = draft.env
        epoch = env.epochs[at] + 1
        draft.env = env._replace(epochs=_set(env.epochs, at, epoch), restarts=env.restarts - 1)
        for rank in self._layout.of_side[side]:
            draft.nodes[rank] = self._new_rank(rank, draft.env.epochs)
        names = tuple(self._layout.name(rank, draft.env.epochs) for rank in self._layout.of_side[side])
        self._send(draft, 0, ("up", side, names))

    # ---- what happens to what is sent ------------------------------------------------------------------------------

    def _send(self, draft: _Draft, node: int, event: Event) -> None:
        """The event at the node, then whatever follows from it at once."""
        todo = deque([(node, event)])
        nodes, step = draft.nodes, self.nodes.step
        while todo:
            at, event = todo.popleft()
            if nodes[at] < 0:
                continue
            nodes[at], sent = step(nodes[at], event)
            for output in sent:
                todo.extend(self._dispatch(draft, at, output))

    def _dispatch(self, draft: _Draft, node: int, output: Output) -> list[tuple[int, Event]]:
        kind, *rest = output
        match kind:
            case "op":
                draft.ops.setdefault(node, []).append(output)
            case "down":
                return self._down(draft, *rest)
            case "up":
                if self.plan.link != "both":
                    return [(0, ("frame", self._layout.name(node, draft.env.epochs), *rest))]
                self._queue(draft, ("up", node, 0), tuple(rest))
            case "peer":
                peer, *frame = rest
                if self._layout.alive(peer, draft.nodes, draft.env):
                    name = self._layout.name(node, draft.env.epochs)
                    self._queue(draft, ("peer", node, self._layout.rank(peer)), (name, peer, *frame))
            case "flight":
                draft.flights.append(Flight._make((self._layout.name(node, draft.env.epochs), *rest, "posted")))
            case "abandon":
                name = self._layout.name(node, draft.env.epochs)
                draft.flights = [f for f in draft.flights if (f.writer, f.reader) != (name, rest[0])]
            case "fence":
                if self._layout.name(self._layout.rank(rest[0]), draft.env.epochs) == rest[0]:
                    return self._condemn(draft, rest[0][0])
        return []

    def _down(self, draft: _Draft, name: str, frame: tuple[Any, ...]) -> list[tuple[int, Event]]:
        if not self._layout.alive(name, draft.nodes, draft.env):
            return []
        rank = self._layout.rank(name)
        if self.plan.link != "instant":
            self._queue(draft, ("down", 0, rank), frame)
            return []
        if not self._comes_now(draft, rank, frame):
            return []
        return [(rank, self._layout.own(name, frame))]

    def _comes_now(self, draft: _Draft, rank: int, frame: tuple[Any, ...]) -> bool:
        """Over an instant link, unless this is the frame that is struck: what is late waits, the next ones overtake."""
        if not draft.strike:
            return True
        if draft.strike[0]:
            draft.strike[0] -= 1
            return True
        how = draft.strike[1]
        draft.strike.clear()
        env = draft.env
        draft.env = env._replace(
            link_faults=env.link_faults - 1, lost=env.lost or (how == "lost" and frame[0] in _ONCE)
        )
        if how != "lost":
            self._queue(draft, ("down", 0, rank), frame)
        return bool(how == "repeated")

    def _condemn(self, draft: _Draft, side: str) -> list[tuple[int, Event]]:
        """The engine's life is over: its rooms are aborted at once, its processes will be killed and reaped."""
        at = SIDES.index(side)
        if draft.env.ending[at] or not self.nodes.view(draft.nodes[0]).fleet[side]:
            return []
        draft.env = draft.env._replace(
            ending=_set(draft.env.ending, at, True), unnoticed=_set(draft.env.unnoticed, at, False)
        )
        return [(0, ("lost", side))]

    def _queue(self, draft: _Draft, line: tuple[str, int, int], frame: tuple[Any, ...]) -> None:
        at = self._layout.line[line]
        draft.channels[at] = (*draft.channels[at], frame)

    def _arrive(self, draft: _Draft, line: tuple[str, int, int], frame: tuple[Any, ...]) -> None:
        kind, one, other = line
        if kind == "down":
            self._send(draft, other, self._layout.own(self._layout.name(other, draft.env.epochs), frame))
        elif kind == "up":
            self._send(draft, 0, ("frame", self._layout.name(one, draft.env.epochs), *frame))
        else:
            sender, receiver, *rest = frame
            if not self._layout.alive(receiver, draft.nodes, draft.env):
                return
            if kind == "note":
                self._send(draft, other, ("notified", sender, *rest))
            elif rest[0] == "destination":
                self._send(draft, other, ("destination", sender, *rest[1:]))
            else:
                self._send(draft, other, (f"peer_{rest[0]}", sender, *rest[1:]))

    def hush(self, draft: _Draft) -> None:
        """What says nothing any more arrives; of two equal acks the second says nothing if no line loses one."""
        while heard := [
            (at, frame)
            for at, frames in enumerate(draft.channels)
            if frames
            for frame in self._silence.frames(draft.nodes, draft.channels, draft.env, at)
        ]:
            for at, frame in heard:
                draft.channels[at] = tuple(other for other in draft.channels[at] if other != frame)
                self._arrive(draft, self._layout.lines[at], frame)
        if not self.plan.peer_faults:
            for at, frames in enumerate(draft.channels):
                if len(frames) > 1 and self._layout.lines[at][0] == "peer":
                    draft.channels[at] = tuple(dict.fromkeys(frames))
        self._forget(draft)

    def _forget(self, draft: _Draft) -> None:
        """Numbers of aborts count anew once all are received and none is on its way; what was submitted is over."""
        plane = self.nodes.view(draft.nodes[0])
        for name in plane.settled:
            rank = self._layout.rank(name)
            lines = (self._layout.line["down", 0, rank], self._layout.line["up", rank, 0])
            if not any(frame[0] in ("abort", "received") for at in lines for frame in draft.channels[at]):
                self._send(draft, 0, ("settled", name))
                self._send(draft, rank, ("settled",))
        for rank in self._layout.ranks:
            if draft.nodes[rank] >= 0 and self.nodes.view(draft.nodes[rank]).worn:
                self._send(draft, rank, ("idle",))
        if any(key in plane.ended for _, key in draft.env.submitted):
            left = tuple(of for of in draft.env.submitted if of[1] not in plane.ended)
            draft.env = draft.env._replace(submitted=left)

    def agreed(self, known: list[tuple[Facts, ...]]) -> list[tuple[Facts, ...]]:
        """What every rank goes by: element by element the least that any of them knows."""
        least = tuple(
            Facts(*(min(values) for values in zip(*of_one, strict=True))) for of_one in zip(*known, strict=True)
        )
        return [least] * len(known)

    def agreed_budget(self, free: list[int]) -> list[int]:
        """Pages that every rank has, of those that each has free."""
        return [min(free)] * len(free)

    def _together(self, draft: _Draft, side: str, events: list[Event]) -> None:
        """On every rank at the same step; what they do must be the same (S4)."""
        draft.ops = {rank: [] for rank in self._layout.of_side[side]}
        for rank, event in zip(self._layout.of_side[side], events, strict=True):
            self._send(draft, rank, event)
        done = [tuple(draft.ops[rank]) for rank in self._layout.of_side[side]]
        if len(set(done)) > 1:
            raise Violation("S4", f"the ranks of {side} do not do the same: {done}")

    # ---- checks ----------------------------------------------------------------------------------------------------

    def _living(self, plane: PlaneView, name: str, view: RankView) -> set[RoomKey]:
        """Ended in the control plane, and not here. A rank that forgot a room may open it again: it is told again."""
        if self.plan.setup.remembered is None:
            return {key for key in view.rooms if key in plane.ended}
        return {key for key in plane.ended & view.live if (name, key) not in plane.told}

    def _check_flight(self, flight: Flight, nodes: tuple[int, ...], env: Env) -> None:
        what = f"a write of {flight.writer} for room {flight.key} is {flight.state}"
        if flight.state != "landed" and self._layout.alive(flight.reader, nodes, env):
            view = self.nodes.view(nodes[self._layout.rank(flight.reader)])
            if _lost(view, flight.target, flight.key):
                raise Violation("S3", f"{flight.reader} page {flight.target} is given away while {what}")
        if self._layout.alive(flight.writer, nodes, env):
            view = self.nodes.view(nodes[self._layout.rank(flight.writer)])
            if _lost(view, flight.source, flight.key):
                raise Violation("S2", f"{flight.writer} page {flight.source} is given away while {what}")

    # ---- names and parts -------------------------------------------------------------------------------------------

    def _new_rank(self, rank: int, epochs: tuple[int, int]) -> int:
        make = DecodeRank if self._layout.side(rank) else PrefillRank
        return self.nodes.add(make(self._layout.name(rank, epochs), self.plan.setup))

    def _open(self, state: tuple[int, ...]) -> tuple[Any, Any, Any, Env]:
        values = self._values
        return values[0][state[0]], values[1][state[1]], values[2][state[2]], values[3][state[3]]

    def _close(self, draft: _Draft) -> tuple[int, ...]:
        parts = (tuple(draft.nodes), tuple(draft.channels), tuple(sorted(draft.flights)), draft.env)
        return tuple([self._part(at, part) for at, part in enumerate(parts)])

    def _part(self, at: int, value: Any) -> int:
        numbers = self._parts[at]
        number = numbers.get(value)
        if number is None:
            number = numbers[value] = len(numbers)
            self._values[at].append(value)
        return number

    def describe(self, action: Event) -> str:
        return describe(self._layout.titles(), self._layout.lines, action)


_WAITS = Violation("S5", "nothing but a deadline can move a room on, though nothing failed")


def _lost(view: RankView, page: int, key: RoomKey) -> bool:
    """The page is anybody's, or another room's."""
    return is_free(view, page) or view.holders.get(page, key) != key


def _set(flags: tuple[Any, ...], at: int, value: Any) -> tuple[Any, Any]:
    return (value, flags[1]) if at == 0 else (flags[0], value)
