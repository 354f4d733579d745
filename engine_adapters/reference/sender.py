"""The prefill rank's sends: each sealed page goes to the peers under a `sender` ticket, by one NIXL write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import msgspec
from anyio.abc import TaskGroup

from dsv4ctl.controlplane.link.wire import OpenRoom
from dsv4ctl.controlplane.rooms.effects import Effect, Refusal
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey
from dsv4ctl.controlplane.rooms.writer import Writer
from dsv4ctl.controlplane.tickets.hold import Held, hold
from dsv4ctl.controlplane.tickets.ledger import LedgerError
from dsv4ctl.controlplane.tickets.types import Consumer, Extent, Guard
from dsv4ctl.engine_adapters.agent import Agent, UnknownRoomError
from dsv4ctl.engine_adapters.reference.digests import PageDigests, fold_pages
from dsv4ctl.engine_adapters.reference.evidence import Witness
from dsv4ctl.engine_adapters.reference.geometry import PoolSpec
from dsv4ctl.engine_adapters.reference.inbox import Inbox
from dsv4ctl.engine_adapters.reference.nixl import NixlError, Span, Transport
from dsv4ctl.engine_adapters.reference.peer_wire import ChunkLanded, Destination, Landed, LastLanded, Manifest
from dsv4ctl.engine_adapters.reference.pools import DevicePools, Region
from dsv4ctl.engine_adapters.reference.writes import Flight, Writes

_encode = msgspec.msgpack.Encoder().encode

#: The room was aborted meanwhile: nothing more is posted.
_OVER = (UnknownRoomError, Refusal)


@dataclass(frozen=True, slots=True)
class SealedChunk:
    """One logical page of a prompt, to be sent.

    `extents`: one page each, at the generation meant: space `full`, `swa` if the page may lie in the window,
    and `state` on the prompt's tail page alone (the chunk with a `state` extent is the last of the room).
    `digests` were taken when the page was sealed (of the state: at the prompt's end).
    """

    logical: int
    extents: tuple[Extent, ...]
    digests: PageDigests

    @property
    def tail(self) -> bool:
        return any(extent.space == "state" for extent in self.extents)


@dataclass(eq=False, slots=True)
class _Room:
    key: RoomKey
    peers: tuple[str, ...]
    deadlines: dict[str, float]
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    changed: anyio.Event = field(default_factory=anyio.Event)
    destinations: dict[str, Destination] = field(default_factory=dict)
    waiting: list[SealedChunk] = field(default_factory=list)
    digests: dict[int, PageDigests] = field(default_factory=dict)  #: by logical page
    manifest: Manifest | None = None
    bytes_by_pool: Counter[str] = field(default_factory=Counter)

    def wake(self) -> None:
        changed, self.changed = self.changed, anyio.Event()
        changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits without a limit of its own: the control plane's deadline for the room's state aborts it."""
        while not condition():
            await self.changed.wait()

    @property
    def told(self) -> bool:
        return len(self.destinations) == len(self.peers)

    def next_chunk(self) -> SealedChunk | None:
        """A chunk that may go now. The tail carries the manifest: it goes once every other page's digest is known."""
        whole = self.manifest is not None and len(self.digests) == self.manifest.chunks
        return next((chunk for chunk in self.waiting if whole or not chunk.tail), None)


class Sender:
    """One task a room. `chunk` and `finish` come from the step thread, all else runs on the loop after `bind`."""

    def __init__(self, incarnation: str, pools: DevicePools, agent: Agent, inbox: Inbox, witness: Witness) -> None:
        self.counters: Counter[str] = Counter()
        self._incarnation = incarnation
        self._witness = witness
        self._specs = pools.specs
        self._regions = {region.pool: region for region in pools.regions()}
        self._agent = agent
        self._inbox = inbox
        self._rooms: dict[RoomKey, _Room] = {}
        self._remotes: dict[str, dict[str, Region]] = {}  #: the pools of each connected peer, by incarnation

    def bind(self, transport: Transport, writes: Writes, tasks: TaskGroup) -> None:
        """What exists only once the loop runs."""
        self._transport, self._writes, self._tasks = transport, writes, tasks

    # ---- from the step thread ------------------------------------------------------------------------

    def chunk(self, key: RoomKey, chunk: SealedChunk) -> None:
        """Thread-safe; returns at once. Chunks of a room may come in any order, before or after `finish`."""
        self._inbox.put(lambda: self._chunk(key, chunk))

    def finish(self, key: RoomKey, manifest: Manifest) -> None:
        """Thread-safe; returns at once. `manifest.digests` is filled in here, from the chunks."""
        self._inbox.put(lambda: self._finish(key, manifest))

    # ---- on the loop ---------------------------------------------------------------------------------

    def opened(self, opening: OpenRoom) -> None:
        room = _Room(opening.key, opening.peers, opening.deadlines)
        self._rooms[room.key] = room
        self._tasks.start_soon(self._serve, room, name=f"send {room.key}")

    def dropped(self, key: RoomKey) -> None:
        """Nothing more of the room is posted; what is in flight ends under `Writes`."""
        room = self._rooms.pop(key, None)
        if room is not None:
            room.scope.cancel()

    def connect(self, incarnation: str, regions: tuple[Region, ...]) -> None:
        self._remotes[incarnation] = {region.pool: region for region in regions}

    def fenced(self, incarnation: str) -> None:
        self._remotes.pop(incarnation, None)

    def destination(self, peer: str, destination: Destination) -> None:
        """A repeated one, after a reconnect, changes nothing."""

        def told(writer: Writer) -> list[Effect]:
            return writer.destination(peer)

        self._agent.gate.trace.record("received", destination.key, peer, note="destination")
        try:
            self._agent.apply(destination.key, told)
        except _OVER:
            self.counters["late_destinations"] += 1
            return
        room = self._rooms.get(destination.key)
        if room is not None:
            room.destinations.setdefault(peer, destination)
            room.wake()

    def _chunk(self, key: RoomKey, chunk: SealedChunk) -> None:
        room = self._rooms.get(key)
        if room is None:
            self.counters["late_chunks"] += 1
        elif chunk.logical in room.digests:
            self._fail(room, f"logical page {chunk.logical} was sealed twice")
        else:
            room.waiting.append(chunk)
            room.digests[chunk.logical] = chunk.digests
            room.wake()

    def _finish(self, key: RoomKey, manifest: Manifest) -> None:
        room = self._rooms.get(key)
        if room is None:
            self.counters["late_chunks"] += 1
        else:
            room.manifest = manifest
            room.wake()

    # ---- one room ------------------------------------------------------------------------------------

    async def _serve(self, room: _Room) -> None:
        with room.scope:
            async with anyio.create_task_group() as sends:
                await room.until(lambda: room.told)
                sent = 0
                while room.manifest is None or sent < room.manifest.chunks:
                    await room.until(lambda: room.next_chunk() is not None)
                    chunk = room.next_chunk()
                    if chunk is not None:
                        room.waiting.remove(chunk)
                        for peer in room.peers:
                            sends.start_soon(self._send, room, chunk, peer)
                        sent += 1
            self._sent_all(room)
        self._witness.sealed(room.key, room.digests)
        self._rooms.pop(room.key, None)

    async def _send(self, room: _Room, chunk: SealedChunk, peer: str) -> None:
        try:
            wanted = _wanted(chunk, room.destinations[peer])
            spans = self._spans(room, chunk.logical, wanted, peer)
            notification = self._notification(room, chunk, peer)
            async with hold(self._agent.gate, Consumer.SENDER, wanted, room=room.key) as held:
                if self._agent.gate.guarded(Guard.SENDER):
                    await held.granted(deadline=room.deadlines["sending"])
                await self._post(room, chunk, held, peer, spans, notification).ended.wait()
        except _OVER:
            room.scope.cancel()
        except Exception as error:  # noqa: BLE001 - whatever fails one room, a bug too, ends that room alone
            self._fail(room, f"logical page {chunk.logical} was not sent: {error!r}")

    def _post(
        self, room: _Room, chunk: SealedChunk, held: Held, peer: str, spans: list[Span], notification: bytes
    ) -> Flight:
        """No await between the room's word that it may be posted and the flight that ends it."""

        def not_posted(writer: Writer) -> list[Effect]:
            return writer.written(True)

        self._agent.apply(room.key, _post)
        try:
            held.post()
            self._trace(room, chunk, held, peer)
            try:
                write = self._transport.write(peer, spans, notification)
            except NixlError:
                held.complete()
                raise
        except (LedgerError, NixlError):
            self._agent.apply(room.key, not_posted)
            raise
        flight = Flight(room.key, peer, write, held, doubt_seconds=room.deadlines["ack"] / 2)
        self._writes.add(flight)
        return flight

    def _trace(self, room: _Room, chunk: SealedChunk, held: Held, peer: str) -> None:
        """Which pages of the peer are written, under the ticket that reads ours."""
        destination, extents = room.destinations[peer], held.ticket.extents
        targets = tuple((extent.space, (_target(destination, extent.space, chunk.logical),)) for extent in extents)
        note = f"chunk {chunk.logical}"
        self._agent.gate.trace.record("write", room.key, peer, targets, note, id(held.ticket))

    def _spans(self, room: _Room, logical: int, extents: tuple[Extent, ...], peer: str) -> list[Span]:
        """One span a (pool, layer). Raises ValueError, LookupError for a page that the peer does not have."""
        destination, remote = room.destinations[peer], self._remotes[peer]
        spans: list[Span] = []
        for extent in extents:
            page = _target(destination, extent.space, logical)
            for pool in sorted(extent.pools):
                here, there = self._regions[pool], remote[pool]
                for layer in range(here.layers):
                    local, target = here.address(layer, extent.pages[0]), there.address(layer, page)
                    spans.append((local, target, here.page_bytes))
                room.bytes_by_pool[pool] += here.layers * here.page_bytes
        return spans

    def _notification(self, room: _Room, chunk: SealedChunk, peer: str) -> bytes:
        landed: Landed
        if chunk.tail and room.manifest is not None:
            digests = _folded(room.digests, chunk, room.destinations[peer], self._specs)
            manifest = msgspec.structs.replace(room.manifest, digests=digests.to_builtins())
            landed = LastLanded(room.key, self._incarnation, chunk.logical, manifest)
        else:
            landed = ChunkLanded(room.key, self._incarnation, chunk.logical)
        return _encode(landed)

    def _sent_all(self, room: _Room) -> None:
        self._agent.note(room.key, bytes_by_pool=dict(room.bytes_by_pool))
        try:
            self._agent.apply(room.key, Writer.sent_all)
        except _OVER:
            self.counters["late_chunks"] += 1

    def _fail(self, room: _Room, why: str) -> None:
        self.counters["failed_rooms"] += 1
        self._agent.abort(room.key, AbortSource.ENGINE_FAULT, f"sender: {why}")
        self.dropped(room.key)


def _post(writer: Writer) -> list[Effect]:
    return writer.post()


def _wanted(chunk: SealedChunk, destination: Destination) -> tuple[Extent, ...]:
    """Of the window's pages only those that the peer asks for. Raises ValueError for one that we do not have."""
    asked = chunk.logical in destination.swa
    if asked and all(extent.space != "swa" for extent in chunk.extents):
        raise ValueError(f"the peer's window begins earlier than ours, at page {chunk.logical}")
    return tuple(extent for extent in chunk.extents if asked or extent.space != "swa")


def _target(destination: Destination, space: str, logical: int) -> int:
    """The peer's page. Raises ValueError for a logical page that the peer did not name."""
    match space:
        case "full" if logical < len(destination.full):
            return destination.full[logical]
        case "swa":
            return destination.swa[logical]
        case "state":
            return destination.state
        case _:
            raise ValueError(f"the peer named {len(destination.full)} full pages, and no page {logical}")


def _folded(
    digests: dict[int, PageDigests], tail: SealedChunk, destination: Destination, specs: dict[str, PoolSpec]
) -> PageDigests:
    """Per (pool, layer) in logical order: every full page, the window's pages, and the tail's state alone."""

    def covered(logical: int) -> PageDigests:
        spaces = {"full"} | ({"swa"} if logical in destination.swa else set())
        if logical == tail.logical:
            spaces.add("state")
        page = digests[logical].values
        return PageDigests({pool: page[pool] for pool, spec in specs.items() if spec.space in spaces})

    return fold_pages(covered(logical) for logical in sorted(digests))
