"""Openings on a link that no thread waits for: they are taken in before whatever was sent later."""

from __future__ import annotations

import queue
import select
import socket
import threading
from types import SimpleNamespace
from typing import Any

import msgspec

from dsv4ctl.controlplane.link.codec import encode
from dsv4ctl.controlplane.link.wire import LoopStatus, OpenRoom, Query, Role
from dsv4ctl.controlplane.rooms.states import RoomKey, RoomState
from dsv4ctl.engine_adapters.sglang.hooks import agreement
from sglang_contract.bootstrap_port import bootstrapped, destination
from sglang_contract.checks import alone
from sglang_contract.situations import world
from sglang_world import PEER, World

KEY = RoomKey(7, 1)
OPENING = OpenRoom(KEY, "request", None, "other", (PEER,), {"ack": 10.0}, "off", fresh=True)


def _linked(role: Role) -> tuple[World, socket.socket]:
    """A rank, and the control plane's end of its link."""
    made = world(role, True)
    ours, theirs = socket.socketpair()
    link = made.rank._link
    link._socket.close()
    link._socket, link._taken_in, link._writing = ours, True, False
    made.rank._sockets.register(link, select.EPOLLIN)
    return made, theirs


def _requested(first: bool) -> Any:
    """A request of the room, as the first rank of the engine or as another receives it."""
    request = SimpleNamespace(bootstrap_room=7, rid="rid", extra_key=None)
    assert agreement.requests(lambda *_: [request], None, [request] if first else None) == [request]
    return request


@alone
def request_is_handled_behind_its_opening_on_any_rank(_: bool) -> None:
    for role in (Role.PREFILL, Role.DECODE, Role.SINGLE):
        for first in (True, False):
            made, theirs = _linked(role)
            theirs.sendall(encode(OPENING))
            request = _requested(first)
            assert made.rank.rooms.live(7), (role, first)
            assert made.states(KEY)[0] is RoomState.ALLOCATED
            assert request.extra_key == (f"dsv4ctl-{KEY}" if first else None)


@alone
def turn_without_a_request_looks_at_the_link_too(_: bool) -> None:
    made, theirs = _linked(Role.PREFILL)
    theirs.sendall(encode(OPENING))
    agreement.requests(lambda *_: [], None, [])
    assert made.rank.rooms.live(7)


@alone
def request_waits_while_a_thread_takes_in_its_opening(_: bool) -> None:
    made, theirs = _linked(Role.DECODE)
    theirs.sendall(encode(OPENING))
    take_in = made.rank._link.take_in

    class Held:
        """By a thread that is done as soon as somebody waits for it."""

        def acquire(self, *, blocking: bool) -> bool:
            assert not blocking
            return False

        def __enter__(self) -> None:
            take_in()

        def __exit__(self, *_: object) -> None: ...

    made.rank._attending = Held()
    _requested(True)
    assert made.rank.rooms.live(7)


@alone
def destination_is_heard_behind_the_opening_of_its_room(_: bool) -> None:
    made, theirs = _linked(Role.PREFILL)
    theirs.sendall(encode(OPENING))
    manager = bootstrapped(made, True, [destination(7)])
    assert 7 in manager.transfer_infos
    assert made.states(KEY) == [RoomState.ALLOCATED, RoomState.BOOTSTRAPPING]


@alone
def rank_knows_of_the_other_engines_ranks_those_it_exchanges_pages_with(_: bool) -> None:
    for number, ranks, peers in ((0, 1, (PEER,)), (1, 2, ("b",)), (0, 1, ("a", "b"))):
        made = world(Role.DECODE, True)
        made.rank.number, made.rank.ranks = number, ranks
        every = peers if ranks == 1 else ("a", "b")
        made.rank._on_frame(msgspec.structs.replace(OPENING, peers=every))
        room = made.rank.rooms.find(7)
        assert room is not None
        assert room.opening.peers == peers


@alone
def query_is_answered_outside_of_the_loop(_: bool) -> None:
    made, theirs = _linked(Role.DECODE)
    answered: queue.Queue[tuple[Any, str]] = queue.Queue()
    made.rank.agent.handle = lambda frame: answered.put((frame, threading.current_thread().name))
    theirs.sendall(encode(Query(5, "rooms")))
    made.rank.attend()
    assert answered.get(timeout=60) == (Query(5, "rooms"), "dsv4ctl-queries")


@alone
def what_came_with_the_handshake_is_taken_in_though_nothing_else_comes(_: bool) -> None:
    made, _theirs = _linked(Role.DECODE)
    made.rank._link._early = [OPENING]
    made.rank.attend()
    assert not made.rank.rooms.live(7)
    made.rank._due, made.rank._loops["agent"] = 0.0, LoopStatus(0)
    made.rank.report = lambda: None
    made.rank.attend()
    assert made.rank.rooms.live(7)


@alone
def only_what_has_something_is_read(_: bool) -> None:
    made, theirs = _linked(Role.DECODE)
    ours, other = socket.socketpair()
    read: list[str] = []

    def look(name: str, end: socket.socket) -> bool:
        try:
            read.append(f"{name} {len(end.recv(100, socket.MSG_DONTWAIT))}")
        except BlockingIOError:
            read.append(f"{name} nothing")
        return False

    made.rank._link.take_in = lambda: look("link", made.rank._link._socket)
    made.rank.hears(ours.fileno(), lambda: look("others", ours))
    for written in ([theirs], [other], [theirs, other], []):
        for number, end in enumerate(written, 1):
            end.send(b"x" * number)
        made.rank.attend()
    made.rank._due, made.rank.report, made.rank._loops["agent"] = 0.0, lambda: None, LoopStatus(0)
    other.send(b"x")
    made.rank.attend()
    made.rank._due = 0.0
    made.rank.attend()
    due = ["link nothing", "others 1", "link nothing", "others nothing"]
    assert read == ["link 1", "others 1", "link 1", "others 2", *due]
