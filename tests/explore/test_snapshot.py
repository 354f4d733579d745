"""Images and copies of the machines: what must be told apart is, what need not be is not."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from dsv4ctl.controlplane.aborts.inbox import AbortInbox
from dsv4ctl.controlplane.aborts.log import AbortEntry, AbortLog
from dsv4ctl.controlplane.explore import nodes, snapshot
from dsv4ctl.controlplane.explore.cache import Cache
from dsv4ctl.controlplane.explore.nodes import Event, Node, Nodes, Output
from dsv4ctl.controlplane.explore.search import search
from dsv4ctl.controlplane.explore.snapshot import UNREAD, copy_of, image
from dsv4ctl.controlplane.explore.worlds import PLANS, world
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.rooms.room import ParticipantInfo, Room
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey
from dsv4ctl.controlplane.rooms.table import RoomTable
from dsv4ctl.controlplane.rooms.writer import Writer
from dsv4ctl.controlplane.tickets.ledger import Ledger
from dsv4ctl.controlplane.tickets.types import Consumer, LoadKind, SpaceSpec

KEY = RoomKey(1, 1)


def ledger() -> Ledger:
    return Ledger({"full": SpaceSpec(2, ("c4_kv",))}, 2)


def loaded(made: Ledger) -> tuple[Ledger, object]:
    pages = made.allocate({"full": 1})
    assert pages is not None
    load = made.open_load(LoadKind.HICACHE, [made.extent("full", pages["full"])])
    made.layer_landed(load, 1)
    return made, made.request(Consumer.ATTENTION, list(load.extents), room=KEY)


def test_two_ledgers_with_the_same_past_look_alike() -> None:
    one, other = loaded(ledger())[0], loaded(ledger())[0]
    assert image(one, ledger=one) == image(other, ledger=other)


def test_every_ticket_of_a_room_is_seen() -> None:
    def made(posted: bool) -> Ledger:
        found = ledger()
        pages = found.allocate({"full": 1})
        assert pages is not None
        load = found.open_load(LoadKind.HICACHE, [found.extent("full", pages["full"])])
        found.layer_landed(load, 2)
        found.end_load(load)
        extents = [found.extent("full", pages["full"])]
        older = found.request(Consumer.SENDER, extents, room=KEY)
        found.request(Consumer.ATTENTION, extents, room=KEY)
        if posted:
            found.post(older)
        return found

    one, other = made(True), made(False)
    assert image(one, ledger=one) != image(other, ledger=other)


def test_a_copy_lives_on_its_own_and_looks_alike() -> None:
    made, ticket = loaded(ledger())
    copied, copied_ticket = copy_of((made, ticket))
    assert image(copied, ledger=copied) == image(made, ledger=made)
    copied.release(copied_ticket)
    assert image(copied, ledger=copied) != image(made, ledger=made)
    assert made.tickets == 1


def test_an_extent_is_told_by_whether_its_generation_is_the_present_one() -> None:
    made = ledger()
    (page,) = made.allocate({"full": 1})["full"]  # type: ignore[index]
    stale = made.extent("full", [page])
    before = image([stale, made], ledger=made)
    made.open_load(LoadKind.FORWARD, [stale])
    assert image(stale, ledger=made) != before[0]


@pytest.mark.parametrize(
    ("machine", "event"),
    [
        (Writer(KEY, ("D0",)), lambda half: half.destination("D0")),
        (Writer(KEY, ("D0",)), lambda half: half.post()),
        (Reader(KEY, ("P0",)), lambda half: half.expose()),
        (Reader(KEY, ("P0", "P1")), lambda half: half.ack("P0", Quiet.POISONED)),
        (RoomTable(), lambda table: table.bury(KEY, 1.0)),
        (RoomTable(), lambda table: table.open(KEY, Writer(KEY, ()))),
        (AbortLog(), lambda log: log.append(KEY, AbortSource.CLIENT, "")),
        (AbortInbox(), lambda inbox: inbox.offer(AbortEntry(2, KEY, AbortSource.CLIENT, ""))),
        (
            Room(KEY, "r", None, {"P0": ParticipantInfo("P", 0, "prefill")}, {"ack": 0, "allocated": 0}, 0.0),
            lambda room: room.abort(AbortSource.CLIENT, "", 0.0),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_event_that_changes_a_machine_changes_its_image_and_no_copy(machine: object, event: object) -> None:
    copied = copy_of(machine)
    event(copied)  # type: ignore[operator]
    assert image(copied) != image(machine)
    assert image(copy_of(copied)) == image(copied)


def test_what_is_only_reported_makes_no_difference() -> None:
    one, other = Writer(KEY, ("D0",)), Writer(KEY, ("D0",))
    one.abort(AbortSource.CLIENT, "client left")
    other.abort(AbortSource.DRAIN, "drain deadline")
    assert image(one) == image(other)


@pytest.mark.parametrize(
    "name",
    ["early time-outs", "crash and restart", "a room again", "cache: sender", "cache: bad copies", "link faults"],
)
def test_nodes_with_equal_images_go_on_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event runs in the node that came last to look like this too, not only in the one that came first."""
    latest: dict[int, Node] = {}
    compared = 0
    step = Nodes.step

    def both(self: Nodes, number: int, event: Event) -> tuple[int, tuple[Output, ...]]:
        nonlocal compared
        after, sent = step(self, number, event)
        other = copy_of(latest.get(number, self.node(number)))
        getattr(other, f"on_{event[0]}")(*event[1:])
        assert tuple(other.out) == sent
        other.out.clear()
        other.settle()
        assert image(other, Nodes.SKIP, other.ledger) == image(self.node(after), Nodes.SKIP, self.node(after).ledger)
        latest[after] = other
        compared += 1
        return after, sent

    monkeypatch.setattr(Nodes, "step", both)
    assert search(world(PLANS[name]), limit=600).violation is None
    assert compared > 600


