"""The configuration as msgspec Structs: one TOML file, strict (`load`)."""

from __future__ import annotations

from typing import Literal

import msgspec


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every table of the file: unknown keys are refused."""


class GatewayConfig(Section):
    host: str = "127.0.0.1"
    port: int = 30000  #: 0 takes a free port
    max_body_bytes: int = 4 * 1024 * 1024
    model: str = "dsv4-reference"  #: the name served by /v1/models


class LogConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"  #: auto: console on a terminal, else JSON lines
    queue: int = 10_000  #: lines held for a slow reader of stdout before lines are dropped (and counted)


class HiCacheConfig(Section):
    """KV cache in host memory. `h2d_gbps` paces the reference engine's copies on the CPU (0: as fast as memory)."""

    enabled: bool = True
    pages: int = 512  #: host pages of 256 tokens
    h2d_gbps: float | None = None  #: None: from the measured layer time (docs/operations.md)
    load_threshold_pages: int = 1


class ReferenceConfig(Section):
    """Options of the embedded engine."""

    index_k_dtype: Literal["bf16", "fp8"] = "bf16"
    device_pages: int = 256  #: pages of 256 tokens in space `full` (and `swa`)
    state_slots: int = 256
    max_batch: int = 16  #: sequences in one forward step
    context_tokens: int = 16_384
    seed: int = 0
    device: Literal["cpu", "cuda"] = "cpu"


class EngineConfig(Section):
    name: str
    role: Literal["prefill", "decode", "single"]
    adapter: str = "reference"
    host: str = "127.0.0.1"
    port: int = 0  #: HTTP port of the engine; 0 takes a free one
    bootstrap_port: int = 0  #: where decode ranks reach a prefill engine; 0 takes a free one
    ranks: int = 1
    memory_bytes: int | None = None  #: host memory this engine may use; None: what the machine has
    hicache: HiCacheConfig = HiCacheConfig()
    reference: ReferenceConfig = ReferenceConfig()


class PoliciesConfig(Section):
    routing: str = "round-robin"
    admission: str = "bytes"
    integrity: str = "read"
    abort: str = "ladder"
    drain: str = "rooms"
    restart: str = "backoff"
    hicache: str = "write-through"


class LimitsConfig(Section):
    max_rooms: int = 512  #: rooms in flight before 429
    max_bytes: int = 8 * 1024**3  #: page-rounded transfer bytes in flight before 429
    quarantine_max: int = 64  #: quarantined pages of an engine before it is restarted


class DeadlinesConfig(Section):
    """Seconds. Each room state may last this long; then the room is aborted, quarantined, fenced."""

    allocated: float = 10.0
    bootstrapping: float = 30.0
    loading: float = 120.0
    sending: float = 30.0
    landed: float = 10.0
    verified: float = 30.0
    decoding: float = 600.0
    ack: float = 5.0  #: aborting + quiescing, before the writer is fenced
    fence: float = 5.0  #: a fenced process must be reaped within this
    drain: float = 30.0  #: one total budget
    ready: float = 90.0  #: engine start to first Hello
    wedge: float = 8.0  #: runnable work and no progress


class UnsafeConfig(Section):
    """Switches guards off. For experiments: output WILL be corrupted."""

    off: list[str] = []  #: values of `tickets.types.Guard`
    runtime: bool = False  #: allow `guards` to be changed over the admin socket


class Config(Section):
    socket: str | None = None  #: admin socket; None: $XDG_RUNTIME_DIR/dsv4ctl.sock or /run/dsv4ctl/dsv4ctl.sock
    engines: list[EngineConfig]
    gateway: GatewayConfig = GatewayConfig()
    log: LogConfig = LogConfig()
    policies: PoliciesConfig = PoliciesConfig()
    limits: LimitsConfig = LimitsConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    unsafe: UnsafeConfig = UnsafeConfig()


def embedded() -> Config:
    """What `dsv4ctl start` runs with no file: one prefill and one decode engine, HiCache on the prefill side."""
    return Config(
        engines=[
            EngineConfig(name="prefill0", role="prefill"),
            EngineConfig(name="decode0", role="decode", hicache=HiCacheConfig(enabled=False)),
        ]
    )
