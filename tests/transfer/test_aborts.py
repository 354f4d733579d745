"""Aborts and deaths in the middle of a transfer: nobody reuses a page before its writer is quiet or gone."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import transfer_rank
from dsv4ctl.controlplane.link.codec import encode
from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey, RoomState
from dsv4ctl.controlplane.tickets.types import LoadKind
from dsv4ctl.engine_adapters.reference.nixl import Nixl, Status, Write
from dsv4ctl.engine_adapters.reference.peer_wire import PeerRefused
from transfer_rank import KEY, LIMIT, PAGES, Rank, same_bytes


class Slow(Nixl):
    """Real writes, whose end is told only once `let_go` is set."""

    def __init__(self, let_go: threading.Event, *rest: Any) -> None:
        super().__init__(*rest)
        self._let_go = let_go

    def poll(self, write: Write) -> Status:
        # NIXL is asked all the same: it sends a write's notification when its end is seen.
        status = super().poll(write)
        return status if self._let_go.is_set() else "busy"


class Failing(Nixl):
    """Writes of which nobody can say how they ended."""

    def poll(self, write: Write) -> Status:
        return "error"


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def slow(let_go: threading.Event) -> Iterator[Rank]:
    """A prefill rank whose writes stay in flight until `let_go`."""
    with Rank(Role.PREFILL, "P", make_transport=lambda *rest: Slow(let_go, *rest)) as rank:
        yield rank
        let_go.set()


@pytest.fixture
def decode() -> Iterator[Rank]:
    with Rank(Role.DECODE, "D") as rank:
        yield rank


def _in_the_middle(prefill: Rank, decode: Rank, key: RoomKey = KEY) -> None:
    """One write of the room is in flight."""
    prefill.open("D", key)
    decode.expect(decode.open("P", key), 600, prefill.transfer.bootstrap_port)
    chunk = prefill.chunks(prefill.computed(600, key=key), 600)[0]
    prefill.transfer.sender.chunk(key, chunk)
    prefill.wait(RoomState.SENDING, key)


@pytest.mark.parametrize("by_decode", [True, False])
def test_pages_wait_for_the_writes_in_flight(
    slow: Rank, decode: Rank, let_go: threading.Event, by_decode: bool
) -> None:
    """Report 1, over real NIXL."""
    _in_the_middle(slow, decode)
    (decode if by_decode else slow).agent.abort(KEY, AbortSource.CLIENT, "client left")
    slow.wait(RoomState.QUIESCING)
    decode.wait(RoomState.QUIESCING)
    for rank in (slow, decode):
        assert rank.gate.room_in("full") == (PAGES["full"] - 3, 0)
        assert rank.reported(RoomState.ABORTED) is None
    let_go.set()
    for rank in (slow, decode):
        rank.wait(RoomState.ABORTED)
        assert rank.acked() is Quiet.QUIET
        rank.until(lambda rank=rank: rank.gate.room_in("full") == (PAGES["full"], 0))


def test_eighty_rooms_aborted_at_once_end_on_both_sides(slow: Rank, decode: Rank, let_go: threading.Event) -> None:
    """Five fit at a time; the rest of the eighty abort before they have pages."""
    keys = [RoomKey(number, 1) for number in range(80)]
    for key in keys[:5]:
        _in_the_middle(slow, decode, key)
    for key in keys[5:]:
        slow.open("D", key)
        decode.open("P", key)
    for key in keys:
        decode.agent.abort(key, AbortSource.ADMIN, "all")
        slow.agent.abort(key, AbortSource.ADMIN, "all")
    let_go.set()
    for key in keys:
        decode.wait(RoomState.ABORTED, key)
        slow.wait(RoomState.ABORTED, key)
    for rank in (slow, decode):
        rank.until(lambda rank=rank: rank.gate.room_in("full") == (PAGES["full"], 0))


def test_an_ack_of_an_older_generation_frees_nothing(slow: Rank, decode: Rank, let_go: threading.Event) -> None:
    """Report 4, over real NIXL."""
    newer = KEY._replace(generation=2)
    _in_the_middle(slow, decode, newer)
    decode.agent.abort(newer, AbortSource.CLIENT, "client left")
    decode.wait(RoomState.QUIESCING, newer)
    slow.transfer.ack_peer(KEY, "D", Quiet.QUIET)
    decode.until(lambda: decode.agent.counters["late_acks"] == 1)
    assert decode.reported(RoomState.ABORTED, newer) is None
    assert decode.gate.room_in("full") == (PAGES["full"] - 3, 0)
    let_go.set()
    decode.wait(RoomState.ABORTED, newer)


def test_a_notification_of_an_ended_room_is_counted(slow: Rank, decode: Rank, let_go: threading.Event) -> None:
    _in_the_middle(slow, decode)
    decode.transfer.dropped(KEY)
    slow.transfer.sender.chunk(KEY, slow.chunks(slow.owned[KEY][0], 600)[1])
    decode.until(lambda: decode.transfer.counters().get("late_notifications", 0) > 0)


def test_a_write_without_a_known_end_poisons_its_room() -> None:
    """Report 2."""
    with (
        Rank(Role.PREFILL, "P", ack_seconds=0.1, make_transport=Failing) as prefill,
        Rank(Role.DECODE, "D") as decode,
    ):
        _in_the_middle(prefill, decode)
        prefill.wait(RoomState.ABORTED)
        assert prefill.acked() is Quiet.POISONED
        decode.wait(RoomState.QUIESCING)
        assert decode.reported(RoomState.ABORTED) is None
        decode.fence("P")
        decode.wait(RoomState.ABORTED)


def test_an_abort_waits_for_a_peer_that_is_not_there_yet(decode: Rank) -> None:
    """Its pages are exposed, so only the writer's word frees them: the rank keeps calling until it has it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: whoever connects is refused
        port = taken.getsockname()[1]
        opening = decode.open("P")
        decode.agent.apply(KEY, Reader.expose)
        decode.expect(opening, 600, port)
        decode.agent.abort(KEY, AbortSource.CLIENT, "client left")
        decode.wait(RoomState.QUIESCING)
    with Rank(Role.PREFILL, "P", port=port):
        decode.wait(RoomState.ABORTED)


