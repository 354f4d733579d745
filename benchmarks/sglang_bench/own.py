"""How long our own code keeps a scheduler's loop: each hook's time without that of the function that it hooks.

The plugin is `sglang_bench.own:register` (entry point group `sglang.srt.plugins`), which has to run before that of the
hooks; OWN_LOG names its folder. To tell the time takes time: that of a hook which does nothing is taken off each call.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from dsv4ctl.engine_adapters.sglang.install import Placed, in_scheduler
from sglang_bench import parts

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
#: How the names of our threads in an engine begin.
_THREADS = ("dsv4ctl-", "link-")
#: The hook that does nothing.
_NOTHING = "nothing"


def register() -> None:
    """Counts in a scheduler; in any other process, and without OWN_LOG, nothing is hooked."""
    folder = os.environ.get("OWN_LOG")
    if folder is None or not in_scheduler():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from dsv4ctl.engine_adapters.sglang import install

    own, resolve = Own(Path(folder)), install.resolve

    def timed(hooks: Iterable[Any]) -> Iterator[Placed]:
        for target, kind, function in resolve(hooks):
            yield target, kind, own.timed(target.rpartition(".")[2], kind, function)
        _beneath_stock(own)

    install.resolve = timed
    HookRegistry.register(_SCHEDULER + "run_batch", own.forward, HookType.BEFORE)
    HookRegistry.register(_SCHEDULER + "process_input_requests", own.turn, HookType.BEFORE)


def _beneath_stock(own: Own) -> None:
    """What SGLang calls of ours within a hooked function, once modules that need SGLang may be imported."""
    from dsv4ctl.engine_adapters.sglang.hooks import rooms_decode
    from dsv4ctl.engine_adapters.sglang.rooms import Rooms

    Rooms.trailer = own.timed("trailer", "plain", Rooms.trailer)  # type: ignore[method-assign]
    rooms_decode.with_trailer = own.timed("with_trailer", "plain", rooms_decode.with_trailer)


class Own:
    """Nanoseconds of turns of the loop that ran a forward: `turns` in all, and ours by hook, the timer's own with it;
    `forwards`: how many turns; `others`: processor time of our threads, `lasted`: since when, whatever the loop did.
    """

    def __init__(self, folder: Path, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._folder = folder
        self._clock_ns = clock_ns
        self._counts: Counter[str] = Counter()
        self._of_turn: dict[str, list[int]] = {}  #: nanoseconds and calls, by hook
        self._forwards = False
        self._began: int | None = None
        self._loop = 0  #: its thread
        self._written = 0.0
        self._nothing = self.timed(_NOTHING, "around", lambda stock: stock())

    def timed(self, name: str, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A hook of this kind; one that replaces SGLang's function as it is: none of those is called in the loop."""
        if kind == "replace":
            return function
        clock_ns, spent = self._clock_ns, self._of_turn.setdefault(name, [0, 0])

        @functools.wraps(function)
        def ours(*args: Any, **kwargs: Any) -> Any:
            theirs = 0
            if kind == "around":
                stock, *rest = args

                def beneath(*args: Any, **kwargs: Any) -> Any:
                    nonlocal theirs
                    began = clock_ns()
                    try:
                        return stock(*args, **kwargs)
                    finally:
                        theirs += clock_ns() - began

                args = beneath, *rest
            began = clock_ns()
            try:
                return function(*args, **kwargs)
            finally:
                took = clock_ns() - began - theirs
                if threading.get_ident() == self._loop:
                    spent[0] += took
                    spent[1] += 1

        return ours

    def forward(self, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        self._forwards = True
        self._nothing(bool)  # behind other work, as other hooks are

    def turn(self, scheduler: Any, *_: Any, **__: Any) -> None:
        """A turn begins."""
        now = self._clock_ns()
        self._loop = threading.get_ident()
        if self._began is not None:
            self._counts["lasted"] += now - self._began
            if self._forwards:
                self._counts["forwards"] += 1
                self._counts["turns"] += now - self._began
                for name, (spent, calls) in self._of_turn.items():
                    self._counts[f"own {name}"] += spent
                    self._counts[f"calls {name}"] += calls
        self._forwards = False
        for each in self._of_turn.values():
            each[:] = 0, 0
        self._began = now
        self._nothing(bool)
        if time.monotonic() > self._written + parts.WRITTEN_SECONDS:
            self._written = time.monotonic()
            self._counts["others"] = _others()
            parts.write(self._folder, scheduler.server_args.port, self._counts)


def _others() -> int:
    """Nanoseconds that threads of ours had of a processor: proc(5), `/proc/pid/task/tid/schedstat`."""
    ours = [thread.native_id for thread in threading.enumerate() if thread.name.startswith(_THREADS)]
    files = [Path(f"/proc/self/task/{number}/schedstat") for number in ours]
    return sum(int(file.read_text().split()[0]) for file in files if file.exists())


def share(before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    """Of the two, what came between: microseconds of a turn, ours in all and by hook (how long, how often), and `share`
    of the loop's time: ours in turns with a forward, and what our threads had beside it.

    Empty if no forward ran.
    """
    more = {name: after[name] - before.get(name, 0) for name in after}
    forwards = more.get("forwards", 0)
    if not forwards:
        return {}
    calls = {name.removeprefix("calls "): more[name] for name in more if name.startswith("calls ") and more[name]}
    timer = more[f"own {_NOTHING}"] / calls.pop(_NOTHING)
    own = {name: more[f"own {name}"] - timer * number for name, number in calls.items()}
    return {
        "turns": forwards,
        "turn_us": round(more["turns"] / forwards / 1000, 1),
        "own_us": round(sum(own.values()) / forwards / 1000, 1),
        "timer_us_a_call": round(timer / 1000, 2),
        "own_us_and_calls_by_hook": {
            name: [round(own[name] / forwards / 1000, 2), round(calls[name] / forwards, 3)]
            for name in sorted(own, key=lambda name: -own[name])
        },
        "share": {
            "hooks": round(sum(own.values()) / more["turns"], 5),
            "other_threads": round(more["others"] / more["lasted"], 5),
        },
    }
