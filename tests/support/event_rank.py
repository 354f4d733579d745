"""One rank of an event file: a real agent on a real gate, and by hand what its engine's threads would do.

Bytes are labels: each (space, page, pool, layer) holds the name of whoever wrote it last, so that a read of the
wrong bytes, or a write into a page that was given back, is seen as damage and not only as a state.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from dsv4ctl.controlplane.link.codec import Decoder, FrameError
from dsv4ctl.controlplane.link.wire import LoopStatus, OpenRoom, Progress, Role, ToControlPlane, ToRank
from dsv4ctl.controlplane.rooms.effects import Refusal
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey
from dsv4ctl.controlplane.rooms.writer import Writer
from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.ticket import Load, Ticket
from dsv4ctl.controlplane.tickets.types import Consumer, Extent, Guard, LoadKind, SpaceSpec
from dsv4ctl.controlplane.trace.ring import Ring
from dsv4ctl.controlplane.watchdog import judge
from dsv4ctl.engine_adapters.agent import Agent, UnknownRoomError

LAYERS = 3
POOLS = {
    "full": ("c4_kv", "index_k"),
    "swa": ("swa_kv",),
    "state": ("c4_state",),
    "host.full": ("c4_kv", "index_k"),
}
#: Seconds without progress after which a rank is wedged.
WEDGE = 8.0
Half = Reader | Writer


class Unmet(AssertionError):
    """What an event file expects is not so."""


class NoPages(Exception):
    """All or nothing: there are not that many free pages."""


@dataclass
class Place:
    """Pages under one name: those of a room, or of a load of their own."""

    extents: list[Extent] = field(default_factory=list)  #: at the generations that they were taken or leased at
    load: Load | None = None
    tickets: list[Ticket] = field(default_factory=list)
    freed: bool = False


class Flight(NamedTuple):
    """A write into a peer's pages that was posted and has not ended."""

    key: RoomKey
    reader: str
    extents: tuple[Extent, ...]


class Net(Protocol):
    """What a rank needs of its world."""

    now: float
    damage: list[str]

    def send(self, kind: str, sender: str, target: str, deliver: Callable[[Rank], None]) -> None: ...

    def report(self, sender: str, frame: ToControlPlane) -> None: ...


