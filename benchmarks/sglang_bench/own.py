"""How long our own code keeps a scheduler's loop: each hook's time without that of the function that it hooks.

The plugin is `sglang_bench.own:register` (entry point group `sglang.srt.plugins`), which has to run before that of the
hooks; OWN_LOG names its folder. Told beside it: the time of a hook that does nothing, which is the timer's own.

Not told: hooks of bf16 index keys; what SGLang's transfer threads do for us, and waits of the loop for the interpreter
that another thread has; what the registry takes to call a hook; work of the GPU, and what waits for it there.
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
            yield target, kind, own.timed(".".join(target.split(".")[-2:]), kind, function)
        _beneath_stock(own)

    install.resolve = timed
    HookRegistry.register(parts.PARTS["requests"], own.turn, HookType.BEFORE)
    HookRegistry.register(parts.TURN, own.requests, HookType.BEFORE)
    HookRegistry.register(parts.PARTS["forward"], own.forward, HookType.BEFORE)
    HookRegistry.register(parts.PARTS["results"], own.result, HookType.BEFORE)


def _beneath_stock(own: Own) -> None:
    """What SGLang calls of ours within a hooked function, once modules that need SGLang may be imported."""
    from dsv4ctl.engine_adapters.sglang.hooks import rooms_decode, sender
    from dsv4ctl.engine_adapters.sglang.rooms import Rooms

    Rooms.trailer = own.timed("trailer", "plain", Rooms.trailer)  # type: ignore[method-assign]
    rooms_decode.with_trailer = own.timed("with_trailer", "plain", rooms_decode.with_trailer)
    sender.Chunks.queued = own.timed("Chunks.queued", "plain", sender.Chunks.queued)  # type: ignore[method-assign]


class Own:
    """Nanoseconds of turns of the loop that got requests, ran a forward or had a result: of all, and ours by hook.

    `forwards`: of so many turns; `others`: processor time of our threads, `lasted`: since when, whatever the loop did.
    """

    def __init__(self, folder: Path, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._log = parts.Log(folder)
        self._clock_ns = clock_ns
        self._counts: Counter[str] = Counter()
        self._of_turn: dict[str, list[int]] = {}  #: nanoseconds and calls, by hook
        self._worked = False
        self._forwards = 0
        self._began: int | None = None
        self._loop = 0  #: its thread
        self._port = 0
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

    def turn(self, *_: Any, **__: Any) -> None:
        """A turn begins."""
        now = self._clock_ns()
        self._loop = threading.get_ident()
        if self._began is not None:
            self._counts["lasted"] += now - self._began
            if self._worked:
                self._counts["forwards"] += self._forwards
                self._counts["turns"] += now - self._began
                for name, (spent, calls) in self._of_turn.items():
                    self._counts[f"own {name}"] += spent
                    self._counts[f"calls {name}"] += calls
        self._worked, self._forwards = False, 0
        for each in self._of_turn.values():
            each[:] = 0, 0
        self._began = now
        if self._port:
            self._log.write(self._port, lambda: {**self._counts, "others": _others()})
        self._nothing(bool)

    def requests(self, scheduler: Any, received: list[Any], *_: Any, **__: Any) -> None:
        self._port = scheduler.server_args.port
        self._worked |= bool(received)

    def forward(self, *_: Any, **__: Any) -> None:
        self._worked, self._forwards = True, 1
        self._nothing(bool)  # behind other work, as other hooks are

    def result(self, *_: Any, **__: Any) -> None:
        self._worked = True


def _others() -> int:
    """Nanoseconds that threads of ours had of a processor: proc(5), `/proc/pid/task/tid/schedstat`."""
    ours = [thread.native_id for thread in threading.enumerate() if thread.name.startswith(_THREADS)]
    files = [Path(f"/proc/self/task/{number}/schedstat") for number in ours]
    return sum(int(file.read_text().split()[0]) for file in files if file.exists())


def share(before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    """Of the two, what came between: microseconds for each forward of turns that did something, ours in all and by
    hook (how long, how often), and `share` of these turns; without the timer too: less what a hook that does nothing
    takes, for each call. `other_threads`: of all the time.

    Empty if no forward ran, or nothing of ours was timed.
    """
    more = {name: after[name] - before.get(name, 0) for name in after}
    forwards = more.get("forwards", 0)
    calls = {name.removeprefix("calls "): more[name] for name in more if name.startswith("calls ") and more[name]}
    nothing = calls.pop(_NOTHING, 0)
    if not (forwards and nothing and calls):
        return {}
    timer = more[f"own {_NOTHING}"] / nothing
    own = {name: more[f"own {name}"] for name in calls}
    whole = sum(own.values())
    net = whole - timer * sum(calls.values())
    return {
        "forwards": forwards,
        "turn_us": round(more["turns"] / forwards / 1000, 1),
        "own_us": round(whole / forwards / 1000, 1),
        "own_us_without_timer": round(net / forwards / 1000, 1),
        "timer_us_a_call": round(timer / 1000, 2),
        "own_us_and_calls_by_hook": {
            name: [round(own[name] / forwards / 1000, 2), round(calls[name] / forwards, 3)]
            for name in sorted(own, key=lambda name: -own[name])
        },
        "share": {
            "hooks": round(whole / more["turns"], 5),
            "hooks_without_timer": round(net / more["turns"], 5),
            "other_threads": round(more["others"] / more["lasted"], 5),
        },
    }
