"""One rank of the reference engine: its threads, and what its agent and its HTTP server ask of it."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from dsv4ctl.controlplane.link.client import LinkClient
from dsv4ctl.controlplane.link.codec import FrameError
from dsv4ctl.controlplane.link.wire import (
    WIRE_VERSION,
    Fenced,
    Geometry,
    Hello,
    LoopStatus,
    OpenRoom,
    PoolGeometry,
    Progress,
    Role,
    ToRank,
)
from dsv4ctl.controlplane.rooms.effects import Refusal
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey
from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.types import Consumer, Guard, SpaceSpec
from dsv4ctl.controlplane.trace.ring import Ring
from dsv4ctl.engine_adapters.agent import Agent, UnknownRoomError
from dsv4ctl.engine_adapters.protocol import LaunchRequest
from dsv4ctl.engine_adapters.reference.cache import HOST, Node, PrefixCache
from dsv4ctl.engine_adapters.reference.decode import Decode
from dsv4ctl.engine_adapters.reference.geometry import Geometry as ModelGeometry
from dsv4ctl.engine_adapters.reference.geometry import pool_specs
from dsv4ctl.engine_adapters.reference.hicache import HiCache, paced_gbps
from dsv4ctl.engine_adapters.reference.log import Log
from dsv4ctl.engine_adapters.reference.model import Model
from dsv4ctl.engine_adapters.reference.options import EngineOptions
from dsv4ctl.engine_adapters.reference.oracle import layer_seconds
from dsv4ctl.engine_adapters.reference.peer_wire import Manifest
from dsv4ctl.engine_adapters.reference.pools import DevicePools, HostPools
from dsv4ctl.engine_adapters.reference.prefill import Prefill
from dsv4ctl.engine_adapters.reference.requests import BusyError, Request, RequestRefusedError
from dsv4ctl.engine_adapters.reference.sequences import Sequence
from dsv4ctl.engine_adapters.reference.step import StepLoop
from dsv4ctl.engine_adapters.reference.transfer import Transfer
from dsv4ctl.policies.registry import load as load_policy

_START_SECONDS = 30.0

#: Where in this engine each consumer reads: the registry that a report of a read names.
CONSUMERS = {
    Consumer.ATTENTION: "model.Model._attention: swa_kv, c4_kv, c128_kv",
    Consumer.INDEXER: "model.Model._choose: index_k",
    Consumer.COMPRESSOR: "compressor: c4_state, index_state, c128_state",
    Consumer.SENDER: "sender.Sender: NIXL reads device pages",
    Consumer.BACKUP: "hicache.HiCache._back_up: device pages",
    Consumer.LOAD: "hicache.HiCache._load_all: host pages",
    Consumer.CHECKSUM: "receiver.Receiver: landed pages",
}


class Engine:
    """`end` is called, from any thread, when the rank must not go on (a dead thread, a lost link)."""

    def __init__(self, launch: LaunchRequest, options: EngineOptions, log: Log, end: Callable[[str], None]) -> None:
        self._launch = launch
        self._options = options
        self.h2d_gbps: float | None = None
        self._log = log
        self._end = end
        self._fault: str | None = None
        self._live: dict[RoomKey, Sequence] = {}
        self._openings: dict[RoomKey, OpenRoom] = {}
        self._loops: dict[str, LoopStatus] = {}
        self._role = Role(options.role)
        reference = options.reference
        self.geometry = ModelGeometry(index_k_dtype=reference.index_k_dtype, context_tokens=reference.context_tokens)
        pages = {"full": reference.device_pages, "swa": reference.device_pages, "state": reference.state_slots}
        host_pages = dict.fromkeys(pages, options.hicache.pages) if self._has_hicache else {}
        self._pages = {**pages, **{HOST + space: count for space, count in host_pages.items()}}
        self._pools = DevicePools(self.geometry, pages, reference.device)
        self._model = Model(self.geometry, reference.seed)
        self.gate = self._make_gate(launch)
        self._link = LinkClient(launch.link, self._on_frame, self._on_bad_frame, self._link_lost)
        self._agent = Agent(self._role, launch.incarnation, self.gate, self, self._link.send, time.monotonic)
        self._transfer = self._make_transfer()
        self._cache = PrefixCache(self.gate, self.geometry.page_tokens)
        self._hicache = self._make_hicache(host_pages) if host_pages else None
        self._loop = self._make_loop()
        self._thread = threading.Thread(target=self._run_loop, name="step", daemon=True)

    # ---- parts ---------------------------------------------------------------------------------------

    @property
    def _has_hicache(self) -> bool:
        return self._options.hicache.enabled and self._role is not Role.DECODE

    def _make_gate(self, launch: LaunchRequest) -> Gate:
        specs = pool_specs(self.geometry)
        spaces = {
            space: SpaceSpec(count, tuple(n for n, spec in specs.items() if spec.space == space.removeprefix(HOST)))
            for space, count in self._pages.items()
        }
        gate = Gate(spaces, self.geometry.layers, Ring(time.monotonic_ns))
        for consumer, where in CONSUMERS.items():
            gate.register(consumer, where)
        gate.set_guards_off(Guard(name) for name in launch.unsafe_off)
        return gate

    def _make_transfer(self) -> Transfer | None:
        if self._role is Role.SINGLE:
            return None
        return Transfer(
            self._role,
            self._options.name,
            self._launch.rank,
            self._launch.incarnation,
            self.link_geometry(),
            self._pools,
            self._agent,
            ready=self._ready,
            died=lambda why: self._died("transfer", why),
            log=self._log,
            host=self._options.host,
            port=self._options.bootstrap_port,
        )

    def _make_hicache(self, host_pages: dict[str, int]) -> HiCache:
        gbps = self._options.hicache.h2d_gbps
        if gbps is None:
            gbps = paced_gbps(self.geometry, layer_seconds(self._model))
        self.h2d_gbps = gbps
        return HiCache(
            self.gate,
            self._pools,
            HostPools(self.geometry, host_pages),
            gbps=gbps,
            verify=load_policy("integrity", self._launch.integrity)().compares_digests(),
            counters=self._count,
            died=lambda name, error: self._died(name, repr(error)),
        )

    def _make_loop(self) -> StepLoop:
        prefill = decode = None
        if self._role is not Role.DECODE:
            prefill = Prefill(
                self._agent,
                self._pools,
                self._cache,
                self._hicache,
                load_policy("hicache", "write-through")(
                    load_threshold_pages=self._options.hicache.load_threshold_pages
                ),
                None if self._transfer is None else self._transfer.sender,
                self._load_failed,
            )
        if self._role is not Role.PREFILL:
            inbox = None if self._transfer is None else self._transfer.receiver
            decode = Decode(self._agent, self._pools, inbox)
        return StepLoop(self._agent, self._model, prefill, decode, self._hicache, self._options.reference.max_batch)

    def link_geometry(self) -> Geometry:
        pools = tuple(
            PoolGeometry(spec.name, spec.space, spec.span, spec.page_bytes, spec.model_layers)
            for spec in pool_specs(self.geometry).values()
        )
        return Geometry(
            page_tokens=self.geometry.page_tokens,
            layers=self.geometry.layers,
            index_k_dtype=self.geometry.index_k_dtype,
            context_tokens=self.geometry.context_tokens,
            pools=pools,
            pages=self._pages,
            model=f"reference seed {self._options.reference.seed}",
        )

    # ---- life ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the threads. Raises what their start raises."""
        if self._hicache is not None:
            self._hicache.start()
        if self._transfer is not None:
            self._transfer.start(_START_SECONDS)
        self._thread.start()

    def connect(self, url: str) -> float:
        """Greets the control plane, which may send rooms from here on. Returns the progress interval, seconds.

        Raises LinkRefusedError, OSError.
        """
        hello = Hello(
            wire=WIRE_VERSION,
            engine=self._options.name,
            role=self._role,
            rank=self._launch.rank,
            ranks=self._options.ranks,
            incarnation=self._launch.incarnation,
            pid=os.getpid(),
            url=url,
            bootstrap_port=0 if self._transfer is None else self._transfer.bootstrap_port,
            geometry=self.link_geometry(),
        )
        welcome = self._link.connect(hello, _START_SECONDS)
        self._link.start()
        return welcome.progress_interval

    def tick(self) -> None:
        """A few times a second: deadlines, and a progress report."""
        self._agent.tick()
        alive = {"step": LoopStatus(self._loop.steps)}
        self._link.send(
            Progress(
                steps=self._loop.steps,
                work=self._loop.work(),
                queues=self._loop.queues(),
                ledger=self._agent.ledger_counts(),
                loops=alive | self._loops,
                counters=self._counters(),
            )
        )

    def _counters(self) -> dict[str, int]:
        transfer = {} if self._transfer is None else self._transfer.counters()
        violations = {f"violation: {edge}": count for edge, count in self.gate.violations.items()}
        return {**self._agent.counters, **transfer, **violations}

    def _run_loop(self) -> None:
        try:
            self._loop.run()
        except BaseException:
            self._died("step", traceback.format_exc())
            raise

    def _died(self, name: str, why: str) -> None:
        """A thread of the engine is gone: say so, then stop serving (S8)."""
        self._fault = f"the {name} thread died: {why.strip().splitlines()[-1] if why.strip() else why}"
        self._loops[name] = LoopStatus(self._loop.steps, self._fault)
        self._log("loop.died", "error", loop=name, error=why)
        self.tick()
        self._end(self._fault)

    # ---- the link ------------------------------------------------------------------------------------

    def _on_frame(self, frame: ToRank) -> None:
        if isinstance(frame, Fenced) and self._transfer is not None:
            self._transfer.fenced(frame.incarnation)
        self._agent.handle(frame)

    def _on_bad_frame(self, error: FrameError) -> None:
        self._count("bad_frames", 1)
        self._log("link.bad_frame", "warning", error=str(error))

    def _link_lost(self, why: str) -> None:
        self._log("link.lost", "warning", error=why)
        self._end(f"link lost: {why}")

    def _count(self, name: str, number: int) -> None:
        self._agent.counters[name] += number

    # ---- Hooks ---------------------------------------------------------------------------------------

    def opened(self, opening: OpenRoom) -> None:
        self._openings[opening.key] = opening
        if self._transfer is not None:
            self._transfer.opened(opening)

    def dropped(self, key: RoomKey, source: AbortSource, reason: str) -> None:
        if self._transfer is not None:
            self._transfer.dropped(key)
        sequence = self._live.get(key)
        if sequence is not None:
            sequence.finish("abort", reason, source)
            self._loop.drop(sequence)
            if not self.gate.guarded(Guard.QUIESCE):
                self._loop.post(lambda: self._free_unquiesced(sequence))

    def tell_peer(self, key: RoomKey, peer: str, source: AbortSource, reason: str) -> None:
        if self._transfer is not None:
            self._transfer.tell_peer(key, peer, source, reason)

    def ack_peer(self, key: RoomKey, peer: str, outcome: Quiet) -> None:
        if self._transfer is not None:
            self._transfer.ack_peer(key, peer, outcome)

    def release(self, key: RoomKey) -> None:
        self._openings.pop(key, None)
        sequence = self._live.pop(key, None)
        if sequence is None:
            return
        if sequence.freed and sequence.unquiesced:
            self.gate.violations["pages reused before the writer was quiet"] += 1
        sequence.release()
        self._unpin(sequence)

    def quarantine(self, key: RoomKey) -> dict[str, int]:
        sequence = self._live.get(key)
        if sequence is None:
            return {}
        sequence.free_pages()
        if sequence.transfer is not None and sequence.transfer.open:
            self.gate.quarantine(sequence.transfer)
        return {space: len(pages) for space, pages in sequence.owned.items()}

    def query(self, what: str) -> Any:
        if what == "stacks":
            return _stacks()
        if what == "trace":
            return [[str(field) for field in event] for event in self.gate.trace.events()]
        if what == "flush":
            try:
                self.flush()
            except BusyError as error:
                raise ValueError(str(error)) from error
            return "flushed"
        raise ValueError(f"unknown query {what!r}: tickets, rooms, stacks, trace or flush expected")

    def _free_unquiesced(self, sequence: Sequence) -> None:
        """Guard `quiesce` is off: what an engine does that frees an aborted room's pages at once."""
        if sequence.key in self._live and not sequence.freed:
            sequence.unquiesced = True
            sequence.release()

    def _unpin(self, sequence: Sequence) -> None:
        path, sequence.path = sequence.path, []
        if path:
            self._loop.post(lambda: self._cache.unpin(path))

    def _load_failed(self, nodes: tuple[Node, ...], why: str) -> None:
        self._log("hicache.load_failed", "error", error=why)
        self._loop.post(lambda: self._cache.forget(nodes))

    def _ready(self, key: RoomKey, manifest: Manifest) -> None:
        sequence = self._live.get(key)
        if sequence is not None:
            self._loop.ready(sequence, manifest)

    # ---- Serving -------------------------------------------------------------------------------------

    def room_of(self, room: int | None) -> RoomKey:
        if room is None:
            raise RequestRefusedError("bootstrap_room is missing: requests come through the gateway, which opens rooms")
        key = self._agent.current(room)
        if key is None:
            raise RequestRefusedError(f"bootstrap_room {room} is not open here: the gateway opens rooms, not clients")
        return key

    def submit(self, request: Request) -> None:
        self._check_size(request)

        def enter(half: Any) -> list[Any]:
            if not half.live:
                raise Refusal(f"room {request.key} is {half.state.value}")
            if request.key in self._live:
                raise RequestRefusedError(f"room {request.key} already has its request")
            opening = self._openings[request.key]
            ids = list(request.input_ids)
            self._live[request.key] = Sequence(request, opening, self.gate, ids, len(ids))
            return []

        try:
            self._agent.apply(request.key, enter)
        except (Refusal, UnknownRoomError) as error:
            raise RequestRefusedError(f"the room has ended: {error}") from error
        sequence = self._live.get(request.key)
        if sequence is not None:
            self._loop.submit(sequence)

    def _check_size(self, request: Request) -> None:
        prompt, new = len(request.input_ids), request.max_new_tokens
        limit = self.geometry.context_tokens
        if not prompt:
            raise RequestRefusedError("the prompt is empty: at least one token expected")
        if prompt + new > limit:
            raise RequestRefusedError(
                f"the prompt's {prompt} tokens and max_new_tokens {new} exceed the context of {limit} tokens"
            )
        pages = self.geometry.pages_for(prompt + new)
        if pages > self._pages["full"]:
            have = self._pages["full"]
            raise RequestRefusedError(f"{prompt + new} tokens need {pages} pages, this engine has {have}")

    def abort(self, rid: str | None, reason: str) -> int:
        chosen = [s for s in list(self._live.values()) if rid is None or s.request.rid.startswith(rid)]
        for sequence in chosen:
            self._agent.abort(sequence.key, AbortSource.CLIENT, reason)
        return len(chosen)

    def flush(self) -> None:
        if self._live:
            raise BusyError(f"{len(self._live)} requests are alive: flush_cache needs an idle engine")
        self._loop.post(self._cache.clear)

    def info(self) -> dict[str, Any]:
        return {
            "engine": self._options.name,
            "role": self._role.value,
            "incarnation": self._launch.incarnation,
            "queues": self._loop.queues(),
            "steps": self._loop.steps,
            "pages": self.gate.counts(),
            "tickets": self.gate.totals(),
            "counters": self._counters(),
            "index_topk": self.geometry.index_topk,
            "index_k_dtype": self.geometry.index_k_dtype,
            "h2d_gbps": self.h2d_gbps,
            "text": "gibberish: the weights are random",
        }

    def fault(self) -> str | None:
        return self._fault


def _stacks() -> dict[str, str]:
    """Every thread's stack, for the watchdog's evidence."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    }
