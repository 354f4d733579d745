"""One scheduler process under the control plane: its ledger, its agent, its link, and the rooms it takes part in.

The scheduler's loop has no event loop: hooks call in here synchronously, and wait for nothing but locks that are held
for moments. Threads of ours run beside it: `agent` (greets, and attends while the loop takes no turn), `peers` (frames
to other ranks), `queries` (answers them), on a prefill rank `bootstrap` (frames from other ranks), and one that writes
to the link what its socket does not take at once. Whenever one wakes, the loop stands still for some hundred
microseconds: what it can do in its own turns, it does.
"""

from __future__ import annotations

import math
import os
import queue
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from dsv4ctl.controlplane.link.client import LinkClient, LinkRefusedError
from dsv4ctl.controlplane.link.codec import FrameError
from dsv4ctl.controlplane.link.url import local_url
from dsv4ctl.controlplane.link.wire import (
    WIRE_VERSION,
    Fenced,
    Hello,
    LoopStatus,
    OpenRoom,
    Progress,
    Query,
    Role,
    ToRank,
)
from dsv4ctl.controlplane.rooms.states import Cancellable
from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.types import HOST, Consumer, Guard, LoadKind
from dsv4ctl.controlplane.trace.format import Rank as TraceRank
from dsv4ctl.controlplane.trace.ring import Ring
from dsv4ctl.engine_adapters.agent import Agent
from dsv4ctl.engine_adapters.protocol import LaunchRequest
from dsv4ctl.engine_adapters.queries import answer, identity
from dsv4ctl.engine_adapters.sglang.digests import PageDigests
from dsv4ctl.engine_adapters.sglang.geometry import Pools
from dsv4ctl.engine_adapters.sglang.loads import Copies
from dsv4ctl.engine_adapters.sglang.peers import Outbox
from dsv4ctl.engine_adapters.sglang.rooms import Rooms
from dsv4ctl.kernels import ops
from dsv4ctl.policies.registry import load as load_policy

_GREET_SECONDS = 30.0
#: How often a thread looks whether the loop goes on. Each time the loop waits for the interpreter. This and an interval
#: of progress reports (0.25 s) after its last turn, what a loop that stands should hear or tell is heard and told.
_LOOK_SECONDS = 0.5

CONSUMERS = {
    Consumer.ATTENTION: "DeepSeekV4TokenToKVPool.get_extra_key_buffer, get_swa_key_buffer_radix: c4, c128, swa",
    Consumer.INDEXER: "DeepSeekV4TokenToKVPool.get_index_k_with_scale_buffer: index_k",
    Consumer.COMPRESSOR: "DeepSeekV4TokenToKVPool.get_attention_compress_states: c4_state, index_state",
    Consumer.SENDER: "NixlKVManager.transfer_worker: NIXL reads device pages",
    Consumer.BACKUP: "HybridCacheController.start_writing: device pages",
    Consumer.LOAD: "HybridCacheController.start_loading: host pages",
    Consumer.CHECKSUM: "digests: landed pages",
}


class _Process:
    """What hooks find: SGLang calls them with objects of its own only."""

    launch: LaunchRequest | None = None
    rank: Rank | None = None


def launched(request: LaunchRequest) -> None:
    """What the control plane told this process."""
    _Process.launch = request


def here() -> Rank | None:
    """The rank of this process; None while its pools are being built."""
    return _Process.rank


