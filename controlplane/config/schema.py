"""The configuration as msgspec Structs: one TOML file, strict (`load`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]  #: 0 takes a free one
Count = Annotated[int, msgspec.Meta(ge=1)]
Rate = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
Ratio = Annotated[float, msgspec.Meta(gt=1, lt=1e3)]
Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]
#: A deadline, in seconds. The upper bound (30 years) refuses `inf`: every wait has an end.
Seconds = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]


#: Values of the reference engine's `Fault`.
StagedFault = Literal["by-request", "slow-backup", "short-sidecar", "poison"]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every table of the file: unknown keys are refused."""


class GatewayConfig(Section, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: Port = 30000
    max_body_bytes: Count = 4 * 1024 * 1024
    model: str = "dsv4-reference"  #: the name served by /v1/models


class LogConfig(Section, frozen=True, kw_only=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"  #: auto: console on a terminal, else JSON lines
    queue: Count = 10_000  #: lines held for a slow reader of stdout; those above it are dropped (and counted)


class HiCacheConfig(Section, frozen=True, kw_only=True):
    """KV cache in host memory, of prefill and single engines. An engine of SGLang reads `enabled` and `ratio` alone.

    `h2d_gbps` paces the reference engine's copies on the CPU (0: no pacing).
    """

    enabled: bool = True
    pages: Count = 512  #: host pages of 256 tokens
    ratio: Ratio = 2.0  #: SGLang: host pages for each device page
    h2d_gbps: Rate | None = None  #: None: from the measured layer time (docs/operations.md)
    load_threshold_pages: Count = 1


class ReferenceConfig(Section, frozen=True, kw_only=True):
    """Options of the embedded engine."""

    index_k_dtype: Literal["bf16", "fp8"] = "bf16"
    device_pages: Count = 256  #: pages of 256 tokens in space `full` (and `swa`)
    state_slots: Count = 256
    max_batch: Count = 16  #: sequences in one forward step
    context_tokens: Count = 16_384
    seed: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    collective_timeout: Seconds = 20.0  #: a rank that does not arrive within it fails the engine
    fault: StagedFault | None = None  #: an experiment: what happens to the last rank alone


class SglangConfig(Section, frozen=True, kw_only=True):
    """Options of an SGLang server, all of whose ranks (tensor parallel) are one process tree."""

    python: str = "python3"  #: the interpreter of the environment that SGLang and this package are installed in
    model: str = ""  #: a folder or a Hugging Face name
    index_k_dtype: Literal["bf16", "fp8"] = "fp8"
    mem_fraction: Share | None = None  #: of the device's memory, for weights and pools; None: SGLang decides
    max_total_tokens: Count | None = None  #: tokens of the device pools; None: as the memory allows
    extra_args: list[str] = []  #: of `sglang.launch_server`; what this file says elsewhere is refused here
    env: dict[str, str] = {}  #: added to the server's environment
    allow_unverified: bool = False  #: start a release that the hooks were not verified on


class EngineConfig(Section, frozen=True, kw_only=True):
    name: str
    role: Literal["prefill", "decode", "single"]
    adapter: str = "reference"
    host: str = "127.0.0.1"
    port: Port = 0  #: HTTP port of the engine
    bootstrap_port: Port = 0  #: where decode ranks reach a prefill engine
    ranks: Count = 1
    survive: bool = False  #: outlives a control plane that is killed; the next one with the same file goes on with it
    memory_bytes: Count | None = None  #: host memory this engine may use; None: what the machine has
    hicache: HiCacheConfig = HiCacheConfig()
    reference: ReferenceConfig = ReferenceConfig()
    sglang: SglangConfig = SglangConfig()


class PoliciesConfig(Section, frozen=True, kw_only=True):
    routing: str = "round-robin"
    admission: str = "bytes"
    integrity: str = "read"
    abort: str = "ladder"
    drain: str = "rooms"
    restart: str = "backoff"
    hicache: str = "write-through"


class LimitsConfig(Section, frozen=True, kw_only=True):
    max_rooms: Count = 512  #: rooms in flight before 429
    max_bytes: Count = 8 * 1024**3  #: page-rounded transfer bytes in flight before 429
    quarantine_max: Count = 64  #: quarantined pages of an engine before it is restarted


class DeadlinesConfig(Section, frozen=True, kw_only=True):
    """Seconds. Each room state may last this long; then the room is aborted, quarantined, fenced."""

    allocated: Seconds = 120.0
    bootstrapping: Seconds = 120.0
    loading: Seconds = 120.0
    sending: Seconds = 120.0
    landed: Seconds = 30.0
    verified: Seconds = 60.0
    decoding: Seconds = 600.0
    ack: Seconds = 5.0  #: aborting + quiescing, before the writer is fenced
    fence: Seconds = 5.0  #: a fenced process must be reaped within this
    drain: Seconds = 30.0  #: one total budget
    ready: Seconds = 90.0  #: engine start to first Hello
    wedge: Seconds = 8.0  #: runnable work and no progress


class EvidenceConfig(Section, frozen=True, kw_only=True):
    """Files about mismatches, wedges and fences: digests, tickets, last events; never a prompt."""

    folder: str | None = None  #: None: only the log tells
    max_bytes: Count = 64 * 1024 * 1024  #: of all files together; the oldest go first


class UnsafeConfig(Section, frozen=True, kw_only=True):
    """Switches guards off. For experiments: output WILL be corrupted."""

    off: list[str] = []  #: values of `tickets.types.Guard`
    runtime: bool = False  #: allow `guards` to be changed over the admin socket


class Config(Section, frozen=True, kw_only=True):
    socket: str | None = None  #: admin socket; None: $XDG_RUNTIME_DIR/dsv4ctl.sock or /run/dsv4ctl/dsv4ctl.sock
    engines: list[EngineConfig]
    gateway: GatewayConfig = GatewayConfig()
    log: LogConfig = LogConfig()
    policies: PoliciesConfig = PoliciesConfig()
    limits: LimitsConfig = LimitsConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    evidence: EvidenceConfig = EvidenceConfig()
    unsafe: UnsafeConfig = UnsafeConfig()


def embedded() -> Config:
    """What `dsv4ctl start` runs with no file: a prefill engine with HiCache, and a decode engine."""
    return Config(
        engines=[
            EngineConfig(name="prefill0", role="prefill"),
            EngineConfig(name="decode0", role="decode", hicache=HiCacheConfig(enabled=False)),
        ]
    )
