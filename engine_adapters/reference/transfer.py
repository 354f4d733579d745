"""The transfer half of a rank: one thread, one event loop, every NIXL call and every peer connection."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import anyio
import torch
from anyio.abc import SocketAttribute, TaskGroup

from dsv4ctl.controlplane.link.wire import Geometry, OpenRoom, Role
from dsv4ctl.controlplane.rooms.effects import Refusal
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.engine_adapters.agent import Agent
from dsv4ctl.engine_adapters.reference.evidence import Witness
from dsv4ctl.engine_adapters.reference.inbox import Inbox
from dsv4ctl.engine_adapters.reference.nixl import Memory, Nixl, NixlError, Transport
from dsv4ctl.engine_adapters.reference.peer import Address, Channel, answer, dial
from dsv4ctl.engine_adapters.reference.peer_wire import (
    PEER_WIRE_VERSION,
    Destination,
    Manifest,
    PeerAbort,
    PeerAck,
    PeerHello,
)
from dsv4ctl.engine_adapters.reference.pools import DevicePools, Region
from dsv4ctl.engine_adapters.reference.receiver import Receiver
from dsv4ctl.engine_adapters.reference.sender import Sender
from dsv4ctl.engine_adapters.reference.writes import Writes

Ready = Callable[[RoomKey, Manifest], None]
"""The room's prompt is here and may be read. Called on the transfer thread, as `vouched` is; must not block."""

#: Seconds that writes in flight are given when the loop is stopped.
_STOP_SECONDS = 2.0


class Log(Protocol):
    """Thread-safe; must not block."""

    def __call__(self, event: str, level: str, **fields: object) -> None: ...


class TransferError(RuntimeError):
    """The transfer half could not start, or did not stop; the message says why."""


