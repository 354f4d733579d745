"""The decode rank's receives: pages are exposed to the peer, counted in, compared and handed to the step thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from dsv4ctl.controlplane.link.wire import OpenRoom
from dsv4ctl.controlplane.rooms.effects import Effect, Refusal
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey
from dsv4ctl.controlplane.tickets.hold import hold
from dsv4ctl.controlplane.tickets.ticket import Load
from dsv4ctl.controlplane.tickets.types import Consumer, Extent
from dsv4ctl.engine_adapters.agent import Agent, UnknownRoomError
from dsv4ctl.engine_adapters.reference.digests import PageDigests
from dsv4ctl.engine_adapters.reference.evidence import Witness, landed_mismatch
from dsv4ctl.engine_adapters.reference.geometry import PoolSpec
from dsv4ctl.engine_adapters.reference.inbox import Inbox
from dsv4ctl.engine_adapters.reference.landed import LandedDigests, digest_landed, folded, joined, split
from dsv4ctl.engine_adapters.reference.nixl import Transport
from dsv4ctl.engine_adapters.reference.peer import Address, Channel
from dsv4ctl.engine_adapters.reference.peer_wire import Destination, Landed, LastLanded, Manifest
from dsv4ctl.engine_adapters.reference.pools import DevicePools
from dsv4ctl.engine_adapters.reference.sequence import PageTable
from dsv4ctl.policies.integrity import Verdict

#: Seconds between two looks for notifications: while some come, at most while rooms wait, and while none does.
_BUSY, _QUIET, _IDLE = 0.001, 0.004, 0.1
#: Threads that compare digests.
_WORKERS = 2
_OVER = (UnknownRoomError, Refusal)
_decoder: msgspec.msgpack.Decoder[Landed] = msgspec.msgpack.Decoder(Landed)


@dataclass(eq=False, slots=True)
class _Room:
    key: RoomKey
    peers: tuple[str, ...]
    destination: Destination
    load: Load
    address: Address
    verdict: Verdict
    observe: bool
    exposed: bool = False
    landed: dict[str, set[int]] = field(default_factory=dict)  #: logical pages in place, by writer
    manifests: dict[str, Manifest] = field(default_factory=dict)

    def whole(self, peer: str) -> bool:
        return peer in self.manifests and len(self.landed[peer]) == len(self.destination.full)


class Receiver:
    """`expect` comes from the step thread, all else runs on the loop after `bind`.

    `ready`: a room may decode. `vouched`, of one with a verdict before its output: what landed is what was sealed.
    """

    def __init__(
        self,
        pools: DevicePools,
        agent: Agent,
        inbox: Inbox,
        ready: Callable[[RoomKey, Manifest], None],
        vouched: Callable[[RoomKey], None],
        witness: Witness,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._pools = pools
        self._agent = agent
        self._inbox = inbox
        self._ready = ready
        self._vouched = vouched
        self._witness = witness
        self._rooms: dict[RoomKey, _Room] = {}
        self._channels: dict[Address, Channel] = {}

    def bind(self, transport: Transport, dial: Callable[[Address, tuple[str, ...]], None], tasks: TaskGroup) -> None:
        """What exists only once the loop runs. `dial` connects to an address for the sake of these incarnations."""
        self._transport, self._dial, self._tasks = transport, dial, tasks
        self._woken = anyio.Event()
        self._workers = anyio.CapacityLimiter(_WORKERS)

    # ---- from the step thread ------------------------------------------------------------------------

    def expect(
        self,
        opening: OpenRoom,
        table: PageTable,
        prompt_tokens: int,
        load: Load,
        address: Address,
        verdict: Verdict,
        observe: bool = False,
    ) -> None:
        """Thread-safe; returns at once. Asks the prefill rank at `address` to write the room's prompt here.

        `table` (copied) has every full page of the prompt, the window's swa pages and the state slot, and may have
        pages beyond; `load` is the open `transfer` load over exactly the prompt's, with `verify` if the `verdict` comes
        before the first read. `observe`: a mismatch is only counted and reported. The load is ended here once the
        room may decode; on an abort whoever frees the pages ends it (if `load.open`), inside the agent's
        `release`.
        """
        pages = self._pools.geometry.pages_for(prompt_tokens)
        swa = {logical: page for logical, page in table.swa.items() if logical < pages}
        destination = Destination(opening.key, table.full[:pages], swa, table.state, prompt_tokens)
        room = _Room(opening.key, opening.peers, destination, load, address, verdict, observe)
        self._inbox.put(lambda: self._expect(room))

    # ---- on the loop ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Takes in notifications, often while rooms wait for them."""
        pause = _BUSY
        while True:
            found = self._transport.notifications()
            for writer, payload in found:
                self.notified(writer, payload)
            pause = _BUSY if found else min(1.2 * pause, _QUIET)
            self._woken = anyio.Event()
            with anyio.move_on_after(pause if self._rooms else _IDLE):
                await self._woken.wait()

    def up(self, channel: Channel, address: Address) -> None:
        """A prefill rank is reachable (again): every room that waits for it tells its pages (again)."""
        self._channels[address] = channel
        for room in [room for room in self._rooms.values() if room.address == address]:
            self._tell(room, channel)

    def down(self, channel: Channel, address: Address) -> None:
        if self._channels.get(address) is channel:
            del self._channels[address]

    def refused(self, address: Address, reason: str) -> None:
        """The rank at `address` does not fit: nothing can come from it."""
        for room in [room for room in self._rooms.values() if room.address == address]:
            self._fail(room, f"{address[0]}:{address[1]} refused: {reason}")

    def waits_for(self, address: Address) -> bool:
        return any(room.address == address for room in self._rooms.values())

    def dropped(self, key: RoomKey) -> None:
        self._rooms.pop(key, None)

    def fenced(self, incarnation: str) -> None:
        """What that process has not written it never will."""
        for room in [room for room in self._rooms.values() if incarnation in room.peers]:
            self.dropped(room.key)

    def notified(self, writer: str, payload: bytes) -> None:
        """One notification of `writer` (an incarnation). What nobody waits for is counted, and changes nothing."""
        try:
            landed = _decoder.decode(payload)
        except msgspec.DecodeError:
            self.counters["bad_notifications"] += 1
            return
        room = self._rooms.get(landed.key)
        trace = self._agent.gate.trace
        if room is None:
            trace.record("received", landed.key, writer, note="late")
            self.counters["late_notifications"] += 1
            return
        if landed.incarnation != writer or writer not in room.peers:
            self.counters["foreign_notifications"] += 1
            return
        trace.record("received", landed.key, writer, note=f"chunk {landed.logical}")
        room.landed.setdefault(writer, set()).add(landed.logical)
        if isinstance(landed, LastLanded):
            room.manifests[writer] = landed.manifest
            problem = _misfit(landed.manifest, room.destination)
            if problem is None and room.verdict is not Verdict.NONE:
                problem = _undigested(landed.manifest, self._pools.specs)
            if problem is not None:
                self._fail(room, problem)
                return
        if room.whole(writer):
            self._whole(room, writer)

    # ---- one room ------------------------------------------------------------------------------------

    def _expect(self, room: _Room) -> None:
        self._rooms[room.key] = room
        host, port = room.address
        if not (host and 0 < port < 65536):
            self._fail(room, f"no prefill rank at {host!r} port {port}: a host and a port of 1 to 65535 expected")
            return
        channel = self._channels.get(room.address)
        if channel is None:
            self._dial(room.address, room.peers)
        else:
            self._tell(room, channel)

    def _tell(self, room: _Room, channel: Channel) -> None:
        """The room exposes its pages, then the peer learns where they are."""
        incarnation = channel.peer.incarnation
        if incarnation not in room.peers:
            self._fail(room, f"the prefill rank is {incarnation}, the room was opened with {', '.join(room.peers)}")
            return
        try:
            if not room.exposed:
                self._agent.apply(room.key, Reader.expose)
                room.exposed = True
        except _OVER:
            self.dropped(room.key)
            return
        self._agent.gate.trace.record("sent", room.key, incarnation, note="destination")
        channel.send(room.destination)
        self._woken.set()

    def _whole(self, room: _Room, writer: str) -> None:
        """Every byte of `writer` is in place. The load lands when this is true of all writers."""
        last = all(room.whole(peer) for peer in room.peers)
        self._agent.gate.trace.record("received", room.key, writer, note="landed")

        def landed(reader: Reader) -> list[Effect]:
            if last and room.load.open:
                self._agent.gate.layer_landed(room.load, self._agent.gate.layers)
            return reader.landed(writer)

        manifest = room.manifests[writer]
        self._agent.note(
            room.key,
            prompt_tokens=manifest.prompt_tokens,
            cached_tokens=manifest.cached_tokens,
            host_tokens=manifest.host_tokens,
        )
        try:
            self._agent.apply(room.key, landed)
        except _OVER:
            self.dropped(room.key)
            return
        if last and self._rooms.pop(room.key, None) is not None:
            self._tasks.start_soon(self._finish, room, manifest, name=f"verify {room.key}")

    async def _finish(self, room: _Room, manifest: Manifest) -> None:
        try:
            if room.verdict is Verdict.BEFORE_OUTPUT:
                await self._decode_first(room, manifest)
            elif room.verdict is Verdict.NONE or await self._compare(room):
                self._agent.apply(room.key, lambda reader: self._verified(room, reader))
                self._ready(room.key, manifest)
        except _OVER:
            self.counters["late_verdicts"] += 1
        except Exception as error:  # noqa: BLE001 - whatever fails one room, a bug too, ends that room alone
            self._fail(room, repr(error))

    async def _compare(self, room: _Room) -> bool:
        """Whether the room may go on."""
        async with self._reading(room, room.load.extents):
            before = await self._digested(room, tail=False)
            tail = await self._digested(room, tail=True)
        return self._judge(room, joined(before, tail))

    async def _decode_first(self, room: _Room, manifest: Manifest) -> None:
        """Digests what decode will write on in, lets it begin, and compares the rest meanwhile."""
        sealed, written = split(room.load.extents, room.destination)
        async with self._reading(room, written):
            tail = await self._digested(room, tail=True)
        async with self._reading(room, sealed):
            self._agent.apply(room.key, lambda reader: self._unverified(room, reader))
            self._ready(room.key, manifest)
            before = await self._digested(room, tail=False)
        if self._judge(room, joined(before, tail)):
            self._agent.apply(room.key, Reader.verified)
            self._vouched(room.key)

    @asynccontextmanager
    async def _reading(self, room: _Room, extents: Sequence[Extent]) -> AsyncIterator[None]:
        """The checksum's ticket on pages that have landed: granted already, or revoked."""
        if not extents:
            yield
            return
        async with hold(self._agent.gate, Consumer.CHECKSUM, extents, room=room.key) as held:
            await held.granted()
            yield

    async def _digested(self, room: _Room, *, tail: bool) -> LandedDigests:
        digest = partial(digest_landed, self._pools, room.destination, tail=tail)
        return await anyio.to_thread.run_sync(digest, limiter=self._workers)

    def _judge(self, room: _Room, landed: LandedDigests) -> bool:
        """Whether it is what every writer sealed; if not, the room is aborted (or, with the guard off, goes on)."""
        found, differing, compared = folded(landed), list[tuple[str, int]](), 0
        for writer, manifest in room.manifests.items():
            sealed = PageDigests.from_builtins(manifest.digests)
            compared += sum(len(values) for pool, values in found.values.items() if pool in sealed.values)
            different = found.differences(sealed)
            if different:
                differing += different
                what = landed_mismatch(landed, writer, sealed, different, self._pools.specs)
                self._witness.mismatch(str(room.key), what)
        self._agent.counters["digests_compared"] += compared
        pools = sorted({pool for pool, _ in differing})
        self._agent.note(room.key, digests_compared=compared, digest_mismatches=pools)
        if not differing:
            return True
        self._agent.counters["digest_mismatches"] += len(differing)
        if room.observe:
            return True
        why = _describe(differing, self._pools.specs)

        def failed(reader: Reader) -> list[Effect]:
            if room.load.open:
                self._agent.gate.fail_load(room.load, why)
            return reader.abort(AbortSource.INTEGRITY, why)

        self._agent.apply(room.key, failed)
        return False

    def _unverified(self, room: _Room, reader: Reader) -> list[Effect]:
        """Under the agent's lock, as `_verified`."""
        if not reader.live:
            raise Refusal(f"room {room.key} is {reader.state.value}")
        self._agent.gate.end_load(room.load)
        return []

    def _verified(self, room: _Room, reader: Reader) -> list[Effect]:
        """Under the agent's lock: an abort comes before it, or after it, and the load is ended once."""
        effects = reader.verified()
        if room.load.verify:
            self._agent.gate.layer_verified(room.load, self._agent.gate.layers)
        self._agent.gate.end_load(room.load)
        return effects

    def _fail(self, room: _Room, why: str) -> None:
        self.counters["failed_rooms"] += 1
        self._agent.abort(room.key, AbortSource.ENGINE_FAULT, f"receiver: {why}")
        self.dropped(room.key)


def _misfit(manifest: Manifest, destination: Destination) -> str | None:
    """Why the manifest is not of the prompt that was asked for, or None."""
    for what, theirs, ours in (
        ("prompt tokens", manifest.prompt_tokens, destination.prompt_tokens),
        ("pages", manifest.chunks, len(destination.full)),
    ):
        if theirs != ours:
            return f"{theirs} {what} were sent, {ours} were expected"
    return None


def _undigested(manifest: Manifest, specs: Mapping[str, PoolSpec]) -> str | None:
    """Which pools nothing could be compared with, or None."""
    lacking = [name for name, spec in specs.items() if len(manifest.digests.get(name, ())) != len(spec.model_layers)]
    return f"no digests of {', '.join(lacking)} were sent" if lacking else None


def _describe(differing: list[tuple[str, int]], specs: dict[str, PoolSpec]) -> str:
    by_pool: dict[str, list[int]] = {}
    for pool, local in differing:
        by_pool.setdefault(pool, []).append(specs[pool].model_layers[local])
    named = (f"{pool} layers {','.join(map(str, sorted(layers)))}" for pool, layers in sorted(by_pool.items()))
    return f"digest mismatch in {'; '.join(named)}"
