"""A rank's end of the link against a real Unix socket: refusals, bad frames, lost links, back pressure."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsv4ctl.controlplane.link import client as client_module
from dsv4ctl.controlplane.link.client import LinkClient, LinkRefusedError
from dsv4ctl.controlplane.link.codec import Decoder, FrameError, encode
from dsv4ctl.controlplane.link.wire import WIRE_VERSION, Fenced, Received, Refused, SetGuards, Welcome
from link_plane import HELLO, LIMIT, ControlPlane


class Rank:
    """A client that notes in queues what it is called with."""

    def __init__(self, path: str, on_frame: Callable[[Any], None] | None = None) -> None:
        self.frames: queue.Queue[Any] = queue.Queue()
        self.bad: queue.Queue[FrameError] = queue.Queue()
        self.lost: queue.Queue[str] = queue.Queue()
        self.client = LinkClient(path, on_frame or self.frames.put, self.bad.put, self.lost.put)

    def threads_end(self) -> None:
        for thread in threading.enumerate():
            if thread.name.startswith("link-"):
                thread.join(LIMIT)
                assert not thread.is_alive()


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    found = ControlPlane(tmp_path / "link.sock")
    yield found
    found.close()


def connected(
    plane: ControlPlane, *early: msgspec.Struct, on_frame: Callable[[Any], None] | None = None, reads: bool = True
) -> Rank:
    rank = Rank(plane.path, on_frame)
    thread = threading.Thread(target=plane.accept, args=(Welcome(WIRE_VERSION, 0.5), *early))
    thread.start()
    assert rank.client.connect(HELLO, LIMIT).progress_interval == 0.5
    thread.join(LIMIT)
    rank.client.start(reads=reads)
    return rank


def idle(rank: Rank) -> None:
    """Waits until the writing thread waits for something to write."""
    while rank.client._writing:
        time.sleep(0.001)


def test_frames_go_both_ways_in_order(plane: ControlPlane) -> None:
    rank = connected(plane, Fenced("P-1"))
    plane.send(Fenced("P-2"), SetGuards(()))
    assert [rank.frames.get(timeout=LIMIT) for _ in range(3)] == [Fenced("P-1"), Fenced("P-2"), SetGuards(())]
    for seq in range(500):
        rank.client.send(Received(seq))
    assert [plane.read().seq for _ in range(500)] == list(range(500))
    rank.client.close()
    rank.threads_end()


def test_a_frame_that_the_socket_takes_wakes_no_thread(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = connected(plane)
    idle(rank)
    woken: list[None] = []
    monkeypatch.setattr(rank.client._changed, "notify", lambda: woken.append(None))
    for seq in range(100):
        rank.client.send(Received(seq))
    assert [plane.read().seq for _ in range(100)] == list(range(100))
    assert not woken
    monkeypatch.undo()
    rank.client.close()
    rank.threads_end()


def test_gathered_frames_go_out_together(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = connected(plane)
    idle(rank)
    writes: list[bytes] = []
    monkeypatch.setattr(rank.client, "_write_now", lambda data: writes.append(data) or len(data))
    rank.client.gather()
    for seq in range(3):
        rank.client.send(Received(seq))
    assert not writes
    rank.client.flush()
    rank.client.flush()
    assert writes == [b"".join(encode(Received(seq)) for seq in range(3))]
    rank.client.close()
    rank.threads_end()


def test_the_frame_of_another_thread_follows_what_was_gathered(plane: ControlPlane) -> None:
    rank = connected(plane)
    rank.client.gather()
    rank.client.send(Received(0))
    other = threading.Thread(target=rank.client.send, args=(Received(1),))
    other.start()
    other.join(LIMIT)
    rank.client.send(Received(2))
    rank.client.close()  # what is gathered then is written, too
    assert [plane.read().seq for _ in range(3)] == [0, 1, 2]
    rank.threads_end()


class Narrow:
    """A socket that takes `room` bytes at once; whoever waits to write more waits for `go`."""

    def __init__(self) -> None:
        self.room = 0
        self.written = b""
        self.waits = threading.Event()
        self.go = threading.Event()

    def send(self, data: bytes, flags: int) -> int:
        if not self.room:
            raise BlockingIOError
        taken = data[: self.room]
        self.written += taken
        return len(taken)

    def sendall(self, data: bytes) -> None:
        self.waits.set()
        assert self.go.wait(LIMIT)
        self.written += data

    def shutdown(self, how: int) -> None: ...


def test_a_frame_that_the_socket_took_a_part_of_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, narrow = Rank(str(tmp_path / "none")), Narrow()
    client = rank.client
    client._socket.close()
    monkeypatch.setattr(client, "_socket", narrow)
    frames = [Received(seq) for seq in range(5)]
    narrow.room = 100
    client.send(frames[0])  # the handshake is not over
    assert not narrow.written
    client._writer.start()
    narrow.go.set()
    idle(rank)
    with client._changed:  # before the writer has it
        narrow.room = 3
        client.send(frames[1])
        narrow.room = 100
        client.send(frames[2])
    while client._out:
        time.sleep(0.001)
    idle(rank)
    narrow.waits.clear()
    narrow.go.clear()
    narrow.room = 3
    client.send(frames[3])
    assert narrow.waits.wait(LIMIT)
    narrow.room = 100
    client.send(frames[4])  # while the writer has the rest of the one before
    narrow.go.set()
    client.close()
    rank.threads_end()
    assert narrow.written == b"".join(map(encode, frames))


@pytest.mark.parametrize(
    ("answer", "why"), [(Refused("incarnation D-1 is unknown"), "D-1 is unknown"), (Fenced("x"), "expected Welcome")]
)
def test_a_refused_handshake_says_why(plane: ControlPlane, answer: msgspec.Struct, why: str) -> None:
    rank = Rank(plane.path)
    thread = threading.Thread(target=plane.accept, args=(answer,))
    thread.start()
    with pytest.raises(LinkRefusedError, match=why):
        rank.client.connect(HELLO, LIMIT)
    thread.join(LIMIT)
    assert rank.client._socket.fileno() == -1


def test_nobody_there_and_nobody_answering_are_os_errors(plane: ControlPlane, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Rank(str(tmp_path / "none")).client.connect(HELLO, LIMIT)
    with pytest.raises(TimeoutError):
        Rank(plane.path).client.connect(HELLO, 0.05)


def test_a_bad_frame_is_reported_and_the_next_one_still_arrives(plane: ControlPlane) -> None:
    """sglang#30301: the thread must outlive what it does not understand. Report 20."""
    rank = connected(plane)
    unknown = msgspec.msgpack.encode({"type": "Nonsense"})
    deep = msgspec.msgpack.encode({"type": "SetGuards", "off": []})[:-1] + b"\x91" * 50_000 + b"\x90"
    for body in (unknown, b"\xc1", b"", deep):
        plane.peer.sendall(len(body).to_bytes(4, "big") + body)
    plane.send(Fenced("P-1"))
    assert rank.frames.get(timeout=LIMIT) == Fenced("P-1")
    assert rank.bad.qsize() == 4
    assert rank.lost.empty()
    rank.client.close()
    rank.threads_end()


