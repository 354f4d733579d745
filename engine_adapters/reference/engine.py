"""One rank of the reference engine: its threads, and what its agent and its HTTP server ask of it."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dsv4ctl.controlplane.link.client import LinkClient
from dsv4ctl.controlplane.link.codec import FrameError
from dsv4ctl.controlplane.link.lasting import LastingLink
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
from dsv4ctl.controlplane.rooms.states import AbortSource, Cancellable, RoomKey
from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.types import HOST, Consumer, Guard, SpaceSpec
from dsv4ctl.controlplane.trace.format import Rank
from dsv4ctl.controlplane.trace.ring import Ring
from dsv4ctl.engine_adapters.agent import Agent
from dsv4ctl.engine_adapters.protocol import LaunchRequest
from dsv4ctl.engine_adapters.queries import answer, identity
from dsv4ctl.engine_adapters.reference.agreement import Agreement, Alone, Gloo
from dsv4ctl.engine_adapters.reference.cache import PrefixCache
from dsv4ctl.engine_adapters.reference.copies import Copies, PacedCopies, StreamCopies, paced_gbps
from dsv4ctl.engine_adapters.reference.decode import Decode
from dsv4ctl.engine_adapters.reference.evidence import Witness
from dsv4ctl.engine_adapters.reference.geometry import Geometry as ModelGeometry
from dsv4ctl.engine_adapters.reference.geometry import pool_specs
from dsv4ctl.engine_adapters.reference.hicache import HiCache
from dsv4ctl.engine_adapters.reference.log import Log
from dsv4ctl.engine_adapters.reference.model import Model
from dsv4ctl.engine_adapters.reference.options import EngineOptions
from dsv4ctl.engine_adapters.reference.oracle import layer_seconds
from dsv4ctl.engine_adapters.reference.pools import DevicePools, HostPools
from dsv4ctl.engine_adapters.reference.prefill import Prefill
from dsv4ctl.engine_adapters.reference.readiness import ReadinessWords
from dsv4ctl.engine_adapters.reference.requests import BusyError, Request
from dsv4ctl.engine_adapters.reference.rooms import Rooms
from dsv4ctl.engine_adapters.reference.staged import Fault, Staged
from dsv4ctl.engine_adapters.reference.step import StepLoop
from dsv4ctl.engine_adapters.reference.transfer import Transfer
from dsv4ctl.engine_adapters.reference.warmup import warm_up
from dsv4ctl.policies.registry import load as load_policy

_START_SECONDS = 30.0
#: For the report that a thread died to reach the control plane before the process ends.
_LAST_WORDS_SECONDS = 1.0

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

    def __init__(
        self,
        launch: LaunchRequest,
        options: EngineOptions,
        log: Log,
        end: Callable[[str], None],
        agreement: Agreement | None = None,
    ) -> None:
        self._launch = launch
        self._options = options
        self.h2d_gbps: float | None = None  #: of the paced link, on the CPU
        self._log = log
        self._end = end
        self._fault: str | None = None
        self._witness = Witness()
        self._loops: dict[str, LoopStatus] = {}
        self._role = Role(options.role)
        reference = options.reference
        last = launch.rank == options.ranks - 1
        self._staged = Staged(
            Fault(reference.fault) if reference.fault and last else None,
            abort=lambda key: self._agent.abort(key, AbortSource.ADMIN, "this rank alone was told so"),
            lose_link=lambda: self._link_lost("this rank alone sees it"),
            rounds=lambda: self._loop.rounds,
        )
        self.geometry = ModelGeometry(
            heads=max(ModelGeometry().heads, options.ranks),
            index_k_dtype=reference.index_k_dtype,
            context_tokens=reference.context_tokens,
        )
        pages = {"full": reference.device_pages, "swa": reference.device_pages, "state": reference.state_slots}
        host_pages = dict.fromkeys(pages, options.hicache.pages) if self._has_hicache else {}
        self._pages = {**pages, **{HOST + space: count for space, count in host_pages.items()}}
        self._pools = DevicePools(self.geometry, pages, reference.device)
        self._agreement = agreement or self._meet()
        self._model = Model(self.geometry, reference.seed, self._shards(), self._agreement.gather, reference.device)
        self._words = ReadinessWords(self._pools, self._count) if self._pools.device.type == "cuda" else None
        self.gate = self._make_gate(launch)
        self._link = self._make_link(launch.link)
        self._tell = self._staged.send(self._link.send)
        self._rooms = Rooms(self.geometry, self._pages, self._staged, self.query)
        self._agent = Agent(self._role, launch.incarnation, self.gate, self._rooms, self._tell, time.monotonic)
        self._transfer = self._make_transfer()
        self._hicache = self._make_hicache(host_pages) if host_pages else None
        self._loop = self._make_loop()
        self._rooms.bind(self._agent, self._transfer, self._loop)
        self._thread = threading.Thread(target=self._run_loop, name="step", daemon=True)

    # ---- parts ---------------------------------------------------------------------------------------

    @property
    def _has_hicache(self) -> bool:
        return self._options.hicache.enabled and self._role is not Role.DECODE

    def _meet(self) -> Agreement:
        """Waits for the other ranks of this launch."""
        if self._options.ranks == 1:
            return Alone()
        meeting = Path(self._launch.link).with_name(f"{self._launch.group}.meet")
        return Gloo(meeting, self._launch.rank, self._options.ranks, self._options.reference.collective_timeout)

    def _shards(self) -> range:
        each = self.geometry.heads // self._options.ranks
        return range(self._launch.rank * each, (self._launch.rank + 1) * each)

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
            ready=self._rooms.ready,
            vouched=self._rooms.vouched,
            witness=self._witness,
            died=lambda why: self._died("transfer", why),
            log=self._log,
            host=self._options.host,
            port=self._options.bootstrap_port,
            make_transport=self._staged.transport,
        )

    def _make_hicache(self, host_pages: dict[str, int]) -> HiCache:
        host = HostPools(self.geometry, host_pages, pinned=self._words is not None)
        return self._staged.hicache(
            self.gate,
            self._pools,
            host,
            self._make_copies(host),
            witness=self._witness,
            counters=self._count,
            told=self._load_ended,
            died=lambda name, error: self._died(name, repr(error)),
        )

    def _make_copies(self, host: HostPools) -> Copies:
        if self._words is not None:
            return StreamCopies(self._pools, host, self._words)
        gbps = self._options.hicache.h2d_gbps
        if gbps is None:
            gbps = paced_gbps(self.geometry, layer_seconds(self._model))
        self.h2d_gbps = gbps
        return PacedCopies(self._pools, host, gbps)

    def _make_loop(self) -> StepLoop:
        prefill = decode = None
        cache = PrefixCache(self.gate, self.geometry.page_tokens)
        if self._role is not Role.DECODE:
            prefill = Prefill(
                self._agent,
                self._pools,
                cache,
                self._hicache,
                load_policy("hicache", "write-through")(
                    load_threshold_pages=self._options.hicache.load_threshold_pages
                ),
                None if self._transfer is None else self._transfer.sender,
                self._words,
            )
        if self._role is not Role.PREFILL:
            inbox = None if self._transfer is None else self._transfer.receiver
            decode = Decode(self._agent, self._pools, inbox)
        return StepLoop(
            self._agent,
            self._agreement,
            self._model,
            cache,
            prefill,
            decode,
            self._hicache,
            self._options.reference.max_batch,
            enter=self._rooms.enter,
            left=self._rooms.left,
        )

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
            model=f"reference seed {self._options.reference.seed} ranks {self._options.ranks}",
        )

    # ---- life ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the threads. Raises what their start raises."""
        if self._words is not None:
            warm_up(self._model)
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
            cancellable=Cancellable.CHUNK,
        )
        welcome = self._link.connect(hello, _START_SECONDS)
        self._link.start()
        return welcome.progress_interval

    def tick(self) -> None:
        """A few times a second: deadlines, and a progress report."""
        self._agent.tick()
        alive = {"step": LoopStatus(self._loop.rounds)}
        self._tell(
            Progress(
                steps=self._loop.steps,
                work=self._loop.work(),
                queues=self._loop.queues(),
                ledger=self._agent.ledger_counts(),
                loops=alive | self._loops,
                counters=self._counters(),
                paused=self._loop.paused,
            )
        )

    def _counters(self) -> dict[str, int]:
        transfer = {} if self._transfer is None else self._transfer.counters()
        violations = {f"violation: {edge}": count for edge, count in self.gate.violations.items()}
        return {**self._agent.counters, "layers_computed": self._loop.layers, **transfer, **violations}

    def _run_loop(self) -> None:
        try:
            stopped = self._loop.run()
        except BaseException:
            self._died("step", traceback.format_exc())
            raise
        if not stopped:
            self._end("a rank has lost its link")

    def _died(self, name: str, why: str) -> None:
        """A thread of the engine is gone: say so, then stop serving (S8)."""
        error = why.strip().splitlines()[-1] if why.strip() else "nobody knows of what"
        self._fault = f"the {name} thread died: {error}"
        self._loops[name] = LoopStatus(self._loop.rounds, error)
        self._log("loop.died", "error", loop=name, error=why)
        self.tick()
        self._link.finish(_LAST_WORDS_SECONDS)
        self._end(self._fault)

    # ---- the link ------------------------------------------------------------------------------------

    def _on_frame(self, frame: ToRank) -> None:
        if isinstance(frame, Fenced) and self._transfer is not None:
            self._transfer.fenced(frame.incarnation)
        self._agent.handle(self._own(frame))

    def _own(self, frame: ToRank) -> ToRank:
        """Rank i of a prefill engine writes to rank i of a decode engine, and to no other."""
        if not isinstance(frame, OpenRoom) or self._options.ranks == 1:
            return frame
        mine = slice(self._launch.rank, self._launch.rank + 1)
        return msgspec.structs.replace(frame, peers=frame.peers[mine], bootstrap_ports=frame.bootstrap_ports[mine])

    def _on_bad_frame(self, error: FrameError) -> None:
        self._count("bad_frames", 1)
        self._log("link.bad_frame", "warning", error=str(error))

    def _link_lost(self, why: str) -> None:
        self._log("link.lost", "warning", error=why)
        if self._options.ranks == 1:
            self._end(f"link lost: {why}")
        else:
            self._loop.lose_link()

    def _make_link(self, path: str) -> LinkClient | LastingLink:
        ends = (self._on_frame, self._on_bad_frame, self._link_lost)
        if self._options.survive:
            return LastingLink(path, *ends, self._orphaned, self._adopted)
        return LinkClient(path, *ends)

    def _orphaned(self, why: str) -> None:
        self._log("link.lost", "warning", error=why)
        self._agent.orphaned(f"the control plane is gone: {why}")

    def _adopted(self) -> None:
        self._agent.adopted()

    def _count(self, name: str, number: int) -> None:
        self._agent.counters[name] += number

    # ---- what is asked -------------------------------------------------------------------------------

    def query(self, what: str) -> Any:
        if what == "flush":
            try:
                self.flush()
            except BusyError as error:
                raise ValueError(str(error)) from error
            return "flushed"
        return answer(what, self.gate, self._identity, self._witness.tell)

    def _identity(self) -> Rank:
        launch = self._launch
        return identity(self._options.name, launch.rank, self._role, launch.incarnation, self.gate)

    def _load_ended(self, failed: str | None) -> None:
        if failed is not None:
            self._log("hicache.load_failed", "error", error=failed)
        self._loop.wake()

    # ---- Serving -------------------------------------------------------------------------------------

    def room_of(self, room: int | None) -> RoomKey:
        return self._rooms.room_of(room)

    def submit(self, request: Request) -> None:
        self._rooms.submit(request)

    def abort(self, rid: str | None, reason: str) -> int:
        return self._rooms.abort(rid, AbortSource.CLIENT, reason)

    def flush(self) -> None:
        if alive := len(self._rooms.live):
            raise BusyError(f"{alive} requests are alive: flush_cache needs an idle engine")
        if self._launch.rank == 0:  # the others drop theirs with it
            self._loop.flush()

    def pause_generation(self, *, abort: bool) -> None:
        self._loop.pause(True)
        if abort:
            self._rooms.abort(None, AbortSource.ADMIN, "aborted by /pause_generation")

    def continue_generation(self) -> None:
        self._loop.pause(False)

    def info(self) -> dict[str, Any]:
        return {
            "engine": self._options.name,
            "role": self._role.value,
            "incarnation": self._launch.incarnation,
            "queues": self._loop.queues(),
            "steps": self._loop.steps,
            "paused": self._loop.paused,
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
