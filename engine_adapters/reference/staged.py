"""Staged faults: what an experiment lets happen to the last rank of an engine, and to no other.

Each stands for an event of the world outside; the product's own code answers it, with its guards on or off.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import msgspec

from dsv4ctl.controlplane.link.wire import AbortAck, OpenRoom, RoomReport, ToControlPlane
from dsv4ctl.controlplane.rooms.states import ABORTS, RoomKey
from dsv4ctl.engine_adapters.reference.cache import Node
from dsv4ctl.engine_adapters.reference.hicache import BackupJob, HiCache, LoadJob, Piece
from dsv4ctl.engine_adapters.reference.nixl import Memory, Nixl, Span, Transport, Write
from dsv4ctl.engine_adapters.reference.pools import Region
from dsv4ctl.engine_adapters.reference.requests import Output, Token

#: Tokens of a struck request's answer before the rank aborts it, or believes that its link is lost.
_TOKENS = 2
#: Rounds of the ranks before the control plane hears of an abort on the struck rank. The others have got on without it
#: by then: in the first round they go on as they were, and no later than in the second all meet again, or do not.
_UNHEARD = 3
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
    """What happens to one rank. `abort(key)` and `lose_link()` are what the rank then does by itself; `rounds()` says
    how many it has begun with the others.

    `abort`: it aborts the room, and the others do not know yet. `clock`: its clock runs ahead, the room's deadlines
    pass here alone, before its load from the host begins. `link`: it believes that the control plane's link is lost,
    which still holds. `stale-byte`: a byte of its next load is wrong in the host copy.
    """

    def __init__(
        self,
        fault: Fault | None,
        abort: Callable[[RoomKey], None],
        lose_link: Callable[[], None],
        rounds: Callable[[], int],
    ) -> None:
        self._fault = fault
        self._abort = abort
        self._lose_link = lose_link
        self._rounds = rounds
        self.clock = FastClock()
        self._stale = 0  #: loads to be struck

    def opening(self, opening: OpenRoom) -> OpenRoom:
        """A room as this rank sees it."""
        match self._of(opening.request_id):
            case "clock":
                self.clock.runs_ahead(opening.key)
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
        """How this rank tells the control plane anything."""
        return _LateWords(send, self._rounds, self.clock) if self._fault is Fault.BY_REQUEST else send

    def hicache(self, *args: Any, **options: Any) -> HiCache:
        """The HiCache that this rank has."""
        match self._fault:
            case Fault.SLOW_BACKUP:
                return _SlowBackup(*args, **options)
            case Fault.SHORT_SIDECAR:
                return _ShortSidecar(*args, **options)
            case Fault.BY_REQUEST:
                return _ByRequest(self.clock, self._take_stale, *args, **options)
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


class FastClock:
    """Rooms whose deadlines pass on this rank alone. What is to land for one waits until its deadline has passed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[RoomKey, list[Callable[[], None]]] = {}

    def runs_ahead(self, key: RoomKey) -> None:
        with self._lock:
            self._waiting[key] = []

    def after(self, key: RoomKey, begin: Callable[[], None]) -> None:
        """Calls `begin` once the room is aborting here; at once for a room on the others' clock."""
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.append(begin)
                return
        begin()

    def passed(self, key: RoomKey) -> None:
        with self._lock:
            waiting = self._waiting.pop(key, [])
        for begin in waiting:
            begin()


class _LateWords:
    """The control plane is told of aborts some rounds late, in their order: whatever else is told delivers them."""

    def __init__(self, send: Callable[[ToControlPlane], None], rounds: Callable[[], int], clock: FastClock) -> None:
        self._send = send
        self._rounds = rounds
        self._clock = clock
        self._lock = threading.Lock()
        self._late: deque[tuple[int, ToControlPlane]] = deque()

    def __call__(self, frame: ToControlPlane) -> None:
        with self._lock:
            now = self._rounds()
            while self._late and self._late[0][0] <= now:
                self._send(self._late.popleft()[1])
            if isinstance(frame, AbortAck) or (isinstance(frame, RoomReport) and frame.state in ABORTS):
                self._late.append((now + _UNHEARD, frame))
                self._clock.passed(frame.key)
            else:
                self._send(frame)


class _ByRequest(HiCache):
    def __init__(self, clock: FastClock, strikes: Callable[[], bool], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._clock = clock
        self._strikes = strikes

    def load(self, jobs: Sequence[LoadJob]) -> None:
        for job in jobs:
            self._clock.after(job.room, partial(super().load, [job]))

    def _copy(self, piece: Piece, layer: int, *, released: bool) -> None:
        pool, spec = next(item for item in self._host.specs.items() if item[1].space == "full")
        first = piece.device.space == "full" and layer == spec.model_layers[0]
        if first and self._strikes():  # the host copy has landed: no backup rights it any more
            self._host.layer_bytes(pool, layer)[piece.host.pages[0], 0] ^= 255
        super()._copy(piece, layer, released=released)


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