def test_a_frame_longer_than_any_loses_the_link(plane: ControlPlane) -> None:
    rank = connected(plane)
    plane.peer.sendall((2**31).to_bytes(4, "big"))
    assert "a frame of 2147483648 bytes was announced" in rank.lost.get(timeout=LIMIT)
    rank.threads_end()
    assert rank.lost.empty()


def test_a_lost_link_is_told_once_and_sending_into_it_is_harmless(plane: ControlPlane) -> None:
    rank = connected(plane)
    plane.peer.close()
    rank.client.send(Received(1))
    assert rank.lost.get(timeout=LIMIT)
    rank.threads_end()
    rank.client.send(Received(2))
    rank.client.close()
    assert rank.lost.empty()


def test_both_threads_meeting_the_end_at_once_tell_it_once(plane: ControlPlane) -> None:
    rank = connected(plane)
    barrier = threading.Barrier(8)

    def end() -> None:
        barrier.wait(LIMIT)
        rank.client._end("met by many")

    threads = [threading.Thread(target=end) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    rank.threads_end()
    assert rank.lost.qsize() == 1


def test_closing_writes_what_was_sent_and_tells_nobody(plane: ControlPlane) -> None:
    rank = connected(plane)
    for seq in range(100):
        rank.client.send(Received(seq))
    rank.client.close()
    assert [plane.read().seq for _ in range(100)] == list(range(100))
    assert plane.read() is None
    rank.threads_end()
    assert rank.lost.empty()


def test_the_last_words_of_a_process_are_written_before_it_ends(plane: ControlPlane) -> None:
    rank = connected(plane)
    said = [Fenced("x" * 100_000) for _ in range(20)]  # more than a socket holds: somebody must read first
    for frame in said:
        rank.client.send(frame)  # type: ignore[arg-type] # any frame is bytes to it
    finished = threading.Event()

    def finish() -> None:
        rank.client.finish(LIMIT)
        finished.set()

    threading.Thread(target=finish, name="link-finish").start()
    plane.decoder = Decoder(Fenced)
    assert not finished.is_set()
    assert [plane.read() for _ in said] == said
    assert finished.wait(LIMIT)
    rank.threads_end()


def test_a_control_plane_that_stops_reading_loses_the_link_not_our_memory(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_QUEUED", 100)
    rank = connected(plane)
    while rank.lost.empty():
        rank.client.send(Received(1))
    assert rank.lost.get() == "100 frames wait for a control plane that does not read"
    rank.threads_end()
    assert rank.lost.empty()


@pytest.mark.parametrize("together", [1, 10, 1000])
def test_frames_count_one_by_one_however_they_were_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    monkeypatch.setattr(client_module, "MAX_QUEUED", 100)
    rank = Rank(str(tmp_path / "none"))
    rank.client.gather()
    sent = 0
    while rank.lost.empty():  # nobody writes them yet
        rank.client.send(Received(sent))
        sent += 1
        if sent % together == 0:
            rank.client.flush()
    assert sent == 101
    rank.client._socket.close()


def test_frames_that_no_thread_waits_for_are_taken_in(plane: ControlPlane) -> None:
    rank = Rank(plane.path)
    thread = threading.Thread(target=plane.accept, args=(Welcome(WIRE_VERSION, 0.5), Fenced("P-1")))
    thread.start()
    rank.client.take_in()  # not yet: the handshake reads
    rank.client.connect(HELLO, LIMIT)
    thread.join(LIMIT)
    rank.client.take_in()
    assert rank.frames.empty()
    rank.client.start(reads=False)
    assert not [each for each in threading.enumerate() if each.name == "link-read"]
    more = [Fenced(f"P-{number}") for number in range(2, 4000)]  # longer than what one look reads
    plane.send(*more)
    rank.client.take_in()
    assert [rank.frames.get_nowait() for _ in range(len(more) + 1)] == [Fenced("P-1"), *more]
    rank.client.take_in()
    assert rank.frames.empty()
    rank.client.send(Received(1))
    assert plane.read() == Received(1)
    plane.peer.close()
    for _ in range(2):
        rank.client.take_in()
    assert rank.lost.get_nowait() == "the control plane closed the link"
    assert rank.lost.empty()
    rank.threads_end()


def test_who_takes_in_a_frame_that_its_handler_fails_on_is_told_and_the_link_ends(plane: ControlPlane) -> None:
    def fail(frame: Any) -> None:
        raise KeyError(frame.incarnation)

    rank = connected(plane, on_frame=fail, reads=False)
    plane.send(Fenced("P-1"))
    with pytest.raises(KeyError):
        rank.client.take_in()
    assert rank.lost.get_nowait() == "a frame could not be handled: KeyError('P-1')"
    rank.threads_end()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_frame_that_its_handler_fails_on_ends_the_link_in_words(plane: ControlPlane) -> None:
    """S8: the reading thread does not disappear in silence."""

    def fail(frame: Any) -> None:
        raise KeyError(frame.incarnation)

    rank = connected(plane, on_frame=fail)
    plane.send(Fenced("P-1"))
    assert rank.lost.get(timeout=LIMIT) == "a frame could not be handled: KeyError('P-1')"
    rank.threads_end()