@pytest.mark.parametrize("name", ["crash", "cache: three pages"])
def test_packed_nodes_go_on_like_the_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = search(world(PLANS[name]), limit=1_000)
    monkeypatch.setattr(nodes, "LATEST", 3)
    packed = search(world(PLANS[name]), limit=1_000)
    assert packed.violation is None
    assert (packed.states, packed.transitions, packed.ended) == (kept.states, kept.transitions, kept.ended)


def _walked(plan: str, seen_as: set[str]) -> tuple[Any, list[tuple[Any, Event, Any]]]:
    """Every step of a world while the fields `seen_as` tell nodes apart too, and generations by their values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "UNREAD", UNREAD - seen_as)
        if "generation" in seen_as:
            patch.setattr(
                snapshot._Image,
                "_extent",
                lambda self, extent: (extent.space, extent.pages, extent.generations, *sorted(extent.pools)),
            )
        explored, steps = world(PLANS[plan]), []
        seen = {explored.initial()}
        todo = list(seen)
        for state in todo:
            for step in explored.steps(state):
                assert step.violation is None
                steps.append((state, step.action, step.state))
                if step.state not in seen:
                    seen.add(step.state)
                    todo.append(step.state)
    return explored, steps


def _images(explored: Any, steps: list[tuple[Any, Event, Any]]) -> set[tuple[Any, Event, Any]]:
    """The steps between the states as the explorer tells them apart."""

    @cache
    def of(number: int) -> Any:
        node = explored.nodes.node(number)
        return None if number < 0 else image(node, Nodes.SKIP, node.ledger)

    @cache
    def seen(state: Any) -> Any:
        if isinstance(explored, Cache):
            return of(state)
        nodes, *rest = explored._open(state)
        return (tuple(of(node) for node in nodes), *rest)

    return {(seen(at), action, seen(to)) for at, action, to in steps}


@pytest.mark.parametrize("plan", ["crash", "broken connections", "cache: attention", "cache: stranger"])
def test_what_is_left_out_decides_nothing(plan: str) -> None:
    """With every field in view there are more nodes, and between the same states there are the same steps."""
    plain, steps = _walked(plan, set())
    full, more = _walked(plan, {"generation", "reason", "source", "refused", "stale"})
    assert len(full.nodes) > len(plain.nodes)
    assert _images(full, more) == _images(plain, steps)
