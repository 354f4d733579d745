"""One rank: connects to the control plane as the hooks do, and reports the rooms that the server says are done."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import msgspec

from dsv4ctl.controlplane.link.client import LinkClient
from dsv4ctl.controlplane.link.wire import (
    WIRE_VERSION,
    Abort,
    AbortAck,
    Geometry,
    Hello,
    LedgerCounts,
    OpenRoom,
    PoolGeometry,
    Progress,
    Received,
    Role,
    RoomReport,
    ToRank,
)
from dsv4ctl.controlplane.rooms.states import Quiet, RoomKey, RoomState
from dsv4ctl.engine_adapters.protocol import ENGINE_VARIABLE, LaunchRequest

GEOMETRY = Geometry(
    page_tokens=256,
    layers=1,
    index_k_dtype="fp8",
    context_tokens=4096,
    pools=(PoolGeometry("index_k", "full", "full", 8448, (0,)),),
    pages={"full": 64},
    model="fake",
)


class Scheduler:
    def __init__(self, rank: int) -> None:
        self._launch = msgspec.json.decode(os.environ[ENGINE_VARIABLE], type=LaunchRequest)
        self._rank = rank
        self._rooms: dict[int, RoomKey] = {}
        self._link = LinkClient(self._launch.link, self._frame, self._end, self._end)

    def run(self) -> None:
        engine = self._launch.engine
        hello = Hello(
            wire=WIRE_VERSION,
            engine=str(engine["name"]),
            role=Role(engine["role"]),
            rank=self._rank,
            ranks=len(self._launch.incarnations),
            incarnation=self._launch.incarnations[self._rank],
            pid=os.getpid(),
            url=f"http://{engine['host']}:{engine['port']}",
            bootstrap_port=int(str(engine["bootstrap_port"])) if engine["role"] == "prefill" else 0,
            geometry=GEOMETRY,
        )
        interval = self._link.connect(hello, 10.0).progress_interval
        self._link.start()
        threading.Thread(target=self._beat, args=(interval,), daemon=True).start()
        # At once, as a logging handler does: the other rank writes to the same pipe.
        sys.stdout.write(f"[2026-11-29 16:00:01 TP{self._rank}] Prefill batch, #new-seq: {self._rank}\n")
        sys.stdout.flush()
        for line in sys.stdin:
            self._done(int(line))

    def _beat(self, interval: float) -> None:
        while True:
            self._link.send(Progress(0, 0, {}, LedgerCounts(), {}))
            time.sleep(interval)

    def _done(self, room: int) -> None:
        key = self._rooms.pop(room, None)
        if key is not None:
            self._link.send(RoomReport(key, RoomState.CLOSED))

    def _frame(self, frame: ToRank) -> None:
        match frame:
            case OpenRoom():
                self._rooms[frame.key.room] = frame.key
                self._link.send(RoomReport(frame.key, RoomState.ALLOCATED))
            case Abort():
                self._rooms.pop(frame.key.room, None)
                self._link.send(Received(frame.seq))
                self._link.send(RoomReport(frame.key, RoomState.ABORTING, {"source": frame.source.value, "reason": ""}))
                self._link.send(RoomReport(frame.key, RoomState.ABORTED, {"source": frame.source.value, "reason": ""}))
                self._link.send(AbortAck(frame.key, Quiet.QUIET))
            case _:
                pass

    def _end(self, why: object) -> None:
        sys.stderr.write(f"the link ended: {why}\n")


if __name__ == "__main__":
    # A process in a session of its own, as a compiler's pool of workers is.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    Scheduler(int(sys.argv[1])).run()