class Rank:
    def __init__(self, launch: LaunchRequest, scheduler: Any, number: int, ranks: int) -> None:
        self.scheduler = scheduler
        self.launch = launch
        self.role = Role(str(launch.engine["role"]))
        self.number = number
        self.ranks = ranks
        self.incarnation = (launch.incarnations or (launch.incarnation,))[self.number - launch.rank]
        self.page_tokens = int(scheduler.token_to_kv_pool_allocator.page_size)
        self.pools = Pools(scheduler.token_to_kv_pool_allocator.get_kvcache())
        self.gate = self._make_gate()
        self.copies = Copies(self.gate)
        self.reader = ops.reader(self.pools.device)  #: on the stream of the caller
        self.integrity = load_policy("integrity", launch.integrity)()
        self.digests = self._make_digests()
        self._loops: dict[str, LoopStatus] = {}
        self._hear: Callable[[], bool] = lambda: False
        self._sockets = select.epoll()  #: a look at both takes a tenth of the time that it takes to read nothing
        self._more = False  #: of what was heard, some may be left
        self._attending = threading.Lock()
        self._interval, self._due = 0.0, math.inf  #: of progress reports
        self._turned = 0.0  #: when the loop attended last
        self._link = LinkClient(launch.link, self._on_frame, self._on_bad_frame, self._link_lost)
        self.rooms = Rooms(self.role, self.incarnation)
        self.agent = Agent(self.role, self.incarnation, self.gate, self.rooms, self._link.send, time.monotonic)
        self.counters = self.agent.counters
        self.outbox = Outbox(self.counters)
        self.rooms.bind(self.agent, self.outbox, self.query)
        self.thread("peers", self.outbox.run)
        self._queries: queue.SimpleQueue[Query] = queue.SimpleQueue()
        self.thread("queries", self._answer)

    # ---- parts ---------------------------------------------------------------------------------------

    def _make_gate(self) -> Gate:
        host = self._host_pages()
        spaces = self.pools.spaces(host)
        gate = Gate(spaces, self.pools.layers, Ring(time.monotonic_ns))
        for consumer, where in CONSUMERS.items():
            gate.register(consumer, where)
        gate.set_guards_off(Guard(name) for name in self.launch.unsafe_off)
        # SGLang allocates: to the ledger every page is owned, and what the forward writes was written by it.
        device = {name: spec.pages for name, spec in spaces.items() if not name.startswith(HOST)}
        gate.allocate({name: spec.pages for name, spec in spaces.items()})
        written = gate.open_load(LoadKind.FORWARD, [gate.extent(name, range(n)) for name, n in device.items()])
        gate.layer_landed(written, self.pools.layers)
        gate.end_load(written)
        return gate

    def _make_digests(self) -> PageDigests | None:
        if not self.integrity.compares_digests():
            return None
        return PageDigests(self.pools, self._host_pages())

    def _host_pages(self) -> dict[str, int]:
        controller = getattr(self.scheduler.tree_cache, "cache_controller", None)
        if controller is None:
            return {}
        entries = {str(getattr(name, "value", name)): e for name, e in controller.mem_pool_host.entry_map.items()}
        pages = {"full": ("kv", self.pools.page_tokens), "swa": ("swa", self.pools.window_page_tokens)}
        return {
            space: int(entries[entry].host_pool.size) // tokens
            for space, (entry, tokens) in pages.items()
            if entry in entries
        }

    def thread(self, name: str, body: Callable[[], None]) -> None:
        """Starts a loop of ours; its end is reported, and ends the engine (S8)."""

        def run() -> None:
            try:
                body()
                self.died(name, "it ended")
            except Exception:
                self.died(name, traceback.format_exc())
                raise

        self._loops[name] = LoopStatus(0)
        threading.Thread(target=run, name=f"dsv4ctl-{name}", daemon=True).start()

    def ran(self, name: str) -> None:
        known = self._loops[name]
        self._loops[name] = LoopStatus(known.runs + 1, known.error)

    # ---- life ----------------------------------------------------------------------------------------

    def connect(self) -> None:
        """On the thread of the loop."""
        if self.role is Role.DECODE:  # each report of a room would be a write, and wake the control plane
            self._link.gather()
        self.thread("agent", self._serve)

    def _serve(self) -> None:
        url = local_url(self.scheduler.server_args.host, self.scheduler.server_args.port)
        try:
            self._interval = self._link.connect(self._hello(url), _GREET_SECONDS).progress_interval
        except (LinkRefusedError, OSError) as error:
            return self.end(f"the control plane did not let this rank in: {error}")
        self._link.start(reads=False)
        self._sockets.register(self._link, select.EPOLLIN)
        self._due = time.monotonic()
        pause = self._interval
        while True:
            turned = self._turned
            time.sleep(pause)
            if self._turned == turned:  # and the thread is not just late: in a process that was stopped both are
                self._attend(time.monotonic())
                self.flush()
            stands = time.monotonic() - self._turned > self._interval
            pause = self._interval if stands else _LOOK_SECONDS

    def _hello(self, url: str) -> Hello:
        arguments = self.scheduler.server_args
        prefill = self.role is Role.PREFILL
        return Hello(
            wire=WIRE_VERSION,
            engine=str(self.launch.engine["name"]),
            role=self.role,
            rank=self.number,
            ranks=self.ranks,
            incarnation=self.incarnation,
            pid=os.getpid(),
            url=url,
            bootstrap_port=int(arguments.disaggregation_bootstrap_port) if prefill else 0,
            geometry=self.pools.geometry(
                str(arguments.model_path),
                int(self.scheduler.model_config.context_len),
                {space: sum(counts) for space, counts in self._page_counts().items()},
            ),
            cancellable=self._cancellable(),
            in_order=True,
        )

    def _cancellable(self) -> Cancellable:
        """Without chunks a prompt is one forward."""
        whole = self.role is not Role.DECODE and getattr(self.scheduler, "chunked_prefill_size", None) is None
        return Cancellable.PROMPT if whole else Cancellable.CHUNK

    def _page_counts(self) -> dict[str, list[int]]:
        counts: dict[str, list[int]] = {}
        for state in ("free", "owned", "retiring", "quarantined"):
            for space, number in self.gate.counts()[state].items():
                counts.setdefault(space, []).append(number)
        return counts

    def hears(self, socket: int, hear: Callable[[], bool]) -> None:
        """`hear` takes in what has arrived from other ranks at `socket`, a file, if no thread waits for that.

        True: there may be more. Otherwise `socket` says so itself.
        """
        self._hear = hear
        self._sockets.register(socket, select.EPOLLIN)

    def take_in(self) -> None:
        """What the control plane said before whatever is handled next: openings, above all."""
        with self._attending:
            self._link.take_in()

    def attend(self) -> None:
        """In the turns of the loop: hears control plane and other ranks; once in an interval ticks and reports.

        A thread of ours does it while the loop takes no turn. What it raises ends the engine.
        """
        self._turned = time.monotonic()
        self._attend(self._turned)

    def flush(self) -> None:
        """Tells the control plane what gathered: in a decode loop once in a turn, behind all that is done in it."""
        self._link.flush()

    def _attend(self, now: float) -> None:
        if not self._attending.acquire(blocking=False):
            return  # the other one does it
        try:
            due, heard = now >= self._due, {file for file, _ in self._sockets.poll(0)}
            link = self._link.fileno()
            if due or link in heard:
                self._link.take_in()
            if due or self._more or heard - {link}:
                self._more = self._hear()
            if not due:
                return
            self._due = now + self._interval
            self.agent.tick()
            self.rooms.tick()
            self.report()
            self.ran("agent")
        except Exception:
            self.died("agent", traceback.format_exc())
            raise
        finally:
            self._attending.release()

    def step(self) -> None:
        """In a turn of the scheduler's loop, where it looks for requests. A decode rank attends later in it."""
        if self.role is not Role.DECODE:
            self.attend()
        self.copies.settle()
        wrong = self.copies.checked()
        if wrong:
            self.counters["digest_mismatches"] += wrong
            self.counters["load_mismatches"] += wrong
            if self.gate.guarded(Guard.VERDICT):
                self.rooms.fail_running(f"{wrong} page digests differ after a load from the host")

    def report(self) -> None:
        queues = self._queues()
        paused = bool(getattr(self.scheduler, "_engine_paused", False))
        self._link.send(
            Progress(
                steps=int(getattr(self.scheduler, "forward_ct", 0)),
                work=0 if paused else queues["waiting"] + queues["running"],
                queues=queues,
                ledger=self.agent.ledger_counts(),
                loops=dict(self._loops),
                counters=self._counted(),
                paused=paused,
            )
        )

    def _queues(self) -> dict[str, int]:
        scheduler = self.scheduler
        running = getattr(scheduler, "running_batch", None)
        last = getattr(scheduler, "last_batch", None)
        sizes = {
            "waiting": len(scheduler.waiting_queue),
            "running": max(0 if batch is None else len(batch.reqs) for batch in (running, last)),
        }
        if self.role is Role.PREFILL:
            sizes["bootstrap"] = len(scheduler.disagg_prefill_bootstrap_queue.queue)
            sizes["inflight"] = len(scheduler.disagg_prefill_inflight_queue)
        elif self.role is Role.DECODE:
            sizes["prealloc"] = len(scheduler.disagg_decode_prealloc_queue.queue)
            sizes["transfer"] = len(scheduler.disagg_decode_transfer_queue.queue)
        return sizes

    def _counted(self) -> dict[str, int]:
        always = ("early_sends_held", "late_acks", "repeated_acks", "digest_mismatches", "digests_compared")
        return {
            **dict.fromkeys(always, 0),
            **self.copies.counters,
            "tickets": self.gate.totals()["tickets"],
            "held_pages": self.rooms.held_pages(),
            **self.counters,
            **{f"violation: {edge}": count for edge, count in dict(self.gate.violations).items()},
        }

    def died(self, name: str, why: str) -> None:
        """Tells it, once, and ends the engine."""
        known = self._loops.get(name, LoopStatus(0))
        if known.error:
            return
        last = why.strip().splitlines()[-1]
        fault = f"the {name} thread died: {last}"
        self._loops[name] = LoopStatus(known.runs, fault)
        sys.stderr.write(f"dsv4ctl: {fault}\n{why}\n")  # at once: other ranks write there, too
        try:
            self.report()
            self.flush()
        finally:
            self.end(fault)

    def end(self, why: str) -> None:
        """Stops serving: the way in which SGLang itself ends when a scheduler fails."""
        sys.stderr.write(f"dsv4ctl: this engine ends: {why}\n")
        os.kill(os.getppid(), signal.SIGQUIT)

    # ---- the link ------------------------------------------------------------------------------------

    def _on_frame(self, frame: ToRank) -> None:
        if isinstance(frame, Query):  # an answer may be long: not in a turn of the loop
            self._queries.put(frame)
            return
        self.agent.handle(self._own(frame))
        if isinstance(frame, Fenced):
            self.rooms.fenced(frame.incarnation)

    def _answer(self) -> None:
        while True:
            query = self._queries.get()
            self.agent.handle(query)

    def _own(self, frame: ToRank) -> ToRank:
        if not isinstance(frame, OpenRoom):
            return frame
        peers = own_peers(self.number, self.ranks, frame.peers)
        return frame if peers == frame.peers else msgspec.structs.replace(frame, peers=peers)

    def _on_bad_frame(self, error: FrameError) -> None:
        self.counters["bad_frames"] += 1

    def _link_lost(self, why: str) -> None:
        self.end(f"link lost: {why}")

    def query(self, what: str) -> Any:
        """Raises ValueError for what it can't answer."""
        return answer(what, self.gate, self._identity)

    def _identity(self) -> TraceRank:
        return identity(str(self.launch.engine["name"]), self.number, self.role, self.incarnation, self.gate)


def attach(scheduler: Any, number: int, ranks: int) -> Rank:
    """Makes the rank of this process, `number` of `ranks` (tensor parallel). Call it once."""
    if _Process.launch is None:
        raise RuntimeError("a scheduler runs whose process was not launched by the control plane")
    _Process.rank = Rank(_Process.launch, scheduler, number, ranks)
    return _Process.rank


def own_peers(rank: int, ranks: int, peers: tuple[str, ...]) -> tuple[str, ...]:
    """Of the other engine's ranks, those with which this rank exchanges pages (SGLang's mapping of equal parts)."""
    if len(peers) >= ranks:
        each = len(peers) // ranks
        return peers[rank * each : (rank + 1) * each]
    return peers[rank * len(peers) // ranks :][:1]
