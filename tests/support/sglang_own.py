"""Tells our own time of hooks on SGLang's real classes. Run as a module in a subprocess: prints what was counted."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton  # noqa: F401 - before SGLang: it finds the installed one

import sglang_stubs

sglang_stubs.install()

from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang_bench import own, parts  # noqa: E402

from dsv4ctl.engine_adapters.sglang import install, verify  # noqa: E402
from dsv4ctl.engine_adapters.sglang.releases import hooks_of  # noqa: E402


def main(release: str, folder: str) -> None:
    os.environ["OWN_LOG"] = folder
    parts.WRITTEN_SECONDS = 0.0
    own.register()
    elsewhere = dict(HookRegistry._hooks)  # this is no scheduler yet
    multiprocessing.parent_process = object  # type: ignore[assignment,return-value]
    own.register()
    functions = install.register(install.resolve(hooks_of(release)))
    HookRegistry.apply_hooks()
    scheduler: Any = SimpleNamespace(server_args=SimpleNamespace(port=7))
    pool: Any = SimpleNamespace(layer_transfer_counter=None)
    for forwards in (0, 1, 0, 1, 0):  # of a turn; SGLang's own functions find too little of a scheduler
        with suppress(AttributeError):
            Scheduler.process_input_requests(scheduler, [])
        DeepSeekV4TokenToKVPool.wait_layer_transfer(pool, 0)
        for _ in range(forwards):
            with suppress(AttributeError):
                Scheduler.run_batch(scheduler, None)
    problems = verify.problems(functions, sys.modules)
    print(json.dumps({"elsewhere": elsewhere, "problems": problems, "counted": parts.counted(Path(folder), 7)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
