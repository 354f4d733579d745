"""The prefill rank's transfers, as `engine_adapters.reference.sender` and `writes` do them, by timed events."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from dsv4ctl.controlplane.link.wire import OpenRoom
from dsv4ctl.controlplane.rooms.effects import Refusal
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey
from dsv4ctl.controlplane.rooms.writer import Writer
from dsv4ctl.controlplane.tickets.types import Consumer
from dsv4ctl.engine_adapters.agent import UnknownRoomError
from simulation.memory import Bytes, Write
from simulation.net import LATENCY
from simulation.wires import Destination, PeerAbort, PeerAck

if TYPE_CHECKING:
    from simulation.rank import Rank

_OVER = (Refusal, UnknownRoomError)
#: Seconds that a page is on its way; and, where its outcome is unknown, how much later it may land.
_PAGE, _LATE = (0.001, 0.02), (0.0, 4.0)


@dataclass(eq=False)
class _Room:
    opening: OpenRoom
    pages: int = 0
    destinations: dict[str, tuple[int, ...]] = field(default_factory=dict)
    posted: int = 0
    in_flight: int = 0


class Sender:
    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._rooms: dict[RoomKey, _Room] = {}
        self._flights: list[Write] = []

    # ---- the engine's calls --------------------------------------------------------------------------

    def opened(self, opening: OpenRoom) -> None:
        self._rooms[opening.key] = _Room(opening)

    def dropped(self, key: RoomKey) -> None:
        self._rooms.pop(key, None)

    def computed(self, key: RoomKey, pages: tuple[int, ...], logical: int, digests: tuple[Bytes, ...]) -> None:
        """A page is sealed: it goes to every peer, the last one with the digests of all."""
        room = self._rooms.get(key)
        if room is None:
            return
        room.pages = len(pages)
        manifest = digests if logical == len(pages) - 1 else None
        for peer, targets in room.destinations.items():
            self._post(room, peer, logical, pages[logical], targets[logical], manifest)

    # ---- the peer ------------------------------------------------------------------------------------

    def peer(self, peer: str, frame: Destination | PeerAbort | PeerAck) -> None:
        agent = self._rank.agent
        try:
            match frame:
                case PeerAbort():
                    agent.peer_abort(frame.key, peer, frame.source, frame.reason)
                case Destination():
                    agent.apply(frame.key, lambda writer: writer.destination(peer))
                    room = self._rooms.get(frame.key)
                    if room is not None:
                        room.destinations.setdefault(peer, frame.pages)
        except _OVER:
            agent.counters["late_frames"] += 1
        self._rank.group.wake()

    def tell_peer(self, key: RoomKey, peer: str, source: AbortSource, reason: str) -> None:
        self._rank.host.send(self._rank, peer, PeerAbort(key, source, reason))

    def ack_peer(self, key: RoomKey, peer: str, outcome: Quiet) -> None:
        self._rank.host.send(self._rank, peer, PeerAck(key, outcome))

    def fenced(self, incarnation: str) -> None:
        """Nothing can be written into a dead process."""
        for write in [write for write in self._flights if write.reader.incarnation == incarnation]:
            self._ended(write, ok=True)

    # ---- writes --------------------------------------------------------------------------------------

    def _post(
        self, room: _Room, peer: str, logical: int, source: int, target: int, manifest: tuple[Bytes, ...] | None
    ) -> None:
        rank, key = self._rank, room.opening.key
        gate, reader = rank.gate, rank.host.ranks.get(peer)
        if reader is None:
            return  # reaped: this rank is about to be told
        ticket = gate.request(Consumer.SENDER, [gate.extent("full", [source])], room=key)
        try:
            rank.agent.apply(key, Writer.post)
        except _OVER:
            gate.leave(ticket)
            self._rooms.pop(key, None)
            return
        gate.post(ticket)
        faults = (rank.faults, reader.faults)
        write = Write(
            key, logical, rank, reader, source, target, ticket, manifest, room.opening.deadlines["ack"] / 2,
            unknown=any(fault.write_lost for fault in faults), flips=any(fault.corrupt for fault in faults),
        )  # fmt: skip
        rank.memory.outgoing.append(write)
        reader.memory.incoming.append(write)
        self._flights.append(write)
        room.posted, room.in_flight = room.posted + 1, room.in_flight + 1
        seconds = rank.random.uniform(*_PAGE) * rank.faults.link.slow
        if write.unknown:
            rank.host.loop.call_later(seconds + rank.random.uniform(*_LATE), write.land)
            rank.after(seconds + write.doubt_seconds, partial(self._ended, write, ok=False))
        else:
            rank.host.loop.call_later(seconds, self._landed, write)

    def _landed(self, write: Write) -> None:
        """The network card's word, whether or not the processes run."""
        if write.land():
            write.reader.after(LATENCY[0], partial(write.reader.receiver.notified, write))
            write.writer.after(LATENCY[0], partial(self._ended, write, ok=True))
        else:  # one of the two is gone; its fence, if it comes in time, says how this ended
            write.writer.after(write.doubt_seconds, partial(self._ended, write, ok=False))

    def _ended(self, write: Write, *, ok: bool) -> None:
        if write not in self._flights:
            return
        rank = self._rank
        self._flights.remove(write)
        if ok:
            rank.gate.complete(write.ticket)
            rank.gate.leave(write.ticket)
        try:
            rank.agent.apply(write.key, lambda writer: writer.written(ok))
        except _OVER:
            rank.agent.counters["late_writes"] += 1
        room = self._rooms.get(write.key)
        if room is not None:
            room.in_flight -= 1
            if not room.in_flight and room.posted == room.pages * len(room.destinations):
                del self._rooms[write.key]
                rank.agent.note(write.key, bytes_by_pool={"c4_kv": 8192 * room.pages})
                rank.agent.apply(write.key, Writer.sent_all)
        rank.group.wake()