def test_an_unwanted_peer_is_not_called_for_ever(decode: Rank) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        decode.expect(decode.open("P"), 600, taken.getsockname()[1])
        decode.fence("P")
        decode.wait(RoomState.ABORTED)
        decode.until(lambda: not decode.transfer._dialled)


def test_a_request_without_a_peers_address_ends_its_room(decode: Rank) -> None:
    decode.expect(decode.open("P"), 600, 0)
    assert "port 0: a host and a port of 1 to 65535 expected" in decode.wait(RoomState.ABORTED).detail["reason"]


def test_rooms_of_an_older_incarnation_are_not_continued(decode: Rank) -> None:
    with Rank(Role.PREFILL, "P2") as prefill:
        decode.expect(decode.open("P1"), 600, prefill.transfer.bootstrap_port)
        assert "is P2, the room was opened with P1" in decode.wait(RoomState.ABORTED).detail["reason"]


def test_a_lost_connection_takes_no_room_with_it(slow: Rank, decode: Rank, let_go: threading.Event) -> None:
    _in_the_middle(slow, decode)
    slow.transfer._inbox.put(slow.transfer._channels["D"].close)
    table = slow.owned[KEY][0]
    for chunk in slow.chunks(table, 600)[1:]:
        slow.transfer.sender.chunk(KEY, chunk)
    slow.transfer.sender.finish(KEY, transfer_rank.Manifest(600, 42, 3))
    let_go.set()
    decode.wait(RoomState.VERIFIED)
    slow.until(lambda: ("peer.lost", {"peer": "d", "peer_incarnation": "D"}) in slow.logged)


def test_malformed_frames_are_counted_and_the_next_room_works(
    slow: Rank, decode: Rank, let_go: threading.Event
) -> None:
    """Report 20: between ranks."""
    let_go.set()
    with socket.create_connection(("127.0.0.1", slow.transfer.bootstrap_port), LIMIT) as line:
        line.sendall(encode(decode.transfer.hello()))
        assert line.recv(1)
        for body in (b"\xc1", b"\x81\xa4type\xa7Unheard", b""):
            line.sendall(len(body).to_bytes(4, "big") + body)
        slow.until(lambda: slow.transfer.counters().get("bad_frames") == 3)
        line.sendall(b"\xff\xff\xff\xff")
        slow.until(lambda: slow.transfer.counters().get("bad_frames") == 4)
    slow.open("D")
    source = slow.computed(600)
    landed = decode.expect(decode.open("P"), 600, slow.transfer.bootstrap_port)
    slow.send(source, 600)
    decode.wait(RoomState.VERIFIED)
    assert same_bytes(slow, source, decode, landed)


def test_a_stranger_is_refused(slow: Rank) -> None:
    with socket.create_connection(("127.0.0.1", slow.transfer.bootstrap_port), LIMIT) as line:
        line.sendall(encode(PeerRefused("who are you")))
        line.settimeout(LIMIT)
        assert b"who are you" in line.recv(4096)
    slow.until(lambda: slow.transfer.counters().get("refused_peers") == 1)


def test_a_killed_peer_ends_its_room_and_no_other(slow: Rank, decode: Rank, let_go: threading.Event) -> None:
    """The peer is stopped with a write in flight, then killed: nothing is written into a dead process."""
    let_go.set()
    script = Path(transfer_rank.__file__)
    port = str(slow.transfer.bootstrap_port)
    slow.open("D")
    command = [sys.executable, str(script), port]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        assert peer.stdout.readline() == "up\n"
        table, load = slow.take(600, LoadKind.FORWARD)
        slow.fill(table, 0)
        slow.land(load)
        chunks = slow.chunks(table, 600)
        slow.transfer.sender.chunk(KEY, chunks[0])
        slow.wait(RoomState.SENDING)
        slow.until(lambda: slow.gate.totals()["tickets"] == 0)
        peer.send_signal(signal.SIGSTOP)
        slow.transfer.sender.chunk(KEY, chunks[1])
        slow.until(lambda: slow.gate.totals()["tickets"] == 1)
        peer.kill()
        peer.wait()
    slow.until(lambda: slow.transfer.counters().get("failed_writes") == 1)
    slow.fence("D")
    slow.wait(RoomState.ABORTED)
    assert slow.acked() is Quiet.QUIET
    slow.until(lambda: slow.gate.room_in("full") == (PAGES["full"], 0))
    with Rank(Role.DECODE, "D2") as other:
        key = RoomKey(8, 1)
        slow.open("D2", key)
        other.expect(other.open("P", key), 600, slow.transfer.bootstrap_port)
        slow.send(slow.computed(600, key=key), 600, key)
        other.wait(RoomState.VERIFIED, key)