class Rank:
    def __init__(self, net: Net, name: str, role: Role, pages: int, registered: Sequence[Consumer]) -> None:
        self.net, self.name, self.role = net, name, role
        spaces = {space: SpaceSpec(pages, pools) for space, pools in POOLS.items()}
        self.gate = Gate(spaces, LAYERS, Ring(itertools.count().__next__))
        for consumer in registered:
            self.gate.register(consumer, "here")
        self.agent = Agent(role, name, self.gate, self, lambda frame: net.report(name, frame), lambda: net.now)
        self.alive = True
        self.fault: str | None = None  #: why the thread that reads the link died
        self.counters: Counter[str] = Counter()
        self.noted: list[tuple[str, ...]] = []  #: what the agent asked for: ("released", key), ("acked", key, peer)
        self.places: dict[str, Place] = {}
        self.tickets: dict[str, tuple[Ticket, str]] = {}  #: by name, with whose bytes it means to read
        self.peers: dict[RoomKey, tuple[str, ...]] = {}
        self.told: dict[tuple[RoomKey, str], tuple[Extent, ...]] = {}  #: where each peer said to write
        self.flights: list[Flight] = []
        self.bytes: dict[tuple[str, int, str, int], str] = {}
        self.history: list[tuple[float, Progress]] = []
        self._decoder: Decoder[ToRank] = Decoder(ToRank)

    # ---- the link ------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """What the thread at the link does with bytes; if it dies, nothing is heard any more."""
        if self.fault is not None or not self.alive:
            return
        try:
            for frame in self._decoder.feed(data):
                if isinstance(frame, FrameError):
                    self.counters["bad_frames"] += 1
                else:
                    self.agent.handle(frame)
        except FrameError as error:
            self.fault = str(error)

    def hear(self, deliver: Callable[[Rank], None]) -> None:
        """What the transfer thread does with a peer's frame."""
        try:
            deliver(self)
        except Refusal:
            self.counters["bad_frames"] += 1

    # ---- hooks ---------------------------------------------------------------------------------------

    def opened(self, opening: OpenRoom) -> None:
        self.places[str(opening.key)] = Place()
        self.peers[opening.key] = opening.peers

    def dropped(self, key: RoomKey, source: AbortSource, reason: str) -> None:
        self.noted.append(("dropped", str(key)))

    def tell_peer(self, key: RoomKey, peer: str, source: AbortSource, reason: str) -> None:
        self.net.send("abort", self.name, peer, lambda rank: rank.agent.peer_abort(key, self.name, source, reason))

    def ack_peer(self, key: RoomKey, peer: str, outcome: Quiet) -> None:
        self.noted.append(("acked", str(key), peer))
        self.net.send("ack", self.name, peer, lambda rank: rank.agent.peer_ack(key, self.name, outcome))

    def release(self, key: RoomKey) -> None:
        self.noted.append(("released", str(key)))
        place = self.places.pop(str(key))
        if place.load is not None and place.load.open:
            self.gate.end_load(place.load)
        for ticket in place.tickets:
            self.gate.leave(ticket)
        self._free(place)

    def quarantine(self, key: RoomKey) -> dict[str, int]:
        place = self.places[str(key)]
        self._free(place)
        if place.load is not None and place.load.open:
            self.gate.quarantine(place.load)
        return {extent.space: len(extent.pages) for extent in place.extents}

    def query(self, what: str) -> Any:
        raise ValueError(what)

    def _free(self, place: Place) -> None:
        if not place.freed:
            place.freed = True
            for space, pages in _by_space(place.extents).items():
                self.gate.free(space, pages)

    # ---- a room's engine -----------------------------------------------------------------------------

    def do_expose(self, key: str, space: str, pages: str) -> None:
        """Takes pages for what the peers will write, and tells every peer where they are."""
        room = _key(key)
        place = self._take(key, space, int(pages))
        place.load = self.gate.open_load(LoadKind.TRANSFER, place.extents, room=room, verify=True)
        place.extents = list(place.load.extents)
        self.agent.apply(room, Reader.expose)
        told = tuple(place.extents)
        for peer in self.peers[room]:
            self.net.send("destination", self.name, peer, lambda rank: rank.hear_destination(room, self.name, told))

    def hear_destination(self, key: RoomKey, peer: str, extents: tuple[Extent, ...]) -> None:
        try:
            self.agent.apply(key, lambda half: half.destination(peer))
        except UnknownRoomError:
            self.counters["late_destinations"] += 1
        else:
            self.told[key, peer] = extents

    def do_take(self, name: str, space: str, pages: str) -> None:
        """Pages that nobody writes yet: of a room that is open here, or under a name of their own."""
        self._take(name, space, int(pages))

    def do_half(self, key: str, event: str, *arguments: str) -> None:
        """An event of the room's machine by its name."""
        self.agent.apply(_key(key), lambda half: getattr(half, event)(*arguments))

    def do_post(self, key: str, peer: str) -> None:
        room = _key(key)
        self.agent.apply(room, Writer.post)
        self.flights.append(Flight(room, peer, self.told[room, peer]))

    def do_written(self, key: str, peer: str, end: str = "known") -> None:
        """The first write to `peer` ended; `unknown`: nobody can say how. Its bytes are there in both cases."""
        room = _key(key)
        flight = next(flight for flight in self.flights if (flight.key, flight.reader) == (room, peer))
        self.flights.remove(flight)
        self.net.send("bytes", self.name, peer, lambda rank: rank.be_written(flight, self.name))
        try:
            self.agent.apply(room, lambda half: half.written(end != "unknown"))
        except UnknownRoomError:
            self.counters["late_writes"] += 1

    def be_written(self, flight: Flight, writer: str) -> None:
        for extent in flight.extents:
            now = self.gate.extent(extent.space, extent.pages).generations
            if str(flight.key) not in self.places or now != extent.generations:
                pages = ",".join(map(str, extent.pages))
                self.net.damage.append(
                    f"{writer} wrote bytes of {flight.key} into {extent.space} pages {pages} of {self.name}, "
                    f"which are not {flight.key}'s any more"
                )
            self._write(extent, str(flight.key), range(LAYERS))

    def do_sent_all(self, key: str) -> None:
        """The last write was posted; if none is in flight, every peer has heard the last notification too."""
        room = _key(key)
        self.agent.apply(room, Writer.sent_all)
        if not any(flight.key == room for flight in self.flights):
            for peer in self.peers[room]:
                self.net.send("landed", self.name, peer, lambda rank: rank.do_landed(key, self.name))

    def do_landed(self, key: str, peer: str) -> None:
        room = _key(key)
        try:
            self.agent.apply(room, lambda half: half.landed(peer))
        except UnknownRoomError:
            self.counters["late_notifications"] += 1

    def do_verified(self, key: str) -> None:
        """Every digest matched: the bytes are everybody's to read."""
        self.agent.apply(_key(key), Reader.verified)
        load = self.places[key].load
        assert load is not None
        self.gate.layer_landed(load, LAYERS)
        self.gate.layer_verified(load, LAYERS)
        self.gate.end_load(load)

    def do_abort(self, key: str, source: str, reason: str) -> None:
        """From inside the engine."""
        self.agent.abort(_key(key), AbortSource(source), reason)

    def do_hears(self, what: str, key: str, peer: str, outcome: str = "quiet") -> None:
        """A frame of `peer` that no rank of the file has sent just now: late, repeated, or a stranger's."""
        room = _key(key)
        match what:
            case "ack":
                self.hear(lambda rank: rank.agent.peer_ack(room, peer, Quiet(outcome)))
            case "abort":
                self.hear(lambda rank: rank.agent.peer_abort(room, peer, AbortSource.CLIENT, "left"))
            case "landed":
                self.hear(lambda rank: rank.do_landed(key, peer))
            case _:
                raise ValueError(f"hears {what!r}: ack, abort or landed expected")

    def do_garbled(self, body: str) -> None:
        """A frame of the link whose body (in hex) is no frame."""
        raw = bytes.fromhex(body)
        self.feed(len(raw).to_bytes(4, "big") + raw)

    # ---- loads and tickets ---------------------------------------------------------------------------

    def do_load(self, name: str, kind: str, space: str, pages: str, pools: str = "", room: str = "") -> None:
        """Takes pages and leases them to a writer; with `room` they are given back with that room."""
        place = self._take(name, space, int(pages))
        extents = [self.gate.extent(e.space, e.pages, pools.split(",") if pools else None) for e in place.extents]
        place.load = self.gate.open_load(LoadKind(kind), extents, room=_key(room) if room else None)
        place.extents = list(place.load.extents)
        if room:
            self.places[room].extents += place.extents

    def do_land(self, name: str, layers: str = str(LAYERS)) -> None:
        """The writer writes its first `layers` layers, and says so."""
        load = self._load(name)
        for extent in load.extents:
            if self.gate.extent(extent.space, extent.pages).generations != extent.generations:
                self.net.damage.append(f"{name} landed in pages of {self.name} that were handed to somebody else")
            self._write(extent, name, range(load.landed, int(layers)))
        self.gate.layer_landed(load, int(layers))

    def do_end(self, name: str) -> None:
        self.gate.end_load(self._load(name))

    def do_fail(self, name: str) -> None:
        self.gate.fail_load(self._load(name), "told to")

    def do_free(self, name: str) -> None:
        """The owner of the pages gives them back: evicted, or folded into a copy that was there before."""
        self._free(self.places[name])

    def do_ticket(self, name: str, consumer: str, of: str, pages: str = "", pools: str = "", room: str = "") -> None:
        """A ticket on the pages called `of`, as they were when they were taken; `pages` counts from the first."""
        place = self.places[of]
        extents = [
            replace(
                extent,
                pages=extent.pages[: int(pages or len(extent.pages))],
                generations=extent.generations[: int(pages or len(extent.pages))],
                pools=frozenset(pools.split(",")) if pools else extent.pools,
            )
            for extent in place.extents
        ]
        key = _key(of) if "." in of else _key(room) if room else None
        ticket = self.gate.request(Consumer(consumer), extents, room=key)
        if key is not None:
            self.places[str(key)].tickets.append(ticket)
        self.tickets[name] = ticket, of

    def do_read(self, name: str, pool: str, layer: str) -> None:
        """Reads one layer now: what is not granted raises TicketTimeoutError instead of waiting."""
        ticket, of = self.tickets[name]
        self.gate.read(ticket, pool, int(layer), deadline=0.0)
        for extent in ticket.extents:
            for page in extent.pages:
                found = self.bytes.get((extent.space, page, pool, int(layer)), "nobody's")
                if found != of:
                    self.net.damage.append(
                        f"{ticket.consumer.value} read {pool} layer {layer} of {self.name}: {found} bytes, not {of}'s"
                    )

    def do_release(self, name: str) -> None:
        self.gate.release(self.tickets[name][0])

    def do_guard_off(self, guard: str) -> None:
        self.gate.set_guards_off([Guard(guard)])

    # ---- progress ------------------------------------------------------------------------------------

    def do_progress(self, steps: str, work: str, tokens: str = "0") -> None:
        """A progress report of the rank."""
        counters = {"tokens_out": int(tokens)}
        loops = {"step": LoopStatus(int(steps))}
        report = Progress(int(steps), int(work), {"waiting": int(work)}, self.agent.ledger_counts(), loops, counters)
        self.history.append((self.net.now, report))

    def verdict(self) -> tuple[str, str]:
        state, cause = judge.judge(self.history, self.net.now, WEDGE)
        return state.value, cause or ""

    # ---- inside --------------------------------------------------------------------------------------

    def _take(self, name: str, space: str, pages: int) -> Place:
        taken = self.gate.allocate({space: pages})
        if taken is None:
            raise NoPages(f"{self.name} has {self.gate.room_in(space)[0]} free pages in {space}, asked are {pages}")
        place = self.places.setdefault(name, Place())
        place.extents.append(self.gate.extent(space, taken[space]))
        return place

    def _load(self, name: str) -> Load:
        load = self.places[name].load
        assert load is not None, f"nothing loads {name}"
        return load

    def _write(self, extent: Extent, label: str, layers: range) -> None:
        for page in extent.pages:
            for pool in extent.pools:
                for layer in layers:
                    self.bytes[extent.space, page, pool, layer] = label


def _key(text: str) -> RoomKey:
    room, _, generation = text.partition(".")
    return RoomKey(int(room), int(generation))


def _by_space(extents: Sequence[Extent]) -> dict[str, list[int]]:
    pages: dict[str, list[int]] = {}
    for extent in extents:
        pages.setdefault(extent.space, []).extend(extent.pages)
    return pages
