"""Contract checks of the plugin on SGLang's real classes. Run as a module in a subprocess: prints {check: outcome}.

Each check runs twice: with the hooks, and with hooks that find no rank and so leave everything to SGLang. It has to
hold in the first and, but for the few that need hooks to run at all, to fail in the second.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from typing import Any

import torch.distributed as dist
import triton  # noqa: F401 - before SGLang: it finds the installed one

import sglang_stubs
from sglang_contract.checks import ALONE, CHECKS, NEEDS, Check

sglang_stubs.install()
warnings.simplefilter("ignore")

from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

from dsv4ctl.engine_adapters.sglang import install, verify  # noqa: E402
from dsv4ctl.engine_adapters.sglang.releases import hooks_of  # noqa: E402
from sglang_contract import (  # noqa: E402, F401 - each notes its checks
    agreement,
    bootstrap_port,
    digests_loaded,
    digests_sent,
    life,
    loads,
    openings,
    rooms_decode,
    rooms_prefill,
    sending,
    two_ranks,
)


def main(release: str) -> None:
    hooks = hooks_of(release)
    life.FUNCTIONS.update(install.register(install.resolve(hooks)))
    HookRegistry.apply_hooks()
    placed = {hook.function for hook in hooks}
    of_two = two_ranks.outcomes(placed)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    problems = verify.problems(life.FUNCTIONS, sys.modules)
    outcomes: dict[str, Any] = {"problems": problems, "hooks": len(hooks), "checks": {}, "two ranks": of_two}
    for name, function in CHECKS.items():
        if NEEDS.get(name, hooks[0].function) not in placed:
            continue
        with_hooks = _outcome(function, True)
        without = None if name in ALONE else _outcome(function, False)
        outcomes["checks"][name] = {"with": with_hooks, "without": without}
    print(json.dumps(outcomes, default=repr))


def _outcome(function: Check, hooked: bool) -> str:
    try:
        function(hooked)
    except AssertionError:
        return f"fails: {traceback.format_exc(limit=-2)}"
    except Exception:  # noqa: BLE001 - reported
        return f"error: {traceback.format_exc()}"
    return "holds"


if __name__ == "__main__":
    main(sys.argv[1])
