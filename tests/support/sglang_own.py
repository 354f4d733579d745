"""Tells our own time of hooks on SGLang's real classes. Run as a module in a subprocess: prints what was counted."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton  # noqa: F401 - before SGLang: it finds the installed one

import sglang_stubs

sglang_stubs.install()

from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver  # noqa: E402
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang_bench import own, parts  # noqa: E402

from dsv4ctl.engine_adapters.sglang import install, verify  # noqa: E402
from dsv4ctl.engine_adapters.sglang.hooks import rooms_decode, sender  # noqa: E402
from dsv4ctl.engine_adapters.sglang.releases import hooks_of  # noqa: E402
from dsv4ctl.engine_adapters.sglang.rooms import Rooms  # noqa: E402


def main(release: str, folder: str) -> None:
    own.register()
    os.environ["OWN_LOG"] = folder
    parts.WRITTEN_SECONDS = 0.0
    own.register()
    elsewhere = dict(HookRegistry._hooks)  # nobody asked, and this is no scheduler yet
    multiprocessing.parent_process = object  # type: ignore[assignment,return-value]
    own.register()
    functions = install.register(install.resolve(hooks_of(release)))
    HookRegistry.apply_hooks()
    scheduler: Any = SimpleNamespace(server_args=SimpleNamespace(port=7))
    pool: Any = SimpleNamespace(layer_transfer_counter=None)
    over = threading.Event()
    threading.Thread(target=over.wait, name="dsv4ctl-one").start()
    turns: list[dict[str, int]] = []
    for requests, forwards, results in ((0, 0, 0), (0, 1, 0), (0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 2, 1), (0, 0, 0)):
        # SGLang's own functions find too little of a scheduler.
        with suppress(AttributeError):
            SchedulerRequestReceiver.recv_requests(None)
        turns.append(parts.counted(Path(folder), 7))
        with suppress(AttributeError):
            Scheduler.process_input_requests(scheduler, [None] * requests)
        DeepSeekV4TokenToKVPool.wait_layer_transfer(pool, 0)
        for target, times in ((Scheduler.run_batch, forwards), (Scheduler.process_batch_result, results)):
            for _ in range(times):
                with suppress(AttributeError):
                    target(scheduler, None, None)
    over.set()
    timed = [hasattr(one, "__wrapped__") for one in (Rooms.trailer, rooms_decode.with_trailer, sender.Chunks.queued)]
    problems = verify.problems(functions, sys.modules)
    print(json.dumps({"elsewhere": elsewhere, "problems": problems, "turns": turns, "timed": timed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
