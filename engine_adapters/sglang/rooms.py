"""The rooms of one rank: what its agent asks of SGLang, and what SGLang's hooks ask of the agent.

A record lives from `OpenRoom` until the agent says that nobody writes the room's pages any more. So a room that has
a record and has failed is held: its pages, its metadata slot and its place in SGLang's queue stay.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dsv4ctl.controlplane.link.wire import OpenRoom, Role
from dsv4ctl.controlplane.rooms.effects import Effect, Refusal
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey
from dsv4ctl.engine_adapters.agent import Agent, UnknownRoomError
from dsv4ctl.engine_adapters.sglang.fetched import Fetched
from dsv4ctl.engine_adapters.sglang.peers import MARK, Ack, Digests, Outbox, Trailer, with_trailer
from dsv4ctl.kernels.buffers import Event

#: Request ids remembered by room, for aborts that name the room.
_MAX_REQUESTS = 65_536


@dataclass(eq=False)
class Room:
    opening: OpenRoom
    why: tuple[AbortSource, str] | None = None  #: it is aborting: source and reason
    forwards: int = 0  #: forwards counted with the agent
    #: On a decode rank: pages that writers were told, in logical order, by space.
    destination: dict[str, tuple[int, ...]] = field(default_factory=dict)
    #: On a prefill rank: pages that were queued to be sent, in logical order, by space.
    source: dict[str, tuple[int, ...]] = field(default_factory=dict)
    infos: dict[str, Any] = field(default_factory=dict)  #: on a prefill rank: SGLang's record of each destination
    exposed: bool = False
    verified: bool = False
    writers: dict[str, str] = field(default_factory=dict)  #: on a decode rank: incarnation -> endpoint
    bytes_by_pool: dict[str, int] = field(default_factory=dict)  #: of `source`
    waits: list[Event] = field(default_factory=list)  #: on a prefill rank: forwards that still write its pages
    sealed: Fetched | None = None  #: on a prefill rank: what its pages were when they were computed
    told: dict[str, Digests] = field(default_factory=dict)  #: on a decode rank: what each writer's pages were
    found: Fetched | None = None  #: on a decode rank: what landed

    @property
    def key(self) -> RoomKey:
        return self.opening.key

    @property
    def dropped(self) -> bool:
        """Aborting: nothing new is begun for it."""
        return self.why is not None


class Rooms:
    """The agent's `Hooks`, called under its lock; every other method takes no lock but the agent's."""

    def __init__(self, role: Role, incarnation: str) -> None:
        self._role = role
        self._incarnation = incarnation
        self._rooms: dict[int, Room] = {}
        self._requests: OrderedDict[int, str] = OrderedDict()  #: a dict finds its first key by way of those that left
        self._aborts: dict[int, None] = {}
        self._endpoints: dict[str, str] = {}
        self._aborts_lock = threading.Lock()
        self.address: tuple[bytes, bytes] = (b"", b"")  #: where this rank's SGLang socket listens: IP, port
        self.failed: Callable[[int, str], None] = lambda room, reason: None  #: marks it failed in SGLang's manager

    def bind(self, agent: Agent, outbox: Outbox, query: Callable[[str], Any]) -> None:
        self._agent = agent
        self._outbox = outbox
        self._query = query

    # ---- the agent's hooks ---------------------------------------------------------------------------

    def opened(self, opening: OpenRoom) -> None:
        self._rooms[opening.key.room] = Room(opening)

    def dropped(self, key: RoomKey, source: AbortSource, reason: str) -> None:
        room = self._rooms.get(key.room)
        if room is not None:
            room.why = (source, reason)
        with self._aborts_lock:
            self._aborts[key.room] = None
        self.failed(key.room, f"{source.value}: {reason}")

    def tell_peer(self, key: RoomKey, peer: str, source: AbortSource, reason: str) -> None:
        """A decode rank tells its writers; a prefill rank's ack, which follows, says it."""
        if self._role is Role.DECODE:
            self._tell(self._rooms[key.room], peer)

    def ack_peer(self, key: RoomKey, peer: str, outcome: Quiet) -> None:
        endpoint = self._endpoints.get(peer)
        if endpoint is not None:  # one that has not told where it is has not told where to write either
            ack = Ack(key, self._incarnation, outcome)
            self._outbox.send(endpoint, [MARK, msgspec.msgpack.encode(ack)])

    def release(self, key: RoomKey) -> None:
        self._rooms.pop(key.room, None)
        if key.room not in self._requests:
            with self._aborts_lock:
                self._aborts.pop(key.room, None)

    def quarantine(self, key: RoomKey) -> dict[str, int]:
        return _held(self._rooms[key.room])

    def query(self, what: str) -> Any:
        return self._query(what)

    # ---- for SGLang's hooks --------------------------------------------------------------------------

    def find(self, room: int | None) -> Room | None:
        return None if room is None else self._rooms.get(room)

    def live(self, room: int) -> bool:
        """Opened here by the gateway, and not aborting."""
        found = self._rooms.get(room)
        return found is not None and not found.dropped

    def held(self, room: int) -> bool:
        """A failed room whose pages somebody may still write or read."""
        return room in self._rooms

    def held_pages(self) -> int:
        return sum(sum(_held(room).values()) for room in list(self._rooms.values()) if room.dropped)

    def fail(self, room: int, reason: str, source: AbortSource = AbortSource.ENGINE_FAULT) -> None:
        found = self._rooms.get(room)
        if found is not None:
            self._agent.abort(found.key, source, reason)

    def apply(self, room: Room, event: Callable[[Any], list[Any]]) -> bool:
        """False if the room's state does not allow the event, or it ended."""
        try:
            self._agent.apply(room.key, event)
        except (Refusal, UnknownRoomError):
            return False
        return True

    def forward_begin(self, number: int | None) -> None:
        room = self.find(number)
        if room is not None and self.apply(room, lambda half: half.forward_begin()):
            room.forwards += 1

    def forward_end(self, number: int | None) -> None:
        room = self.find(number)
        if room is not None and room.forwards:
            room.forwards -= 1
            self.apply(room, lambda half: half.forward_end())

    def left(self, number: int | None, finished: bool) -> None:
        """The room's request gave its pages back on a decode or single engine."""
        room = self.find(number)
        if room is None or not (finished or room.dropped) or self._role is Role.PREFILL:
            return
        ran = room.forwards > 0
        room.forwards -= ran

        def left(half: Reader) -> list[Effect]:
            effects = half.forward_end() if ran else []
            if not half.live or half.forwards:
                return effects
            begun = half.decoding() if self._role is Role.SINGLE else []
            return [*effects, *begun, *half.finished()]

        self.apply(room, left)

    def landed(self, room: Room) -> None:
        """Everything of every writer is here, and is what they sealed."""
        room.verified = True

        def verified(half: Reader) -> list[Effect]:
            entered = [effect for peer in half.peers for effect in half.landed(peer)]
            return [*entered, *half.verified()] if half.live else entered

        self.apply(room, verified)

    def expose(self, room: Room, endpoints: Iterable[str], pages: Mapping[str, tuple[int, ...]]) -> bool:
        """The writers are about to be told where to write. False if the room is over."""
        room.writers = dict(zip(room.opening.peers, endpoints, strict=False))
        self._endpoints |= room.writers
        room.destination = dict(pages)
        room.exposed = self.apply(room, Reader.expose)
        return room.exposed

    def heard(self, peer: str, endpoint: str) -> None:
        """Where a decode rank listens."""
        self._endpoints[peer] = endpoint

    def fenced(self, peer: str) -> None:
        """The process of `peer` is gone: nothing is sent to it any more."""
        for room in list(self._rooms.values()):
            room.writers.pop(peer, None)
        endpoint = self._endpoints.pop(peer, None)
        if endpoint is not None:
            self._outbox.close(endpoint)

    def destination(self, key: RoomKey, peer: str) -> bool:
        """A decode rank told where to write. False if nothing may be written there; it is told so."""
        try:
            self._agent.apply(key, lambda half: half.destination(peer))
        except UnknownRoomError:
            self._agent.peer_abort(key, peer, AbortSource.ENGINE_FAULT, "the room is not open on the prefill rank")
            return False
        return self.live(key.room)

    def tell_digests(self, room: Room) -> None:
        """The last chunk is queued: every reader is told what it has to find, before that has arrived."""
        sealed, key = room.sealed, room.key
        if sealed is None:
            return
        pages = {space: len(numbers) for space, numbers in room.source.items()}

        def tell() -> None:
            values = sealed.get()
            frame = Digests(key, self._incarnation, pages, values.astype("<u8").tobytes())
            for peer in room.opening.peers:
                endpoint = self._endpoints.get(peer)
                if endpoint is not None:
                    self._outbox.send(endpoint, [MARK, msgspec.msgpack.encode(frame)])

        self._outbox.call(tell)

    def told_digests(self, frame: Digests) -> bool:
        """False if the room is over by now, or not open yet. Raises ValueError for bytes that are no digests.

        Raises ValueError too for those of a rank that does not write to the room.
        """
        if len(frame.values) % 8:
            raise ValueError(f"digests of room {frame.key} of {len(frame.values)} bytes, which are no whole numbers")
        room = self._rooms.get(frame.key.room)
        if room is None or room.key != frame.key:
            return False
        if frame.incarnation not in room.opening.peers:
            raise ValueError(f"digests of room {frame.key} from {frame.incarnation}, which is no writer of it")
        room.told[frame.incarnation] = frame
        return True

    def acknowledged(self, number: int, writer: int) -> None:
        """SGLang's own acknowledgement of the abort, by writer `writer` of the prefill engine."""
        room = self._rooms.get(number)
        if room is not None:
            peers = room.opening.peers
            peer = peers[0] if len(peers) == 1 else peers[writer % len(peers)]
            self._agent.peer_ack(room.key, peer, Quiet.QUIET)

    def queued(self, room: Room, pages: Mapping[str, tuple[int, ...]], byte_counts: Mapping[str, int]) -> None:
        """A chunk with these pages of each space waits to be sent: so many bytes of each pool."""
        for space, numbers in pages.items():
            room.source[space] = room.source.get(space, ()) + numbers
        for pool, count in byte_counts.items():
            room.bytes_by_pool[pool] = room.bytes_by_pool.get(pool, 0) + count
        self._agent.note(room.key, bytes_by_pool=dict(room.bytes_by_pool))

    def note(self, room: Room, **detail: Any) -> None:
        self._agent.note(room.key, **detail)

    def fail_running(self, reason: str) -> None:
        """What some forward read here was wrong, and nobody knows which room's."""
        for room in list(self._rooms.values()):
            if room.forwards:
                self.fail(room.key.room, reason, AbortSource.INTEGRITY)

    def trailer(self, room: int | None) -> Trailer:
        key = None if room is None else self._agent.current(room)
        return Trailer(self._incarnation, 0 if key is None else key.generation)

    # ---- aborts at the engine's agreed point -----------------------------------------------------------

    def requested(self, room: int, request: str) -> None:
        """SGLang's request `request` is that of the room."""
        self._requests[room] = request
        while len(self._requests) > _MAX_REQUESTS:
            self._requests.popitem(last=False)

    def take_aborts(self) -> list[str]:
        """Requests to abort whose ids are known by now."""
        if not self._aborts:
            return []
        with self._aborts_lock:
            known = [room for room in self._aborts if room in self._requests]
            for room in known:
                del self._aborts[room]
        return [self._requests[room] for room in known]

    def tick(self) -> None:
        """A few times a second: an abort is told again until its ack ends the room."""
        if self._role is Role.DECODE:
            for room in list(self._rooms.values()):
                if room.dropped:
                    for peer in list(room.writers):
                        self._tell(room, peer)

    def _tell(self, room: Room, peer: str) -> None:
        endpoint = room.writers.get(peer)
        if endpoint is None:
            return
        frame = [b"ABORT", str(room.key.room).encode(), *self.address]
        trailer = Trailer(self._incarnation, room.key.generation, *(room.why or ()))
        self._outbox.send(endpoint, with_trailer(frame, trailer))


def _held(room: Room) -> dict[str, int]:
    """Pages that other rooms could have, by space: a request's own page of states is no such page."""
    return {space: len(pages) for space, pages in room.destination.items() if space != "state"}
