"""One writer a rank, its readers, and channels that reorder and repeat: S3 at each step, S5 at the end.

Random histories: the shells' obligations (frames repeated until acked, fences that come in the end) are kept by
the harness, everything else is up to chance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4ctl.controlplane.rooms.effects import AckPeer, Effect, Enter, Quarantine, Refusal, ReleasePages, TellPeer
from dsv4ctl.controlplane.rooms.half import Half
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.rooms.states import TERMINAL, AbortSource, RoomKey, RoomState
from dsv4ctl.controlplane.rooms.writer import Writer

KEY = RoomKey(7, 1)
WRITES = 2  #: by writer and reader


@dataclass
class World:
    """`prefill` writers times `decode` readers, all of one room."""

    writers: dict[str, Writer]
    readers: dict[str, Reader]
    frames: list[tuple[Any, ...]] = field(default_factory=list)
    in_flight: dict[tuple[str, str], int] = field(default_factory=dict)
    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    unknown: set[tuple[str, str]] = field(default_factory=set)  #: a write ended without a known state
    dead: set[str] = field(default_factory=set)
    releases: dict[str, int] = field(default_factory=dict)
    quarantined: set[str] = field(default_factory=set)
    acked: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, writers: int, readers: int) -> World:
        sources = tuple(f"P{n}" for n in range(writers))
        targets = tuple(f"D{n}" for n in range(readers))
        return cls({p: Writer(KEY, targets) for p in sources}, {d: Reader(KEY, sources) for d in targets})

    def half(self, name: str) -> Half:
        return self.writers[name] if name in self.writers else self.readers[name]

    # ---- effects -------------------------------------------------------------------------------------

    def do(self, name: str, event: Any, *args: Any) -> None:
        """The event at `name`, unless its process is dead; what is refused changes nothing."""
        if name in self.dead:
            return
        was = self.half(name).state
        try:
            effects: list[Effect] = event(self.half(name), *args)
        except Refusal:
            return
        for effect in effects:
            self.carry_out(name, effect)
        assert was not in TERMINAL or self.half(name).state is was

    def carry_out(self, name: str, effect: Effect) -> None:
        match effect:
            case ReleasePages():
                self.releases[name] = self.releases.get(name, 0) + 1
                assert self.releases[name] == 1
                assert not self.half(name).forwards
                if name in self.readers:
                    self.check_no_late_write(name)
            case TellPeer(peer, source, reason):
                self.frames.append(("abort", name, peer, source, reason))
            case AckPeer(peer, outcome):
                self.acked.setdefault(name, set()).add(peer)
                self.frames.append(("ack", name, peer, outcome))
            case Quarantine():
                self.quarantined.add(name)
            case Enter():
                pass

    def check_no_late_write(self, reader: str) -> None:
        """S3: nobody alive writes into these pages, or may begin to."""
        if self.readers[reader].state is RoomState.ALLOCATED:
            return
        for name, writer in self.writers.items():
            if name in self.dead:
                continue
            assert self.in_flight.get((name, reader), 0) == 0
            assert (name, reader) not in self.unknown
            if self.told(name, reader) and self.sent.get((name, reader), 0) < WRITES:
                assert not writer.live

    def told(self, writer: str, reader: str) -> bool:
        """The writer knows the reader's pages, or a frame is on its way that says them."""
        return reader in self.writers[writer].destinations or ("destination", reader, writer) in self.frames

    # ---- moves of the environment --------------------------------------------------------------------

    def expose(self, reader: str) -> None:
        if self.readers[reader].state is RoomState.ALLOCATED and reader not in self.dead:
            self.do(reader, Reader.expose)
            self.frames += [("destination", reader, writer) for writer in self.writers]

    def write(self, writer: str, reader: str) -> None:
        pair, half = (writer, reader), self.writers[writer]
        if writer in self.dead or reader not in half.destinations or self.sent.get(pair, 0) == WRITES:
            return
        before = half.in_flight
        self.do(writer, Writer.post)
        if half.in_flight > before:
            self.in_flight[pair] = self.in_flight.get(pair, 0) + 1
            self.sent[pair] = self.sent.get(pair, 0) + 1
            if all(self.sent.get((writer, other), 0) == WRITES for other in self.readers):
                self.do(writer, Writer.sent_all)

    def written(self, writer: str, reader: str, ok: bool) -> None:
        pair = (writer, reader)
        if self.in_flight.get(pair, 0) and writer not in self.dead:
            self.in_flight[pair] -= 1
            if not ok:
                self.unknown.add(pair)
            if ok and self.sent[pair] == WRITES and not self.in_flight[pair] and not self.writers[writer].poisoned:
                self.frames.append(("landed", writer, reader))
            self.do(writer, Writer.written, ok)

    def deliver(self, frame: tuple[Any, ...]) -> None:
        match frame:
            case ("destination", reader, writer):
                self.do(writer, Writer.destination, reader)
            case ("landed", writer, reader):
                self.do(reader, Reader.landed, writer)
            case ("abort", sender, target, source, reason) if target in self.writers:
                self.do(target, Writer.peer_abort, sender, source, reason)
            case ("abort", _, target, source, reason):
                self.do(target, Reader.abort, source, reason)
            case ("ack", writer, reader, outcome):
                self.do(reader, Reader.ack, writer, outcome)

    def kill(self, name: str) -> None:
        """Killed, reaped, and everybody else told."""
        self.dead.add(name)
        for pair in self.in_flight:
            if name in pair:
                while name == pair[1] and self.in_flight[pair]:
                    self.written(*pair, True)
                self.in_flight[pair] = 0
        for other in {**self.writers, **self.readers}:
            if other != name:
                self.do(other, Writer.fenced if other in self.writers else Reader.fenced, name)

    def forward(self, name: str, begin: bool) -> None:
        half = type(self.half(name))
        self.do(name, half.forward_begin if begin else half.forward_end)  # type: ignore[attr-defined]


