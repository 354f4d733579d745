"""Evidence of what went wrong: ranks are asked, answers are kept as files, and nobody waits for either."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from dsv4ctl.controlplane.config.schema import EvidenceConfig
from dsv4ctl.controlplane.scheduler.fleet import Rank
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.evidence import EvidenceFolder
from dsv4ctl.controlplane.telemetry.log import Telemetry

Kind = Literal["mismatch", "wedge", "fence"]
Ask = Callable[[Rank, str], Awaitable[dict[str, Any]]]
#: Files under way at most; of more at once (a storm of one cause) the first ones tell enough.
UNDER_WAY = 16


class Evidence:
    """`ask(rank, query)` does not raise; it has a deadline. `wall` is Unix seconds."""

    def __init__(
        self, config: EvidenceConfig, telemetry: Telemetry, ask: Ask, wall: Callable[[], float] = time.time
    ) -> None:
        self._folder = None if config.folder is None else EvidenceFolder(Path(config.folder), config.max_bytes)
        self._telemetry = telemetry
        self._ask = ask
        self._wall = wall
        self._numbers = itertools.count(1)
        self._under_way = 0
        self._failing = False
        self._one_at_a_time = anyio.CapacityLimiter(1)

    def take(self, tasks: TaskGroup, kind: Kind, cause: str, ranks: Iterable[Rank], about: Any, room: str = "") -> None:
        """Asks every rank for its evidence (of `room`, as `7.1`; empty: of all), in the background.

        `about`: what the control plane knows itself.
        """
        for rank in ranks:
            if self._folder is None or self._under_way >= UNDER_WAY:
                return
            self._under_way += 1
            tasks.start_soon(self._take, kind, cause, rank, about, room)

    async def _take(self, kind: Kind, cause: str, rank: Rank, about: Any, room: str) -> None:
        try:
            known = {"room": room or None, "about": about, "progress": rank.progress}
            await self.keep(kind, cause, rank, known | await self._ask(rank, f"evidence {room}".strip()))
        finally:
            self._under_way -= 1

    async def keep(self, kind: Kind, cause: str, rank: Rank, facts: dict[str, Any]) -> None:
        """Writes what was found. Whatever the disk does is said once, and hurts nobody."""
        if self._folder is None:
            return
        now = datetime.fromtimestamp(self._wall(), UTC)
        number = next(self._numbers)
        name = f"{now:%Y%m%dT%H%M%S.%fZ}-{number:06d}-{kind}-{rank.engine}-{rank.number}.json"
        body = {"kind": kind, "cause": cause, "at": now.isoformat(), **rank.fields(), **facts}
        try:
            path = await anyio.to_thread.run_sync(
                self._folder.write, name, msgspec.json.encode(body), limiter=self._one_at_a_time
            )
        except OSError as error:
            if not self._failing:  # once, until one is written again
                self._telemetry.emit(Event.EVIDENCE_FAILED, "error", kind=kind, error=str(error))
            self._failing = True
            return
        self._failing = False
        self._telemetry.emit(Event.EVIDENCE_KEPT, **rank.fields(), kind=kind, file=str(path))