class Transfer:
    """`sender`, `receiver` and all methods here take any thread.

    The gate is the agent's, with consumers `sender` and `checksum` registered. `died` is called (on the transfer
    thread) when the loop ended by itself.
    """

    def __init__(
        self,
        role: Role,
        engine: str,
        rank: int,
        incarnation: str,
        geometry: Geometry,
        pools: DevicePools,
        agent: Agent,
        ready: Ready,
        vouched: Callable[[RoomKey], None],
        witness: Witness,
        died: Callable[[str], None],
        log: Log,
        host: str = "127.0.0.1",
        port: int = 0,
        make_transport: Callable[[str, Sequence[Region], Memory], Transport] = Nixl,
    ) -> None:
        self.bootstrap_port = 0  #: where decode ranks connect; 0 on a decode rank and before `start`
        self.fault: str | None = None  #: why the loop died
        self._role, self._engine, self._rank, self._incarnation = role, engine, rank, incarnation
        self._geometry, self._pools, self._agent = geometry, pools, agent
        self._died, self._log = died, log
        self._host, self._port = host, port
        self._make_transport = make_transport
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="transfer", daemon=True)
        self._inbox = Inbox()
        self.sender = Sender(incarnation, pools, agent, self._inbox, witness)  #: used on a prefill rank
        self.receiver = Receiver(pools, agent, self._inbox, ready, vouched, witness)  #: used on a decode rank
        self._counters: Counter[str] = Counter()
        self._channels: dict[str, Channel] = {}  #: by the peer's incarnation
        self._dialled: set[Address] = set()
        self._sought: dict[Address, set[str]] = {}  #: decode: the incarnations that were looked for at an address
        self._writable: set[str] = set()  #: peers whose memory NIXL knows
        self._fenced: set[str] = set()
        self._unacked: dict[str, dict[RoomKey, PeerAbort]] = {}  #: decode: by writer, repeated until its ack

    def start(self, timeout: float) -> None:
        """Starts the thread and waits for NIXL and the listening socket. Raises TransferError."""
        self._thread.start()
        if not self._started.wait(timeout):
            raise TransferError(f"the transfer loop was not ready within {timeout:g} s")
        if self.fault is not None:
            raise TransferError(self.fault)

    def stop(self, timeout: float) -> None:
        """Ends the loop; writes in flight are given until then. Raises TransferError if the thread lives on."""
        self._inbox.put(self._stop)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TransferError(f"the transfer loop did not end within {timeout:g} s")

    # ---- the agent's hooks of the same names, passed on by the engine -------------------------------

    def opened(self, opening: OpenRoom) -> None:
        if self._role is Role.PREFILL:
            self._inbox.put(lambda: self.sender.opened(opening))

    def dropped(self, key: RoomKey) -> None:
        """The room is aborting: nothing more of it is posted or expected."""
        half = self.sender if self._role is Role.PREFILL else self.receiver
        self._inbox.put(lambda: half.dropped(key))

    def tell_peer(self, key: RoomKey, peer: str, source: AbortSource, reason: str) -> None:
        self._inbox.put(lambda: self._tell_peer(peer, PeerAbort(key, source, reason)))

    def ack_peer(self, key: RoomKey, peer: str, outcome: Quiet) -> None:
        self._inbox.put(lambda: self._send(peer, PeerAck(key, outcome)))

    def fenced(self, incarnation: str) -> None:
        """That process is gone: its connection, its NIXL agent and our writes to it end. Call it before the agent."""
        self._inbox.put(lambda: self._fence(incarnation))

    def counters(self) -> dict[str, int]:
        """What was counted and survived: `bad_frames`, `late_notifications`, `dropped_handles`, ..."""
        parts = (self._counters, self._writes.counters, self.sender.counters, self.receiver.counters)
        return {"dropped_handles": self._nixl.dropped, **sum(parts, Counter())}

    # ---- the thread ----------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            anyio.run(self._serve)
        except Exception as error:  # noqa: BLE001 - whatever ended the loop must be seen
            cause = _first_cause(error)
            self.fault = f"the transfer loop died: {cause}"
            self._log(Event.LOOP_DIED.value, "error", loop="transfer", error=cause)
            if self._started.is_set():
                self._died(cause)
            self._started.set()

    async def _serve(self) -> None:
        memory: Memory = "DRAM"
        if self._pools.device.type == "cuda":
            memory = "VRAM"
            torch.cuda.set_device(self._pools.device)  # this thread's context is the one that NIXL's copies need
        self._nixl = self._make_transport(self._incarnation, self._pools.regions(), memory)
        self._stopping = anyio.Event()
        try:
            async with anyio.create_task_group() as tasks:
                await self._start_tasks(tasks)
                self._started.set()
                await self._stopping.wait()
                with anyio.move_on_after(_STOP_SECONDS):
                    await self._writes.idle()
                tasks.cancel_scope.cancel()
        finally:
            self._nixl.close()

    async def _start_tasks(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._writes = Writes(self._agent, self._nixl, anyio.current_time)
        self.sender.bind(self._nixl, self._writes, tasks)
        self.receiver.bind(self._nixl, self._dial, tasks)
        tasks.start_soon(self._inbox.run, name="inbox")
        if self._role is Role.DECODE:
            tasks.start_soon(self.receiver.run, name="notifications")
            return
        tasks.start_soon(self._writes.run, name="writes")
        listener = await anyio.create_tcp_listener(local_host=self._host, local_port=self._port)
        self.bootstrap_port = listener.extra(SocketAttribute.local_port)
        tasks.start_soon(partial(listener.serve, partial(answer, events=self)), name="peer listener")

    def _stop(self) -> None:
        self._stopping.set()

    # ---- peers, on the loop --------------------------------------------------------------------------

    def hello(self) -> PeerHello:
        return PeerHello(
            PEER_WIRE_VERSION,
            self._engine,
            self._rank,
            self._incarnation,
            self._geometry,
            self._nixl.metadata,
            tuple(self._pools.regions()),
        )

    def refuse(self, peer: PeerHello) -> str | None:
        if peer.incarnation in self._fenced:
            return f"incarnation {peer.incarnation} was fenced"
        difference = self._geometry.mismatch(peer.geometry)
        return None if difference is None else f"geometry of {self._engine} against {peer.engine}: {difference}"

    def up(self, channel: Channel) -> None:
        peer = channel.peer
        before = self._channels.get(peer.incarnation)
        if before is not None:
            before.close()
        self._channels[peer.incarnation] = channel
        self._log(Event.PEER_CONNECTED.value, "info", peer=peer.engine, peer_incarnation=peer.incarnation)
        if channel.address is None:
            self._let_write(channel)
            return
        self.receiver.up(channel, channel.address)
        for frame in self._unacked.get(peer.incarnation, {}).values():
            channel.send(frame)

    def received(self, channel: Channel, frame: Destination | PeerAbort | PeerAck) -> None:
        self._inbox.drain()
        peer = channel.peer.incarnation
        try:
            match frame:
                case PeerAbort():
                    self._agent.peer_abort(frame.key, peer, frame.source, frame.reason)
                case PeerAck() if channel.address is not None:
                    self._unacked.get(peer, {}).pop(frame.key, None)
                    self._agent.peer_ack(frame.key, peer, frame.outcome)
                case Destination() if channel.address is None:
                    self.sender.destination(peer, frame)
                case _:
                    self.bad_frame(peer, f"{type(frame).__name__} to a {self._role.value} rank")
        except Refusal as refusal:
            self.bad_frame(peer, str(refusal))

    def down(self, channel: Channel) -> None:
        peer = channel.peer
        if self._channels.get(peer.incarnation) is channel:
            del self._channels[peer.incarnation]
            self._log(Event.PEER_LOST.value, "warning", peer=peer.engine, peer_incarnation=peer.incarnation)
        if channel.address is not None:
            self.receiver.down(channel, channel.address)

    def refused(self, address: Address | None, reason: str) -> None:
        self._counters["refused_peers"] += 1
        self._log(Event.PEER_REFUSED.value, "error", reason=reason)
        if address is not None:
            self.receiver.refused(address, reason)

    def bad_frame(self, incarnation: str, why: str) -> None:
        self._counters["bad_frames"] += 1
        self._log(Event.PEER_BAD_FRAME.value, "warning", peer_incarnation=incarnation, reason=why)

    def _let_write(self, channel: Channel) -> None:
        """Lets the sender write into the peer's pools."""
        peer = channel.peer
        if peer.incarnation not in self._writable:
            try:
                name = self._nixl.connect(peer.metadata)
            except NixlError as error:
                self.bad_frame(peer.incarnation, str(error))
                channel.close()
                return
            if name != peer.incarnation:
                self._nixl.disconnect(name)
                self.bad_frame(peer.incarnation, f"its NIXL agent is called {name}")
                channel.close()
                return
            self._writable.add(name)
        self.sender.connect(peer.incarnation, peer.regions)

    def _dial(self, address: Address, peers: tuple[str, ...]) -> None:
        self._sought.setdefault(address, set()).update(peers)
        if address not in self._dialled:
            self._dialled.add(address)
            self._tasks.start_soon(self._keep_dialled, address, name=f"peer {address[0]}:{address[1]}")

    async def _keep_dialled(self, address: Address) -> None:
        try:
            await dial(address, self, lambda: self._wanted(address))
        finally:
            self._dialled.discard(address)

    def _wanted(self, address: Address) -> bool:
        """A room waits for the rank at `address`, or an abort for its ack."""
        return self.receiver.waits_for(address) or any(self._unacked.get(peer) for peer in self._sought[address])

    def _tell_peer(self, peer: str, frame: PeerAbort) -> None:
        if self._role is Role.DECODE and peer not in self._fenced:
            self._unacked.setdefault(peer, {})[frame.key] = frame
        self._send(peer, frame)

    def _send(self, peer: str, frame: PeerAbort | PeerAck) -> None:
        """What can't be sent now: a decode rank repeats its aborts, and a prefill rank answers each of them."""
        channel = self._channels.get(peer)
        if channel is None:
            self._counters["unsent_frames"] += 1
        else:
            channel.send(frame)

    def _fence(self, incarnation: str) -> None:
        self._fenced.add(incarnation)
        self._unacked.pop(incarnation, None)
        for sought in self._sought.values():
            sought.discard(incarnation)
        channel = self._channels.get(incarnation)
        if channel is not None:
            channel.close()
        self._writes.fenced(incarnation)
        self.sender.fenced(incarnation)
        self.receiver.fenced(incarnation)
        if incarnation in self._writable:
            self._writable.discard(incarnation)
            self._nixl.disconnect(incarnation)


def _first_cause(error: BaseException) -> str:
    """The first leaf of an exception group, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