#: What happens, by how often.
MOVES = {
    "expose": 4, "write": 10, "written": 8, "deliver": 20, "abort": 2, "overdue": 1, "begin": 3, "end": 3, "finish": 1,
    "kill": 1,
}  # fmt: skip
moves = st.lists(
    st.tuples(
        st.sampled_from([name for name, often in MOVES.items() for _ in range(often)]), st.integers(0, 2**32 - 1)
    ),
    min_size=20,
    max_size=80,
)


def play(world: World, move: str, random: Random) -> None:
    writer, reader = random.choice(list(world.writers)), random.choice(list(world.readers))
    either = random.choice([writer, reader])
    match move:
        case "expose":
            world.expose(reader)
        case "write":
            world.write(writer, reader)
        case "written":
            world.written(writer, reader, ok=random.random() < 0.9)
        case "deliver" if world.frames:
            frame = random.choice(world.frames)
            if random.random() < 0.7:
                world.frames.remove(frame)
            world.deliver(frame)
        case "abort":
            world.do(either, type(world.half(either)).abort, AbortSource.CLIENT, "left")
        case "overdue":
            world.do(reader, Reader.ack_overdue)
        case "begin" | "end":
            world.forward(either, begin=move == "begin")
        case "finish":
            world.do(reader, Reader.finished)
        case "kill":
            world.kill(either)


def end(world: World) -> None:
    """The environment keeps its promises: writes and forwards end, frames arrive, the rest is aborted and fenced."""
    for pair in list(world.in_flight):
        while world.in_flight[pair]:
            world.written(*pair, True)
    for name in (*world.writers, *world.readers):
        while world.half(name).forwards and name not in world.dead:
            world.forward(name, begin=False)
    for name in (*world.writers, *world.readers):
        world.do(name, type(world.half(name)).abort, AbortSource.DEADLINE, "over")
    while world.frames:
        world.deliver(world.frames.pop(0))
    for reader, half in world.readers.items():
        world.do(reader, Reader.ack_overdue)
        for writer in half.awaiting:
            if reader not in world.dead:
                assert reader in world.quarantined
                assert world.writers[writer].poisoned or writer in world.dead
                world.kill(writer)


@settings(max_examples=400)
@given(writers=st.integers(1, 2), readers=st.integers(1, 2), history=moves)
def test_no_page_is_released_under_a_writer_and_every_room_ends(writers: int, readers: int, history: Any) -> None:
    world = World.of(writers, readers)
    for move, seed in history:
        play(world, move, Random(seed))
    end(world)
    for name in (*world.writers, *world.readers):
        if name not in world.dead:
            half = world.half(name)
            assert half.state in TERMINAL
            poisoned = isinstance(half, Writer) and half.poisoned
            assert world.releases.get(name, 0) == (0 if poisoned else 1)
            if isinstance(half, Writer) and half.state is RoomState.ABORTED:
                assert world.acked[name] >= set(half.peers)


def test_a_history_without_faults_closes_both_sides() -> None:
    world = World.of(2, 2)
    for reader in world.readers:
        world.expose(reader)
    while world.frames:
        world.deliver(world.frames.pop(0))
    for pair in [(w, r) for w in world.writers for r in world.readers] * WRITES:
        world.write(*pair)
    for pair in list(world.in_flight):
        while world.in_flight[pair]:
            world.written(*pair, True)
    while world.frames:
        world.deliver(world.frames.pop(0))
    for reader in world.readers:
        world.do(reader, Reader.verified)
        world.forward(reader, begin=True)
        world.forward(reader, begin=False)
        world.do(reader, Reader.finished)
    assert {world.half(name).state for name in (*world.writers, *world.readers)} == {RoomState.CLOSED}
