"""What may happen next in a world of rooms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsv4ctl.controlplane.explore.nodes import Event, Nodes
from dsv4ctl.controlplane.explore.plan import SIDES, Env, Flight, Layout, Plan
from dsv4ctl.controlplane.explore.rank import RankView
from dsv4ctl.controlplane.rooms.states import RoomKey


class Choices:
    def __init__(self, plan: Plan, layout: Layout, nodes: Nodes) -> None:
        self._plan = plan
        self._layout = layout
        self._nodes = nodes
        self._keys = tuple(RoomKey(*room) for room in plan.rooms)

    def actions(
        self, nodes: tuple[int, ...], channels: tuple[Any, ...], flights: tuple[Flight, ...], env: Env
    ) -> Iterator[tuple[Event, bool]]:
        """Each with whether it must happen if it stays possible."""
        plane = self._nodes.view(nodes[0])
        yield from self._of_the_plane(plane, env)
        yield from self._of_the_lines(channels, env)
        for flight in flights:
            yield from self._of_a_flight(flight, nodes, env)
        for side in SIDES:
            yield from self._of_an_engine(side, nodes, channels, env)
        for rank in self._layout.ranks:
            if nodes[rank] >= 0:
                for move in self._nodes.moves(nodes[rank]):
                    yield ("rank", rank, move), True
                if env.aborts and SIDES[self._layout.side(rank)] in self._plan.abort_by:
                    for key in self._nodes.view(nodes[rank]).rooms:
                        yield ("fault", rank, key), False

    def _of_the_plane(self, plane: Any, env: Env) -> Iterator[tuple[Event, bool]]:
        before = env.opened and self._keys[env.opened - 1] not in plane.ended and self._plan.one_by_one
        if env.opened < len(self._keys) and all(plane.fleet.values()) and not any(env.ending) and not before:
            yield ("open", self._keys[env.opened]), True
        if env.aborts and "client" in self._plan.abort_by:
            for key in plane.abortable:
                yield ("abort", key), False
        if self._plan.link != "instant" or self._plan.link_faults:
            for name in plane.unreceived:
                yield ("resend", name), True

    def _of_the_lines(self, channels: tuple[Any, ...], env: Env) -> Iterator[tuple[Event, bool]]:
        for at, frames in enumerate(channels):
            if frames:
                if self._may_arrive(at, channels):
                    yield ("deliver", at), True
                yield from self._channel_faults(at, frames, env)
        for (kind, one, other), at in self._layout.line.items() if env.breaks else ():
            if kind == "peer" and one < other and (channels[at] or channels[self._layout.line["peer", other, one]]):
                yield ("break", at), False

    def _channel_faults(self, at: int, frames: tuple[Any, ...], env: Env) -> Iterator[tuple[Event, bool]]:
        kind = self._layout.lines[at][0]
        if (kind in ("up", "down") and env.link_faults) or (kind == "peer" and env.peer_faults):
            yield ("lose", at), False
            yield ("repeat", at), False
            if len(frames) > 1:
                yield ("overtake", at), False

    def _of_a_flight(self, flight: Flight, nodes: tuple[int, ...], env: Env) -> Iterator[tuple[Event, bool]]:
        writes = self._layout.alive(flight.writer, nodes, env)
        if flight.state != "landed" and self._layout.alive(flight.reader, nodes, env):
            yield ("land", flight), writes and flight.state == "posted"
        if writes:
            if flight.state == "landed":
                yield ("complete", flight), True
            if flight.state == "posted" and env.poisons:
                yield ("fail", flight), False

    def _may_arrive(self, at: int, channels: tuple[Any, ...]) -> bool:
        """A peer's frame is heard behind the openings that were sent before."""
        kind, _, to = self._layout.lines[at]
        return kind != "peer" or not self._unopened(to, channels)

    def _may_be_asked(self, side: str, key: RoomKey, channels: tuple[Any, ...]) -> bool:
        """The request arrives behind the opening of its room on every rank."""
        return not any(key in self._unopened(rank, channels) for rank in self._layout.of_side[side])

    def _unopened(self, rank: int, channels: tuple[Any, ...]) -> list[RoomKey]:
        """Rooms whose openings wait in line for a rank that takes them in before anything that was sent later."""
        waiting = channels[self._layout.line["down", 0, rank]] if self._plan.in_order else ()
        return [frame[1] for frame in waiting if frame[0] == "open"]

    def _of_an_engine(
        self, side: str, nodes: tuple[int, ...], channels: tuple[Any, ...], env: Env
    ) -> Iterator[tuple[Event, bool]]:
        at = SIDES.index(side)
        plane = self._nodes.view(nodes[0])
        ranks = self._layout.of_side[side]
        if env.ending[at]:
            yield ("reap", side), True
        elif env.unnoticed[at]:
            yield ("notice", side), True
        elif not plane.fleet[side] and env.restarts:
            yield ("restart", side), True
        if env.crashes and plane.fleet[side]:
            for rank in ranks:
                if nodes[rank] >= 0:
                    yield ("crash", rank), False
        if all(nodes[rank] >= 0 for rank in ranks):
            for key in sorted(plane.rooms) if self._plan.in_order else plane.submitted:
                if (side, key) not in env.submitted and self._may_be_asked(side, key, channels):
                    yield ("submit", side, key), True
            yield from self._of_its_ranks(side, [self._nodes.view(nodes[rank]) for rank in ranks])

    def _of_its_ranks(self, side: str, views: list[RankView]) -> Iterator[tuple[Event, bool]]:
        """What they do together: one that does not come to the round stops all of them."""
        if views[0].facts:
            yield ("round", side), True
        if views[0].admits and max(view.budget for view in views) >= self._plan.setup.wants:
            yield ("admit", side), True
        for key, _ in views[0].working:
            yield ("step", side, key), True

    def time_outs(self, nodes: tuple[int, ...]) -> Iterator[Event]:
        for key in self._nodes.view(nodes[0]).overdue:
            yield ("tick", key)
        for rank in self._layout.of_side["D"]:
            if nodes[rank] >= 0:
                for key in self._nodes.view(nodes[rank]).ack_due:
                    yield ("rank", rank, ("overdue", key))
