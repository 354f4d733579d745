"""The trace format on disk: streamed, cut off anywhere, bounded; versions it does not know are refused."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path

import msgspec
import pytest

from dsv4ctl.controlplane.tickets.types import Consumer, Guard
from dsv4ctl.controlplane.trace import format as trace_format
from dsv4ctl.controlplane.trace.check import check
from dsv4ctl.controlplane.trace.file import TraceError, TraceFile, Writer, older
from dsv4ctl.controlplane.trace.format import (
    FRAME_EVENTS,
    HISTORY,
    VERSION,
    Event,
    Events,
    Extent,
    Header,
    Rank,
    encode,
    events_frame,
    page,
)
from dsv4ctl.controlplane.trace.ring import Ring
from small_gate import LAYERS, SmallGate
from trace_story import D, P, Story, rank


def told(gate: SmallGate, path: Path, limit: int = 1 << 20) -> TraceFile:
    """What the gate's ring holds, read page by page into a file and back."""
    with Writer(path, limit) as writer:
        begin, more = 0, True
        while more:
            part = page(gate.trace, rank("me", LAYERS), begin)
            writer.write("me", part.rank, part.events)
            begin, more = part.next, part.more
    return TraceFile(path)


def busy(gate: SmallGate, rounds: int) -> None:
    for _ in range(rounds):
        load = gate.load(LAYERS)
        ticket = gate.request(Consumer.INDEXER, load.extents, room=7)
        gate.read(ticket, "index_k", 1)
        gate.end_load(load)
        gate.release(ticket)
        gate.free("full", load.extents[0].pages)


def test_what_a_gate_did_comes_back_event_by_event(tmp_path: Path) -> None:
    gate = SmallGate()
    busy(gate, 1)
    events = list(told(gate, tmp_path / "t").stream("me"))
    assert [event.kind for event, _ in events] == gate.traced()
    assert [event.seq for event, _ in events] == list(range(len(events)))
    lease, read = events[1], events[4]
    assert lease[1] == (Extent("full", (0,), (2,), ("c4_kv", "index_k")),)
    assert (read[0].who, read[0].room, read[0].pool, read[0].layer, read[0].value) == ("indexer", "7", "index_k", 1, 3)
    assert read[0].agent == "MainThread"
    assert read[1] == lease[1]
    assert read[0].subject == events[3][0].subject != lease[0].subject


def test_a_ring_is_read_in_pages_and_its_lost_begin_is_told(tmp_path: Path) -> None:
    gate = SmallGate()
    gate.trace = Ring(itertools.count().__next__, capacity=FRAME_EVENTS + 100)
    busy(gate, 600)
    first = page(gate.trace, rank("me", LAYERS), 0)
    assert first.more
    frame = msgspec.msgpack.decode(first.events[4:], type=Events)
    assert (len(frame.events), frame.lost) == (FRAME_EVENTS, frame.events[0].seq)
    assert frame.lost > 0
    file = told(gate, tmp_path / "t")
    assert len(list(file.merged())) == FRAME_EVENTS + 100
    report = check(file.ranks, file.merged())
    assert (report.races, report.resets) == ([], 0)


def test_a_page_bounds_its_page_numbers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_format, "FRAME_PAGES", 30)
    ring = Ring(itertools.count().__next__)
    for _ in range(5):
        ring.record("allocate", None, "", (("full", tuple(range(20))),))
    part = page(ring, rank("me"), 0)
    assert (part.next, part.more) == (1, True)


def test_shared_extents_stand_in_a_frame_once() -> None:
    gate = SmallGate()
    busy(gate, 1)
    frame = events_frame("me", gate.trace.events(), 0)
    kinds = {event.kind: event.extents for event in frame.events}
    assert kinds["request"] == kinds["read"] == kinds["release"]


def test_events_name_their_ticket_after_its_end() -> None:
    """Two tickets of one ring have two names, even if the first has gone before the second came."""
    gate = SmallGate()
    busy(gate, 2)
    names = {event.subject: event.seq for event in gate.trace.events() if event.kind == "release"}
    assert len(names) == 2


