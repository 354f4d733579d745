"""What the guards cost, measured on one engine in this process: its `[[engines]]` table comes as JSON on stdin.

Prints one JSON object.

Each figure is a ratio of medians over interleaved repeats of the same request (8 cached pages, a page of new tokens,
some decoding), as throughput: above 1 the first is faster.

* `on_to_off_landed`: guards on against tickets off, everything landed already (goal: 0.98 or more). With a guard off
  the consumer still takes its ticket and the trace still records its read, but it does not wait.
* `layers_to_whole`: the cached pages come from the host; waiting layer by layer against waiting for the whole load
  (goal: above 1).
* `ungated_to_layers`: tickets off against guards on, same loads. Its outputs are wrong: no goal.
"""

from __future__ import annotations

import gc
import itertools
import json
import queue
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from dsv4ctl.controlplane.link.wire import OpenRoom, SetGuards
from dsv4ctl.controlplane.rooms.states import RoomKey, RoomState
from dsv4ctl.controlplane.tickets.ticket import Ticket
from dsv4ctl.controlplane.tickets.types import TICKET_GUARDS, Guard
from dsv4ctl.engine_adapters.protocol import LaunchRequest
from dsv4ctl.engine_adapters.reference.engine import Engine
from dsv4ctl.engine_adapters.reference.log import Log
from dsv4ctl.engine_adapters.reference.options import EngineOptions
from dsv4ctl.engine_adapters.reference.requests import Finished, Output, Request

PREFIX_PAGES, NEW_TOKENS = 8, 4
#: Interleaved repeats: a small difference needs many.
LANDED_REPEATS, LOADING_REPEATS = 101, 31
PAGE_TOKENS, ANSWER_SECONDS = 256, 60.0
GOAL_ON_TO_OFF, GOAL_LAYERS_TO_WHOLE = 0.98, 1.0
_OFF = (*(guard.value for guard in TICKET_GUARDS), Guard.VERDICT.value)


class Bench:
    """A single engine whose caches and guards are switched between two requests."""

    def __init__(self, options: EngineOptions) -> None:
        launch = LaunchRequest(
            engine=msgspec.to_builtins(options), rank=0, incarnation="bench", group="bench", link="", unsafe_off=(),
            integrity="read", model="bench",
        )  # fmt: skip
        self.engine = Engine(launch, options, Log(), self._ended)
        self._read = self.engine.gate.read
        self._rooms = itertools.count(1)
        self._deadlines = dict.fromkeys([state.value for state in RoomState] + ["ack"], ANSWER_SECONDS)
        self.engine.start()

    def _ended(self, reason: str) -> None:
        print(f"the engine ended: {reason}", file=sys.stderr)

    def guards(self, off: tuple[str, ...]) -> None:
        self.engine._agent.handle(SetGuards(off))

    def wait_for_whole_loads(self, whole: bool) -> None:
        """Every read waits for the load's last layer, as an engine that knows no layers does."""
        gate = self.engine.gate

        def read_whole(ticket: Ticket, pool: str, layer: int, deadline: float | None = None) -> None:
            self._read(ticket, pool, gate.layers - 1, deadline)

        gate.read = read_whole if whole else self._read  # type: ignore[method-assign]

    def ask(self, ids: list[int], new_tokens: int) -> float:
        """Seconds until the last token. Raises RuntimeError if there is none."""
        key = RoomKey(next(self._rooms), 1)
        self.engine._agent.handle(OpenRoom(key, "bench", None, None, (), self._deadlines, "read"))
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        began = time.perf_counter()
        self.engine.submit(Request(str(key), key, tuple(ids), new_tokens, True, None, None, outputs.put))
        while not isinstance(last := outputs.get(timeout=ANSWER_SECONDS), Finished):
            pass
        if last.reason != "length":
            raise RuntimeError(f"the request ended early: {last.message}")
        return time.perf_counter() - began


def interleaved(run: Callable[[str], float], names: tuple[str, ...], repeats: int) -> dict[str, float]:
    """Median seconds by name; each repeat runs every one of them, in a changing order."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in names if repeat % 2 else reversed(names):
            seconds[name].append(run(name))
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    options = msgspec.convert(msgspec.json.decode(sys.stdin.buffer.read()), EngineOptions)
    dice = random.Random(0)
    prefix = _text(dice, PREFIX_PAGES * PAGE_TOKENS)
    #: Needs every device page: after it the prefix is on the host alone.
    filler = _text(dice, options.reference.device_pages * PAGE_TOKENS - 1)
    bench = Bench(options)
    bench.ask([*prefix, *_text(dice, PAGE_TOKENS - 1)], NEW_TOKENS)
    gc.disable()

    def request(variant: str, *, landed: bool) -> float:
        bench.guards(())
        bench.wait_for_whole_loads(False)
        if not landed:
            bench.ask(filler, 1)
        bench.guards(_OFF if variant == "off" else ())
        bench.wait_for_whole_loads(variant == "whole")
        # A tail of its own, shorter than a page: computed every time, and never cached.
        return bench.ask([*prefix, *_text(dice, PAGE_TOKENS - 1)], NEW_TOKENS if landed else 1)

    landed = interleaved(partial(request, landed=True), ("on", "off"), LANDED_REPEATS)
    loading = interleaved(partial(request, landed=False), ("on", "whole", "off"), LOADING_REPEATS)
    print(json.dumps(figures(landed, loading)))


def figures(landed: dict[str, float], loading: dict[str, float]) -> dict[str, Any]:
    return {
        "on_to_off_landed": round(landed["off"] / landed["on"], 4),
        "on_to_off_landed_goal": GOAL_ON_TO_OFF,
        "layers_to_whole": round(loading["whole"] / loading["on"], 4),
        "layers_to_whole_goal": GOAL_LAYERS_TO_WHOLE,
        "ungated_to_layers": round(loading["on"] / loading["off"], 4),
        "repeats": LANDED_REPEATS,
        "loading_repeats": LOADING_REPEATS,
        "median_ms": {
            **{f"landed_{name}": round(1000 * value, 3) for name, value in landed.items()},
            **{f"loading_{name}": round(1000 * value, 3) for name, value in loading.items()},
        },
    }


def _text(dice: random.Random, tokens: int) -> list[int]:
    return [dice.randrange(256) for _ in range(tokens)]


if __name__ == "__main__":
    main()
