"""What each rank did, in order: batches, admissions and aborts, written by a plugin inside every scheduler.

The plugin is `sglang_bench.ranks:register` (entry point group `sglang.srt.plugins`); RANK_LOG names its folder.
Ranks of one engine must have written the same.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any


def register() -> None:
    """Notes what a scheduler does; in any other process, and without RANK_LOG, nothing is hooked."""
    folder = os.environ.get("RANK_LOG")
    scheduler_module = "sglang.srt.managers.scheduler"
    if folder is None or multiprocessing.parent_process() is None or scheduler_module not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    scheduler = scheduler_module + ".Scheduler."
    notes = Notes(Path(folder))
    HookRegistry.register(scheduler + "run_batch", notes.batch, HookType.BEFORE)
    HookRegistry.register(scheduler + "abort_request", notes.abort, HookType.BEFORE)


class Notes:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None

    def batch(self, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        rooms = [getattr(request, "bootstrap_room", None) for request in batch.reqs]
        self._write(scheduler, ["batch", str(getattr(batch.forward_mode, "name", batch.forward_mode)), rooms])

    def abort(self, scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
        self._write(scheduler, ["abort", str(getattr(request, "rid", "")), bool(getattr(request, "abort_all", False))])

    def _write(self, scheduler: Any, what: list[Any]) -> None:
        if self._file is None:
            server = scheduler.server_args
            rank = getattr(getattr(scheduler, "ps", scheduler), "tp_rank", 0)
            name = f"{server.disaggregation_mode}.{server.port}.{rank}.{os.getpid()}.jsonl"
            self._file = (self._folder / name).open("a", buffering=1)
        self._file.write(json.dumps(what) + "\n")


def divergence(folder: Path) -> dict[str, Any]:
    """By engine: entries of each rank, and the first that is not the same on all of them."""
    engines: dict[str, dict[str, list[str]]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        mode, port, rank, *_ = file.name.split(".")
        engines.setdefault(f"{mode} {port}", {})[rank] = file.read_text().splitlines()
    found: dict[str, Any] = {}
    for engine, ranks in engines.items():
        rows = list(zip_longest(*ranks.values()))
        # The end is cut at a random moment: a rank may be some entries behind when it is read.
        shortest = min(len(entries) for entries in ranks.values())
        first = next((at for at, row in enumerate(rows[:shortest]) if len(set(row)) > 1), None)
        found[engine] = {
            "entries": {rank: len(entries) for rank, entries in ranks.items()},
            "first_difference": first,
            "there": None if first is None else [str(entry)[:200] for entry in rows[first]],
        }
    return found
