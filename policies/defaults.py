"""Every default value: what, how much, in which unit, and why. The docs take them from here."""

from __future__ import annotations

import msgspec


class Default(msgspec.Struct, frozen=True):
    """`key`: table and key of the configuration file, or the policy's argument."""

    key: str
    value: float | int | str
    unit: str
    reason: str


DEFAULTS: dict[str, Default] = {
    default.key: default
    for default in (
        Default(
            "deadlines.allocated", 120.0, "s", "the request may wait for pages behind others: queueing is no fault"
        ),
        Default(
            "deadlines.bootstrapping", 120.0, "s", "the prefill queue, and a peer's first registration of its memory"
        ),
        Default("deadlines.loading", 120.0, "s", "host loads and the prefill of a full context on the CPU"),
        Default(
            "deadlines.sending",
            120.0,
            "s",
            "a cached prefix leaves first: the rest of the prompt is computed in this state",
        ),
        Default("deadlines.landed", 30.0, "s", "comparing digests is a pass over memory, seconds on a crowded machine"),
        Default("deadlines.verified", 60.0, "s", "the room waits for a place in the decode batch"),
        Default("deadlines.decoding", 600.0, "s", "the longest answer at the embedded engine's speed"),
        Default(
            "deadlines.ack",
            5.0,
            "s",
            "a write in flight ends in milliseconds: no ack by then means unknown; with SGLang at least 5",
        ),
        Default("deadlines.fence", 5.0, "s", "a killed process is reaped in milliseconds, a large one in seconds"),
        Default("deadlines.drain", 30.0, "s", "one budget for everything, below the usual kill delay of a manager"),
        Default("deadlines.ready", 90.0, "s", "engine start to its first frame: imports, weights, registration"),
        Default("deadlines.wedge", 8.0, "s", "the verdict must stand in under 10 s; with SGLang at least 3"),
        Default("limits.max_rooms", 512, "rooms", "beyond this, queues grow and nothing gets faster"),
        Default("limits.max_bytes", 8 * 1024**3, "bytes", "page-rounded transfer bytes in flight on one host"),
        Default("limits.quarantine_max", 64, "pages", "an engine with more unknown pages is better restarted"),
        Default("evidence.max_bytes", 64 * 1024**2, "bytes", "hundreds of reports of a rank"),
        Default("policies.routing", "round-robin", "name", "equal engines, no state to get wrong"),
        Default("policies.admission", "bytes", "name", "bytes in flight are what makes transfers slow"),
        Default("policies.integrity", "read", "name", "nothing is read before it is verified"),
        Default("policies.abort", "ladder", "name", "ask, then quarantine, then fence: a time-out never frees"),
        Default("policies.drain", "rooms", "name", "open rooms finish first"),
        Default("policies.restart", "backoff", "name", "fast the first time, patient when it repeats"),
        Default("policies.hicache", "write-through", "name", "a sealed page never changes: copy it once, at once"),
        Default("restart.initial", 0.5, "s", "one crash costs its start-up time and little more"),
        Default("restart.cap", 30.0, "s", "a machine that heals is used again within half a minute"),
        Default("restart.tries", 5, "restarts", "what fails six times in a window fails for a reason"),
        Default("restart.window", 300.0, "s", "failures further apart are not one fault"),
        Default("engines.adapter", "reference", "name", "it needs no GPU and no model"),
        Default("engines.host", "127.0.0.1", "address", "engines and peers speak without TLS: this host alone"),
        Default("engines.port", 0, "port", "a free one: only the gateway calls it"),
        Default("engines.bootstrap_port", 0, "port", "a free one: decode ranks are told"),
        Default("engines.ranks", 1, "ranks", "one is enough for small models"),
        Default("hicache.pages", 512, "pages", "twice the embedded engine's device pages"),
        Default("hicache.ratio", 2.0, "pages", "SGLang: host pages for each device page, its own default"),
        Default("hicache.load_threshold_pages", 1, "pages", "a page loads faster than it is computed"),
        Default("reference.index_k_dtype", "bf16", "name", "the layout of the incident's rows"),
        Default("reference.device_pages", 256, "pages", "65,536 tokens: four full contexts"),
        Default("reference.state_slots", 256, "slots", "one a room, and snapshots of cached prefixes"),
        Default("reference.max_batch", 16, "sequences", "more make a step longer and nothing faster on a CPU"),
        Default("reference.context_tokens", 16_384, "tokens", "64 pages: prefixes far longer than what is selected"),
        Default("reference.seed", 0, "seed", "of the weights: the same on both sides"),
        Default("reference.device", "cpu", "name", "every machine has one"),
        Default("reference.collective_timeout", 20.0, "s", "a rank that does not arrive within it fails the engine"),
        Default("sglang.python", "python3", "command", "the one that is found first"),
        Default("sglang.index_k_dtype", "fp8", "name", "SGLang's own layout"),
        Default("gateway.host", "127.0.0.1", "address", "nobody else, until it is said"),
        Default("gateway.port", 30_000, "port", "SGLang's"),
        Default("gateway.max_body_bytes", 4 * 1024**2, "bytes", "a full context in JSON with room to spare"),
        Default("gateway.model", "dsv4-reference", "name", "what `/v1/models` says"),
        Default("log.level", "info", "name", "what an operator acts on, and no prompt text"),
        Default("log.format", "auto", "name", "for people on a terminal, else JSON lines"),
        Default("log.queue", 10_000, "lines", "seconds of a stalled reader before lines are dropped"),
    )
}


def seconds(key: str) -> float:
    """The default `key`, which is a duration. Raises KeyError, TypeError."""
    default = DEFAULTS[key]
    if default.unit != "s":
        raise TypeError(f"{key} is in {default.unit}, not in seconds")
    return float(default.value)


def count(key: str) -> int:
    """The default `key`, which is a whole number. Raises KeyError, TypeError."""
    value = DEFAULTS[key].value
    if not isinstance(value, int):
        raise TypeError(f"{key} is {value!r}, not a whole number")
    return value


def name(key: str) -> str:
    """The default `key`, which is a policy's name. Raises KeyError, TypeError."""
    value = DEFAULTS[key].value
    if not isinstance(value, str):
        raise TypeError(f"{key} is {value!r}, not a name")
    return value
