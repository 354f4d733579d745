"""The decode rank's receives, as `engine_adapters.reference.receiver` and `transfer` do them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from dsv4ctl.controlplane.rooms.effects import Effect, Refusal
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey
from dsv4ctl.controlplane.tickets.ticket import Load
from dsv4ctl.controlplane.tickets.types import Consumer
from dsv4ctl.engine_adapters.agent import UnknownRoomError
from simulation.memory import Bytes, Write
from simulation.wires import Destination, PeerAbort, PeerAck

if TYPE_CHECKING:
    from simulation.rank import Rank

_OVER = (Refusal, UnknownRoomError)
#: Seconds that the comparison of digests takes.
_COMPARE = (0.001, 0.01)


@dataclass(eq=False)
class _Room:
    key: RoomKey
    peer: str
    pages: tuple[int, ...]
    load: Load
    exposed: bool = False
    landed: set[int] = field(default_factory=set)
    manifest: tuple[Bytes, ...] | None = None


class Receiver:
    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._rooms: dict[RoomKey, _Room] = {}
        self._unacked: dict[str, dict[RoomKey, PeerAbort]] = {}

    # ---- the engine's calls --------------------------------------------------------------------------

    def expect(self, key: RoomKey, peer: str, pages: tuple[int, ...], load: Load) -> None:
        room = self._rooms[key] = _Room(key, peer, pages, load)
        wire = self._rank.host.wire(self._rank, peer)
        if wire is not None and wire.up:
            self._tell(room)
        elif wire is not None:
            wire.dial()

    def dropped(self, key: RoomKey) -> None:
        self._rooms.pop(key, None)

    def wants(self, peer: str) -> bool:
        return any(room.peer == peer for room in self._rooms.values()) or bool(self._unacked.get(peer))

    def tell_peer(self, key: RoomKey, peer: str, source: AbortSource, reason: str) -> None:
        if peer in self._rank.fences:
            return
        frame = self._unacked.setdefault(peer, {})[key] = PeerAbort(key, source, reason)
        wire = self._rank.host.wire(self._rank, peer)
        if wire is not None and wire.up:
            wire.send(self._rank, frame)
        elif wire is not None:
            wire.dial()

    def fenced(self, incarnation: str) -> None:
        self._unacked.pop(incarnation, None)
        for room in [room for room in self._rooms.values() if room.peer == incarnation]:
            del self._rooms[room.key]

    # ---- the peer ------------------------------------------------------------------------------------

    def wire_up(self, peer: str) -> None:
        for room in [room for room in self._rooms.values() if room.peer == peer]:
            self._tell(room)
        for frame in self._unacked.get(peer, {}).values():
            self._rank.host.send(self._rank, peer, frame)

    def peer(self, peer: str, frame: Destination | PeerAbort | PeerAck) -> None:
        agent = self._rank.agent
        match frame:
            case PeerAbort():
                agent.peer_abort(frame.key, peer, frame.source, frame.reason)
            case PeerAck():
                self._unacked.get(peer, {}).pop(frame.key, None)
                agent.peer_ack(frame.key, peer, frame.outcome)
        self._rank.group.wake()

    def notified(self, write: Write) -> None:
        room = self._rooms.get(write.key)
        if room is None or room.peer != write.writer.incarnation:
            self._rank.agent.counters["late_notifications"] += 1
            return
        room.landed.add(write.logical)
        room.manifest = write.manifest or room.manifest
        if room.manifest is not None and len(room.landed) == len(room.pages):
            self._whole(room)

    def _tell(self, room: _Room) -> None:
        """The room exposes its pages, then the peer learns where they are."""
        try:
            if not room.exposed:
                self._rank.agent.apply(room.key, Reader.expose)
                room.exposed = True
        except _OVER:
            self.dropped(room.key)
            return
        self._rank.host.send(self._rank, room.peer, Destination(room.key, room.pages))

    # ---- one room ------------------------------------------------------------------------------------

    def _whole(self, room: _Room) -> None:
        del self._rooms[room.key]
        gate = self._rank.gate

        def landed(reader: Reader) -> list[Effect]:
            if room.load.open:
                gate.layer_landed(room.load, gate.layers)
            return reader.landed(room.peer)

        try:
            self._rank.agent.apply(room.key, landed)
        except _OVER:
            return
        self._rank.after(self._rank.random.uniform(*_COMPARE), partial(self._compare, room))

    def _compare(self, room: _Room) -> None:
        rank, agent, gate = self._rank, self._rank.agent, self._rank.gate
        if not room.load.open:
            agent.counters["late_verdicts"] += 1
            return  # aborted meanwhile
        ticket = gate.request(Consumer.CHECKSUM, room.load.extents, room=room.key)
        found = tuple(rank.memory.read(room.key, page, logical) for logical, page in enumerate(room.pages))
        gate.leave(ticket)
        agent.counters["digests_compared"] += len(found)
        differ = found != room.manifest
        agent.note(room.key, digests_compared=len(found), digest_mismatches=["c4_kv"] if differ else [])

        def judged(reader: Reader) -> list[Effect]:
            if differ:
                gate.fail_load(room.load, "digests differ")
                return reader.abort(AbortSource.INTEGRITY, "digests differ")
            effects = reader.verified()
            gate.layer_verified(room.load, gate.layers)
            gate.end_load(room.load)
            return effects

        try:
            agent.apply(room.key, judged)
        except _OVER:
            agent.counters["late_verdicts"] += 1
            return
        part = rank.parts.get(room.key)
        if part is not None and not differ:
            part.ready = True
        rank.group.wake()