def test_a_ring_that_nobody_has_is_collected_with_what_its_events_keep() -> None:
    """The events lead to their class, and it to them and to the clock, which may lead to the ring."""

    class Clock:
        ring: Ring

        def now(self) -> int:
            return 0

    clock = Clock()
    clock.ring = Ring(clock.now)
    clock.ring.record("room", clock, "")
    gone = weakref.ref(clock)
    del clock
    gc.collect()
    assert gone() is None


def test_a_number_still_on_its_way_is_waited_for() -> None:
    """Two threads may append in another order than they were numbered."""
    ring = Ring(itertools.count().__next__)
    for _ in range(3):
        ring.record("room", None, "")
    late = ring._events[1]
    del ring._events[1]
    assert [event.seq for event in ring.events()] == [0]
    ring._events.append(late)
    assert [event.seq for event in ring.events(1)] == [1, 2]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    story = Story(D, P)
    story.exposed(1, 4, generation=2)
    story.write(9, 4)
    story.complete(9)
    story.acked()
    return story.save(tmp_path / "whole")


def test_a_file_may_end_anywhere(whole: Path, tmp_path: Path) -> None:
    body = whole.read_bytes()
    complete = TraceFile(whole)
    assert complete.cut is None
    counts = []
    for size in range(len(encode(Header())), len(body)):
        (tmp_path / "cut").write_bytes(body[:size])
        file = TraceFile(tmp_path / "cut")
        counts.append(len(list(file.merged())))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 5)
    assert file.cut == f"cut off in the middle of a frame at byte {len(body) - len(encode_last(body))}"


def encode_last(body: bytes) -> bytes:
    at = last = 0
    while at < len(body):
        last, at = at, at + 4 + int.from_bytes(body[at : at + 4], "big")
    return body[last:]


BAD = [
    (b"", "it has no header frame"),
    (b"\0\0\0\x02\xc1\xc1", "its first frame is not msgpack"),
    (b"\xff\xff\xff\xff....", "a frame of 4294967295 bytes at byte 0, the most is 16777216"),
    (encode(rank("me")), "does not say `format: dsv4ctl trace`"),
    (encode(Header(version=VERSION + 1)), f"has trace version {VERSION + 1}, this dsv4ctl reads version {VERSION}"),
    (encode(Header()) + b"\0\0\0\x01\xc0", "the frame at byte"),
    (encode(Header()) + encode(Events("nobody", 0, [], [])), "events of nobody, whose `rank` frame is missing"),
]


@pytest.mark.parametrize(("body", "message"), BAD)
def test_what_is_no_trace_is_refused(tmp_path: Path, body: bytes, message: str) -> None:
    (tmp_path / "bad").write_bytes(body)
    with pytest.raises(TraceError, match=message):
        TraceFile(tmp_path / "bad")


def test_every_version_has_its_reason() -> None:
    assert sorted(HISTORY) == list(range(1, VERSION + 1))


def test_disk_is_bounded_and_each_file_stands_alone(tmp_path: Path) -> None:
    path, limit = tmp_path / "t", 2000
    identity, events = encode(rank("me")), encode(Events("me", 0, [], [Event(0, 0, "room", "step", "7.1", "")]))
    with Writer(path, limit) as writer:
        for _ in range(200):
            writer.write("me", identity, events)
            files = [file for file in (path, older(path)) if file.exists()]
            assert sum(file.stat().st_size for file in files) <= 2 * limit
    assert writer.rotated > 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["t", "t.1"]
    for file in (path, older(path)):
        assert list(TraceFile(file).ranks) == ["me"]
        assert len(list(TraceFile(file).merged())) > 1


def test_a_guard_off_shows_in_the_file(tmp_path: Path) -> None:
    gate = SmallGate()
    gate.set_guards_off([Guard.INDEXER])
    load = gate.load(1)
    gate.read(gate.request(Consumer.INDEXER, load.extents, room=7), "index_k", 2)
    file = told(gate, tmp_path / "t")
    (race,) = check(file.ranks, file.merged()).races
    assert (race.consumer, race.layers) == ("indexer", [2])


def test_a_rank_says_where_its_consumers_read() -> None:
    assert Rank("e", 0, "single", "i", 1, 3, 0, 0).name == "e/0"
