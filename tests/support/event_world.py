"""The world of an event file: its ranks, what is on its way between them, the control plane's half, and the time.

Everything that decides is the real thing: `Agent`, `Gate`, `Room`, `AbortLog`, the link's codec, the judge. Messages
arrive at once and in order, unless the file holds their kind back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from dsv4ctl.controlplane.aborts.log import AbortLog
from dsv4ctl.controlplane.link.codec import encode
from dsv4ctl.controlplane.link.wire import (
    Abort,
    AbortAck,
    Fenced,
    OpenRoom,
    Quarantined,
    Received,
    Role,
    RoomReport,
    SetGuards,
    ToControlPlane,
    ToRank,
)
from dsv4ctl.controlplane.rooms import room as whole_room
from dsv4ctl.controlplane.rooms.room import Effect, Ended, Fence, ParticipantInfo, Room, SendAbort, StaleReport
from dsv4ctl.controlplane.rooms.states import LIVE, AbortSource, Cancellable, RoomKey
from dsv4ctl.controlplane.tickets.types import Consumer
from event_rank import POOLS, Rank, Unmet

#: Seconds that a state, and the acknowledgement of an abort, may last.
STATE_SECONDS, ACK_SECONDS = 10.0, 4.0
#: Seconds between two looks of every loop.
TICK = 0.25
#: Every kind of message: `link` to a rank, `report` to the control plane, the others between ranks.
KINDS = ("link", "report", "abort", "ack", "destination", "bytes", "landed")


class Message(NamedTuple):
    kind: str
    sender: str
    target: str
    deliver: Callable[[], None]


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.damage: list[str] = []  #: wrong bytes read, or bytes written over somebody else's
        self.ranks: dict[str, Rank] = {}
        self.rooms: dict[RoomKey, Room] = {}
        self.fences: list[str] = []  #: asked for by the control plane, in order
        self.ended: list[str] = []
        self._logs: dict[str, AbortLog] = {}
        self._cancellable: dict[str, Cancellable] = {}  #: as each rank's engine declares it
        self._held: set[str] = set()
        self._wire: list[Message] = []

    # ---- messages ------------------------------------------------------------------------------------

    def send(self, kind: str, sender: str, target: str, deliver: Callable[[Rank], None]) -> None:
        """Between two ranks; what is for a rank that the file does not have is lost, as for a dead one."""
        rank = self.ranks.get(target)
        if rank is not None:
            self._wire.append(Message(kind, sender, target, lambda: rank.hear(deliver) if rank.alive else None))

    def report(self, sender: str, frame: ToControlPlane) -> None:
        self._wire.append(Message("report", sender, "", lambda: self._reported(sender, frame)))

    def _frame(self, target: str, frame: ToRank) -> None:
        rank, data = self.ranks[target], encode(frame)
        self._wire.append(Message("link", "", target, lambda: rank.feed(data)))

    def settle(self) -> None:
        """Delivers, in order, whatever is not held back, and what comes of it."""
        while (at := next((n for n, m in enumerate(self._wire) if m.kind not in self._held), None)) is not None:
            self._wire.pop(at).deliver()

    # ---- what files say ------------------------------------------------------------------------------

    def do_rank(self, name: str, role: str, pages: str = "8", consumers: str = "", cancellable: str = "chunk") -> None:
        """A rank of its own engine; `consumers` are the registered ones (default: all)."""
        self._cancellable[name] = Cancellable(cancellable)
        registered = [Consumer(word) for word in consumers.split(",")] if consumers else list(Consumer)
        self.ranks[name] = Rank(self, name, Role(role), int(pages), registered)
        self._logs[name] = AbortLog()

    def do_open(self, key: str, *names: str) -> None:
        """The control plane opens a room on these ranks; the writers are the prefill ranks among them."""
        room = _key(key)
        roles = {name: self.ranks[name].role for name in names}
        infos = {name: ParticipantInfo(name, 0, role.value) for name, role in roles.items()}
        configured = {state.value: STATE_SECONDS for state in LIVE} | {"ack": ACK_SECONDS}
        deadlines = whole_room.allowed(configured, [self._cancellable[name] for name in names])
        self.rooms[room] = Room(room, "request", None, infos, deadlines, self.now)
        for name in names:
            peers = tuple(other for other in names if roles[other] is not roles[name])
            self._frame(name, OpenRoom(room, "request", None, "peer", peers, deadlines, "read"))

    def do_abort(self, key: str, source: str, reason: str) -> None:
        """By the control plane: a client that left, an operator, ..."""
        self._apply(self.rooms[_key(key)].abort(AbortSource(source), reason, self.now))

    def do_hold(self, *kinds: str) -> None:
        """Messages of these kinds stay on their way until `let_go`."""
        _check_kinds(kinds)
        self._held |= set(kinds)

    def do_let_go(self, *kinds: str) -> None:
        _check_kinds(kinds)
        self._held -= set(kinds)

    def do_lose(self, kind: str) -> None:
        """What is held back of this kind never arrives."""
        _check_kinds((kind,))
        self._wire = [message for message in self._wire if message.kind != kind]

    def do_repeat(self, kind: str) -> None:
        """What is held back of this kind will arrive twice."""
        _check_kinds((kind,))
        self._wire += [message for message in self._wire if message.kind == kind]

    def do_fence(self, name: str) -> None:
        """The process is killed and reaped, and everybody is told."""
        self.ranks[name].alive = False
        for other in self.ranks:
            if other != name:
                self._frame(other, Fenced(name))
        for room in list(self.rooms.values()):
            self._apply(room.fenced(name, self.now))

    def do_tick(self, seconds: str) -> None:
        """Time passes, and every loop that looks at the clock does."""
        end = self.now + float(seconds)
        while self.now < end:
            self.now = min(end, self.now + TICK)
            for room in list(self.rooms.values()):
                self._apply(room.tick(self.now))
            for name, log in self._logs.items():
                for entry in log.due(self.now):
                    self._frame(name, Abort(entry.seq, entry.key, entry.source, entry.reason))
            for rank in self.ranks.values():
                if rank.alive:
                    rank.agent.tick()
            self.settle()

    def do_guard_off(self, name: str, guard: str) -> None:
        """As `[unsafe]` does it."""
        self._frame(name, SetGuards((guard,)))

    # ---- the control plane ---------------------------------------------------------------------------

    def _reported(self, sender: str, frame: ToControlPlane) -> None:
        match frame:
            case Received():
                self._logs[sender].received(frame.seq)
            case Quarantined():
                self._fence(frame.peer)
            case RoomReport() | AbortAck():
                room = self.rooms.get(frame.key)
                if room is None:
                    return
                try:
                    if isinstance(frame, AbortAck):
                        self._apply(room.ack(sender, frame.outcome, self.now))
                    else:
                        self._apply(room.report(sender, frame.state, frame.detail, self.now))
                except StaleReport:
                    self.ranks[sender].counters["stale_reports"] += 1
            case _:
                raise Unmet(f"{sender} sent {frame}, of which no event file speaks")

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendAbort(name, key, source, reason):
                    self._logs[name].append(key, source, reason)
                    for entry in self._logs[name].due(self.now):
                        self._frame(name, Abort(entry.seq, entry.key, entry.source, entry.reason))
                case Fence(name):
                    self._fence(name)
                case Ended(key):
                    self.ended.append(str(key))

    def _fence(self, name: str) -> None:
        if name not in self.fences:
            self.fences.append(name)

    # ---- expectations --------------------------------------------------------------------------------

    def do_expect_room(self, key: str, state: str, source: str = "", reason: str = "") -> None:
        """How the control plane sees the room, and why it ended."""
        room = self.rooms[_key(key)]
        _same(f"room {key}", state, room.state.value)
        if source:
            _same(f"room {key}'s source", source, room.source.value if room.source else None)
        if reason:
            _same(f"room {key}'s reason", reason, room.reason)

    def do_expect_half(self, name: str, key: str, state: str, reason: str = "") -> None:
        """How the rank sees its half of the room; `gone`: the room does not live there."""
        rows = [row for row in self.ranks[name].agent.rooms() if row["key"] == key]
        _same(f"{key} at {name}", state, rows[0]["state"] if rows else "gone")
        if reason:
            _same(f"{key}'s reason at {name}", reason, rows[0]["reason"])

    def do_expect_pages(self, name: str, space: str, kind: str, count: str) -> None:
        """`kind`: free, owned, leased, retiring or quarantined."""
        _same(f"{kind} pages of {name} in {space}", int(count), self.ranks[name].gate.counts()[kind].get(space, 0))

    def do_expect_noted(self, name: str, what: str, key: str, *peers: str) -> None:
        """What the agent asked for, since the beginning: `released 7.1` once, `acked 7.1 D0 D1` in this order."""
        found = [noted[2:] for noted in self.ranks[name].noted if noted[:2] == (what, key)]
        _same(f"{name} {what} {key}", [(peer,) for peer in peers] or [()], found)

    def do_expect_count(self, name: str, counter: str, count: str) -> None:
        rank = self.ranks[name]
        counts = {**rank.gate.totals(), **rank.gate.violations, **rank.counters, **rank.agent.counters}
        _same(f"{counter} of {name}", int(count), counts.get(counter, 0))

    def do_expect_readable(self, name: str, ticket: str, layers: str) -> None:
        _same(f"layers granted to {ticket}", int(layers), self.ranks[name].tickets[ticket][0].readable)

    def do_expect_verdict(self, name: str, state: str, cause: str = "") -> None:
        found, why = self.ranks[name].verdict()
        _same(f"the verdict on {name}", state, found)
        if cause not in why:
            raise Unmet(f"the cause of {name}: {cause!r} expected in {why!r}")

    def do_expect_fences(self, *names: str) -> None:
        _same("fences asked for", list(names), self.fences)

    def do_expect_nothing_held(self, *names: str) -> None:
        """No room, ticket or load, and every page free."""
        for name in names:
            rank = self.ranks[name]
            _same(f"rooms of {name}", [], [f"{row['key']} {row['state']}" for row in rank.agent.rooms()])
            totals, pages = rank.gate.totals(), rank.gate.counts()
            _same(f"tickets and loads of {name}", (0, 0), (totals["tickets"], totals["loads"]))
            for kind in ("owned", "retiring", "quarantined"):
                _same(f"{kind} pages of {name}", dict.fromkeys(POOLS, 0), {s: pages[kind].get(s, 0) for s in POOLS})

    def check_undamaged(self) -> None:
        if self.damage:
            raise Unmet("; ".join(self.damage))


def _key(text: str) -> RoomKey:
    room, _, generation = text.partition(".")
    return RoomKey(int(room), int(generation))


def _same(what: str, expected: object, found: object) -> None:
    if expected != found:
        raise Unmet(f"{what}: {expected} expected, {found} found")


def _check_kinds(kinds: Iterable[str]) -> None:
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"messages of kind {kind!r}: one of {', '.join(KINDS)} expected")
