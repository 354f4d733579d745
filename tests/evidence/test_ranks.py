"""What any rank tells of a room: its tickets and its last events."""

from __future__ import annotations

import itertools

from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.controlplane.tickets.types import Consumer
from dsv4ctl.controlplane.trace.ring import Ring
from dsv4ctl.engine_adapters.evidence import EVENTS, stacks, tickets_and_events
from small_gate import SmallGate


def test_a_room_alone_or_all() -> None:
    gate = SmallGate()
    load = gate.load(1)
    for room in (RoomKey(7, 1), RoomKey(8, 1)):
        gate.request(Consumer.INDEXER, load.extents, room=room)
    one, every = tickets_and_events("7.1", gate), tickets_and_events("", gate)
    assert [ticket["room"] for ticket in one["tickets"]] == ["7.1"]
    assert {(event[2], event[3]) for event in one["trace"]} >= {("request", "7.1")}
    assert {event[3] for event in one["trace"]} == {"7.1"}
    assert [ticket["room"] for ticket in every["tickets"]] == ["7.1", "8.1"]
    assert {event[2] for event in every["trace"]} >= {"allocate", "lease", "request"}


def test_the_last_events_are_kept() -> None:
    gate = SmallGate()
    gate.trace = Ring(itertools.count().__next__)
    for _ in range(EVENTS + 1):
        gate.trace.record("allocate", None, "", ())
    told = tickets_and_events("", gate)["trace"]
    assert (len(told), told[-1][0]) == (EVENTS, gate.trace.events()[-1].seq)


def test_every_thread_has_a_stack() -> None:
    assert "test_every_thread_has_a_stack" in stacks()["MainThread"]
