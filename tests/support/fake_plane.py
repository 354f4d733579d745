"""A control plane without engines: what the admin API and the commands are tested against."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from anyio.streams.memory import MemoryObjectReceiveStream

from dsv4ctl.controlplane.admin.server import admin_server
from dsv4ctl.controlplane.config.schema import Config, embedded
from dsv4ctl.controlplane.telemetry.log import Telemetry

Json = dict[str, Any]

LEDGER = {"tickets": 2, "pages_leased": {"full": 5}, "pages_quarantined": {}, "pages_owned": {"full": 12}}


def engine(name: str, role: str) -> Json:
    return {
        "name": name,
        "role": role,
        "state": "ready",
        "verdict": "idle",
        "pid": 4242,
        "incarnations": [f"{name}-0-1"],
        "url": "http://127.0.0.1:31000",
        "restarts": 0,
        "queues": {"waiting": 0, "transferring": 3},
        "ledger": {"0": LEDGER},
        "loops": {},
    }


def room(number: int, state: str = "sending") -> Json:
    return {
        "key": f"{number}.1",
        "room": number,
        "generation": 1,
        "state": state,
        "request_id": f"req-{number}",
        "session": None,
        "engines": ["prefill0", "decode0"],
        "incarnations": ["prefill0-0-1", "decode0-0-1"],
        "reason": None,
        "age_s": 0.25,
        "timings": {"allocated": 0.01},
        "detail": {"bytes_by_pool": {"index_k": 16384}, "cached_tokens": 512},
    }


class FakePlane:
    """Remembers what it was asked; every answer can be set."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or embedded()
        self.telemetry = Telemetry()
        self.asked: list[tuple[Any, ...]] = []
        self.live: list[Json] = [room(7), room(8, "decoding")]
        self.left: list[str] = []
        self.paused: list[str] = []
        self.traced: list[Json] = []
        self.error: Exception | None = None
        self.followers = 0
        self.followed = anyio.Event()
        self.unfollowed = anyio.Event()

    async def status(self) -> Json:
        if self.error:
            raise self.error
        return {
            "state": "ready",
            "version": "0.1.0",
            "pid": 4241,
            "uptime_s": 187.4,
            "gateway": "http://127.0.0.1:30000",
            "engines": {"prefill0": "ready", "decode0": "ready"},
            "paused": self.paused,
            "rooms": {"sending": 1, "decoding": 1},
            "unsafe": list(self.config.unsafe.off),
            "quarantined": 0,
            "dropped_log_lines": 0,
        }

    async def engines(self) -> list[Json]:
        engines = [engine("prefill0", "prefill"), engine("decode0", "decode")]
        return [{**one, "verdict": "paused"} if one["name"] in self.paused else one for one in engines]

    async def rooms(self, room: int | None) -> list[Json]:
        if room is None:
            return self.live
        history = [{"state": "allocated", "at_s": 0.0}, {"state": "sending", "at_s": 0.0125}]
        return [{**one, "history": history} for one in self.live if one["room"] == room]

    async def tickets(self) -> list[Json]:
        ticket = {
            "consumer": "indexer",
            "room": "7.1",
            "state": "granted",
            "readable": 4,
            "layers": 6,
            "posted": False,
            "pages": {"full": [3, 4, 5, 9]},
        }
        return [
            {"engine": "prefill0", "rank": 0, "incarnation": "prefill0-0-1", "tickets": [ticket]},
            {"engine": "decode0", "rank": 0, "incarnation": "decode0-0-1", "error": "not connected"},
        ]

    async def abort(self, room: int | None, reason: str) -> Json:
        self.asked.append(("abort", room, reason))
        return {"aborted": [one["key"] for one in self.live if room in (None, one["room"])]}

    async def drain(self, engines: list[str], deadline_s: float | None) -> Json:
        self.asked.append(("drain", engines, deadline_s))
        return {"drained": engines or ["prefill0", "decode0"], "left": self.left}

    async def resume(self, engines: list[str]) -> Json:
        self.asked.append(("resume", engines))
        return {"resumed": engines}

    async def set_guards(self, off: list[str]) -> Json:
        self.asked.append(("set_guards", off))
        return {"off": off}

    async def flush(self) -> Json:
        self.asked.append(("flush",))
        return {"flushed": ["prefill0", "decode0"]}

    async def trace(self, follow: bool) -> AsyncIterator[Json]:
        self.asked.append(("trace", follow))
        for part in self.traced:
            yield part
        if follow:
            await anyio.sleep_forever()

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[MemoryObjectReceiveStream[Json]]:
        self.followers += 1
        try:
            async with self.telemetry.subscribe() as stream:
                self.followed.set()
                yield stream
        finally:
            self.followers -= 1
            self.unfollowed.set()


@asynccontextmanager
async def served(plane: FakePlane, path: Path) -> AsyncIterator[None]:
    """The plane behind the real admin server, with a bound on everything."""
    with anyio.fail_after(60):
        async with admin_server(plane, path):
            yield


@contextmanager
def served_from_thread(plane: FakePlane, path: Path) -> Iterator[BlockingPortal]:
    """The same for a test that is not async: the commands run event loops of their own."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(served(plane, path)):
        yield portal
