"""Staged faults: what an experiment lets happen to the last rank of an engine, and to no other.

Each stands for an event of the world outside; the product's own code answers it, with its guards on or off.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import msgspec

from dsv4ctl.controlplane.link.wire import AbortAck, OpenRoom, RoomReport, ToControlPlane
from dsv4ctl.controlplane.rooms.states import ABORTS, RoomKey
from dsv4ctl.engine_adapters.reference.cache import Node
from dsv4ctl.engine_adapters.reference.hicache import BackupJob, HiCache, LoadJob
from dsv4ctl.engine_adapters.reference.nixl import Memory, Nixl, Span, Transport, Write
from dsv4ctl.engine_adapters.reference.pools import Region
from dsv4ctl.engine_adapters.reference.requests import Output, Token

#: Tokens of a struck request's answer before the rank aborts it, or believes that its link is lost.
_TOKENS = 2
#: Seconds by which the control plane hears late of an abort on the struck rank: the others get on without it.
_UNHEARD = 0.5
#: A fast clock runs ahead of the others by this factor.
_AHEAD = 1e6
#: One backup in so many begins late, and so many at most at a time wait to: until a load wants what they are to copy.
_SLOW, _AT_MOST = 3, 3
#: Seconds: between two looks; that a page which left the device waits to be wanted; from then to the backup's begin.
_LOOK, _SLOWEST, _LATE = 0.002, 1.5, 0.2
#: The write of a life whose end nobody learns.
_POISONED = 60


class Fault(Enum):
    BY_REQUEST = "by-request"  #: of a request whose id ends in `!abort`, `!clock`, `!link` or `!stale-byte`
    SLOW_BACKUP = "slow-backup"  #: some copies to the host begin late
    POISON = "poison"  #: a write to a peer ends in a way that nobody knows
    SHORT_SIDECAR = "short-sidecar"  #: the host keeps index-K for half of the pages whose KV it keeps


class Staged:
    """What happens to one rank. `abort(key)` and `lose_link()` are what the rank then does by itself.

    `abort`: it aborts the room, and the others do not know yet. `clock`: its clock runs ahead, the room's deadlines
    have passed here alone. `link`: it believes that the control plane's link is lost, which still holds.
    `stale-byte`: a byte of its next load is wrong in the host copy.
    """

    def __init__(self, fault: Fault | None, abort: Callable[[RoomKey], None], lose_link: Callable[[], None]) -> None:
        self._fault = fault
        self._abort = abort
        self._lose_link = lose_link
        self._stale = 0  #: loads to be struck

    def opening(self, opening: OpenRoom) -> OpenRoom:
        """A room as this rank sees it."""
        match self._of(opening.request_id):
            case "clock":
                early = {state: seconds / _AHEAD for state, seconds in opening.deadlines.items()}
                return msgspec.structs.replace(opening, deadlines=early)
            case "stale-byte":
                self._stale += 1
        return opening

    def emit(self, key: RoomKey, request_id: str) -> Callable[[Output], None]:
        """Where the outputs of a room go on a rank that answers no client."""
        strike = {"abort": lambda: self._abort(key), "link": self._lose_link}.get(self._of(request_id))
        tokens: list[Output] = []

        def count(output: Output) -> None:
            tokens.append(output)
            if strike is not None and isinstance(output, Token) and len(tokens) == _TOKENS:
                strike()

        return count

    def send(self, send: Callable[[ToControlPlane], None]) -> Callable[[ToControlPlane], None]:
        """How this rank tells the control plane: of aborts late, in their order."""
        if self._fault is not Fault.BY_REQUEST:
            return send
        late: queue.SimpleQueue[tuple[float, ToControlPlane]] = queue.SimpleQueue()

        def deliver() -> None:
            while True:
                due, frame = late.get()
                time.sleep(max(0.0, due - time.monotonic()))
                send(frame)

        def tell(frame: ToControlPlane) -> None:
            if isinstance(frame, AbortAck) or (isinstance(frame, RoomReport) and frame.state in ABORTS):
                late.put((time.monotonic() + _UNHEARD, frame))
            else:
                send(frame)

        threading.Thread(target=deliver, name="late-words", daemon=True).start()
        return tell

    def hicache(self, *args: Any, **options: Any) -> HiCache:
        """The HiCache that this rank has."""
        match self._fault:
            case Fault.SLOW_BACKUP:
                return _SlowBackup(*args, **options)
            case Fault.SHORT_SIDECAR:
                return _ShortSidecar(*args, **options)
            case Fault.BY_REQUEST:
                return _StaleByte(self._take_stale, *args, **options)
        return HiCache(*args, **options)

    def transport(self, name: str, regions: Sequence[Region], memory: Memory) -> Transport:
        """How this rank writes to its peers."""
        return (_Poisoned if self._fault is Fault.POISON else Nixl)(name, regions, memory)

    def _of(self, request_id: str) -> str:
        return request_id.rpartition("!")[2] if self._fault is Fault.BY_REQUEST else ""

    def _take_stale(self) -> bool:
        struck = self._stale > 0
        self._stale -= struck
        return struck


class _StaleByte(HiCache):
    def __init__(self, strikes: Callable[[], bool], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._strikes = strikes

    def load(self, jobs: Sequence[LoadJob]) -> None:
        for job in jobs:
            if self._strikes():
                piece = job.pieces[-1]
                pool, spec = next(item for item in self._host.specs.items() if item[1].space == piece.device.space)
                self._host.layer_bytes(pool, spec.model_layers[0])[piece.host.pages[0], 0] ^= 255
        super().load(jobs)


class _Poisoned(Nixl):
    _writes = 0

    def write(self, remote: str, spans: Sequence[Span], notification: bytes) -> Write:
        write = super().write(remote, spans, notification)
        self._writes += 1
        if self._writes == _POISONED:
            self.abandon(write)
        return write


class _SlowBackup(HiCache):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._backed_up = self._waiting = 0
        self._wanted: set[Node] = set()

    def load(self, jobs: Sequence[LoadJob]) -> None:
        self._wanted.update(node for job in jobs for node in job.nodes)
        super().load(jobs)

    def _back_up(self, job: BackupJob) -> None:
        self._backed_up += 1
        if self._backed_up % _SLOW or self._waiting == _AT_MOST:
            super()._back_up(job)
        else:
            self._waiting += 1
            threading.Thread(target=self._late, args=(job,), name="slow-backup", daemon=True).start()

    def _late(self, job: BackupJob) -> None:
        (node,) = job.pieces[0].nodes
        while node.alive and node.device:
            time.sleep(_LOOK)
        give_up = time.monotonic() + _SLOWEST
        while node.alive and node not in self._wanted and time.monotonic() < give_up:
            time.sleep(_LOOK)
        time.sleep(_LATE)
        super()._back_up(job)
        self._waiting -= 1


class _ShortSidecar(HiCache):
    def keeps(self, space: str, page: int, pools: frozenset[str]) -> frozenset[str]:
        short = page >= self._host.pages["full"] // 2
        return pools - {"index_k"} if short else pools
