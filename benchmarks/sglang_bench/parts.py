"""What a decode scheduler's main thread spends a token on, by part of its loop, in CPU time; and what it waits.

Waits for the GPU spin, and are work. Others are for a processor, or for the interpreter that another thread has. The
plugin is `sglang_bench.parts:register` (entry point group `sglang.srt.plugins`); PART_LOG names its folder. What a hook
costs is in the part that it is called in, and hooks that decode calls in a forward only look whether a load runs.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsv4ctl.engine_adapters.sglang.install import in_scheduler

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver."
PARTS = {
    "requests": _RECEIVER + "recv_requests",
    "queues": _SCHEDULER + "process_decode_queue",
    "batch": _SCHEDULER + "get_next_disagg_decode_batch_to_run",
    "forward": _SCHEDULER + "run_batch",
    "results": _SCHEDULER + "process_batch_result",
}
#: What was received is handled: in each turn, of whichever kind of engine.
TURN = _SCHEDULER + "process_input_requests"
WRITTEN_SECONDS = 1.0
#: One that waited longer was stopped: see `cores`.
_STOPPED_NS = 100_000_000


def register() -> None:
    """Counts in a scheduler; in any other process, and without PART_LOG, nothing is hooked."""
    folder = os.environ.get("PART_LOG")
    if folder is None or not in_scheduler():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    spent = Spent(Path(folder))
    for part, target in PARTS.items():
        HookRegistry.register(target, spent.on(part), HookType.AROUND)
    HookRegistry.register(PARTS["forward"], spent.forward, HookType.BEFORE)
    HookRegistry.register(TURN, spent.turn, HookType.BEFORE)
    gc.callbacks.append(spent.collection)


class Spent:
    """`tokens`, and nanoseconds by part; `turns`: of all, `collections`: whole ones of the heap, wherever they came.

    Of turns that decoded, and how many they are. `waits`: how much longer turns took than they worked, of those that
    decoded `unstopped_tokens`: in the others the process was stopped.
    """

    def __init__(
        self,
        folder: Path,
        clock_ns: Callable[[], int] = time.thread_time_ns,
        wall_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._log = Log(folder)
        self._clock_ns = clock_ns
        self._wall_ns = wall_ns
        self._counts: Counter[str] = Counter()
        self._of_turn: Counter[str] = Counter()
        self._turn: tuple[int, int] | None = None
        self._collection = 0

    def on(self, part: str) -> Callable[..., Any]:
        def timed(stock: Any, *args: Any, **kwargs: Any) -> Any:
            began = self._clock_ns()
            try:
                return stock(*args, **kwargs)
            finally:
                self._of_turn[part] += self._clock_ns() - began

        return timed

    def forward(self, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        if batch.forward_mode.is_decode():
            self._of_turn["tokens"] += len(batch.reqs)

    def turn(self, scheduler: Any, *_: Any, **__: Any) -> None:
        """A turn begins."""
        now, wall = self._clock_ns(), self._wall_ns()
        if self._turn is not None:
            worked, took = now - self._turn[0], wall - self._turn[1]
            if self._of_turn["tokens"]:
                self._of_turn["decoding_turns"] = 1
                self._of_turn["turns"] = worked
                if took - worked < _STOPPED_NS:
                    self._of_turn["waits"] = took - worked
                    self._of_turn["unstopped_tokens"] = self._of_turn["tokens"]
                self._counts.update(self._of_turn)
        self._of_turn.clear()
        self._turn = now, wall
        if scheduler.server_args.disaggregation_mode == "decode":
            self._log.write(scheduler.server_args.port, lambda: self._counts)

    def collection(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            if phase == "start":
                self._collection = self._clock_ns()
            else:
                self._of_turn["collections"] += self._clock_ns() - self._collection


class Log:
    """What a server counted so far: a file in a folder, by its port, with all of one moment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = 0.0

    def write(self, port: int, counts: Callable[[], Mapping[str, int]]) -> None:
        """Unless it was written within the last second."""
        if time.monotonic() <= self._written + WRITTEN_SECONDS:
            return
        self._written = time.monotonic()
        file = self._folder / f"{port}.json"
        part = file.with_suffix(".part")
        part.write_text(json.dumps(counts()))
        part.replace(file)


def counted(folder: Path, port: int) -> dict[str, int]:
    """So far, of the server at `port`: all of one moment, within the last second that it ran. Empty: nothing yet."""
    file = folder / f"{port}.json"
    found: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
    return found


def a_token(before: dict[str, int], after: dict[str, int]) -> dict[str, float]:
    """Microseconds for each token decoded between the two, by part; and how many a turn decoded."""

    def each(name: str, tokens: str = "tokens") -> float:
        return round(_more(before, after, name) / 1000 / _more(before, after, tokens), 2)

    if not _more(before, after, "unstopped_tokens"):
        return {}
    found = {name: each(name) for name in (*PARTS, "collections", "turns")}
    a_turn = _more(before, after, "tokens") / _more(before, after, "decoding_turns")
    return {**found, "waits": each("waits", "unstopped_tokens"), "tokens_a_turn": round(a_turn, 3)}


def _more(before: dict[str, int], after: dict[str, int], name: str) -> int:
    return after.get(name, 0) - before.get(name, 0)
