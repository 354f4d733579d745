"""What each rank did, in order and in which step: batches, aborts, rooms that arrived or failed; and faults of one.

The plugin is `sglang_bench.ranks:register` (entry point group `sglang.srt.plugins`), inside every scheduler; RANK_LOG
names its folder. Ranks of one engine must have written the same. A file `fault.RANK` there is an order to that rank of
a decode engine.
"""

from __future__ import annotations

import json
import os
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dsv4ctl.engine_adapters.sglang.install import in_scheduler


def register() -> None:
    """Notes what a scheduler does; in any other process, and without RANK_LOG, nothing is hooked."""
    folder = os.environ.get("RANK_LOG")
    if folder is None or not in_scheduler():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    scheduler = "sglang.srt.managers.scheduler.Scheduler."
    notes = Notes(Path(folder))
    HookRegistry.register(scheduler + "run_batch", notes.batch, HookType.BEFORE)
    HookRegistry.register(scheduler + "abort_request", notes.abort, HookType.BEFORE)
    decode = "sglang.srt.disaggregation."
    HookRegistry.register(decode + "utils._apply_metadata_gate", notes.gate, HookType.BEFORE)
    HookRegistry.register(decode + "decode.DecodeTransferQueue.pop_transferred", notes.popped, HookType.AROUND)


class Notes:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None
        self._rank = -1

    def batch(self, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        rooms = [getattr(request, "bootstrap_room", None) for request in batch.reqs]
        self._write(scheduler, ["batch", str(getattr(batch.forward_mode, "name", batch.forward_mode)), rooms])

    def popped(self, stock: Any, queue: Any, *args: Any, **kwargs: Any) -> Any:
        """Rooms that every rank found landed, and those that every rank gave up."""
        before = [item.req.bootstrap_room for item in queue.queue]
        found = stock(queue, *args, **kwargs)
        landed = [request.bootstrap_room for request in found]
        there = {item.req.bootstrap_room for item in queue.queue}.union(landed)
        failed = [room for room in before if room not in there]
        if landed or failed:
            self._write(queue.scheduler, ["popped", landed, failed])
        return found

    def gate(self, polls: list[int], decode_reqs: Any, buffers: Any, *_: Any) -> None:
        """Carries out an order for this rank on the first room that has arrived here."""
        from sglang.srt.disaggregation.base import KVPoll

        order = self._folder / f"fault.{self._rank}"
        arrived = [at for at, status in enumerate(polls) if status == KVPoll.Success]
        if not arrived or not order.exists():
            return
        name = order.read_text()
        order.unlink()
        item = decode_reqs[arrived[0]]
        match name:
            case "metadata":  # the slot is another room's
                buffers.bootstrap_room[item.metadata_buffer_index, 0] = 1
            case "failed":  # what a time-out says, or a lost peer
                polls[arrived[0]] = int(KVPoll.Failed)
            case "digest":
                _flip(item.req.bootstrap_room)

    def abort(self, scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
        self._write(scheduler, ["abort", str(getattr(request, "rid", "")), bool(getattr(request, "abort_all", False))])

    def _write(self, scheduler: Any, what: list[Any]) -> None:
        if self._file is None:
            server = scheduler.server_args
            rank = getattr(getattr(scheduler, "ps", scheduler), "tp_rank", 0)
            self._rank = int(rank)
            name = f"{server.disaggregation_mode}.{server.port}.{rank}.{os.getpid()}.jsonl"
            self._file = (self._folder / name).open("a", buffering=1)
        self._file.write(json.dumps([scheduler.forward_ct, *what]) + "\n")


def _flip(number: int) -> None:
    """One bit of a page that the room landed in."""
    import torch

    from dsv4ctl.engine_adapters.sglang import rank

    here = rank.here()
    room = None if here is None else here.rooms.find(number)
    if here is not None and room is not None:
        _, buffers = next(iter(here.pools.full.values()))
        buffers[0].view(torch.uint8)[room.destination["full"][0], 7] ^= 1
        torch.cuda.synchronize()


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
