"""`[[engines]]` as an engine of SGLang reads it, and what is wrong with it on any machine, with any release."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

#: Tokens of a page of DeepSeek-V4: SGLang's attention backend for it has no other.
PAGE_TOKENS = 256
_FP4_INDEXER = "--enable-deepseek-v4-fp4-indexer"
#: Arguments that the configuration file says elsewhere, and where.
_SAID_ELSEWHERE = {
    "--model-path": "sglang.model",
    "--model": "sglang.model",
    "--served-model-name": "[gateway] model",
    "--host": "host",
    "--port": "port",
    "--tp-size": "ranks",
    "--tp": "ranks",
    "--tensor-parallel-size": "ranks",
    "--mem-fraction-static": "sglang.mem_fraction",
    "--max-total-tokens": "sglang.max_total_tokens",
    "--enable-hierarchical-cache": "hicache.enabled",
    "--hicache-ratio": "hicache.ratio",
    "--disaggregation-mode": "role",
    "--disaggregation-bootstrap-port": "bootstrap_port",
    "--disaggregation-transfer-backend": "nothing: the transfer is NIXL's",
    "--config": "this file",
}
#: Arguments, or how some begin, with which bytes are read or written that the hooks do not see, and which.
_UNGUARDED = {
    "--speculative-": "a draft's pages are not restored with a prefix, and a captured verification reads with no gate",
    "--pp-size": "the ranks of an engine are those of tensor parallelism",
    "--pipeline-parallel-size": "the ranks of an engine are those of tensor parallelism",
    "--dp-size": "the ranks of an engine are those of tensor parallelism",
    "--data-parallel-size": "the ranks of an engine are those of tensor parallelism",
    "--enable-pdmux": "a split prefill computes pages that nobody seals",
    "--disaggregation-decode-enable-": "a captured decode reads a cached prefix with no gate",
}
_NAMED = {
    "python": "the interpreter of SGLang's environment",
    "model": "a folder with a model, or its Hugging Face name",
}


class SglangTable(msgspec.Struct, frozen=True):
    """`[engines.sglang]`."""

    python: str
    model: str
    index_k_dtype: str
    mem_fraction: float | None
    max_total_tokens: int | None
    extra_args: list[str]
    env: dict[str, str]
    allow_unverified: bool


class HiCacheTable(msgspec.Struct, frozen=True):
    """What is read of `[engines.hicache]`."""

    enabled: bool
    ratio: float


class EngineTable(msgspec.Struct, frozen=True):
    """What is read of `[[engines]]`."""

    name: str
    role: str
    host: str
    port: int
    bootstrap_port: int
    ranks: int
    survive: bool
    hicache: HiCacheTable
    sglang: SglangTable


def problems(engine: EngineTable) -> Iterator[tuple[str, str]]:
    """Each as a key below `[[engines]]` and what was expected there."""
    table = engine.sglang
    if engine.survive:
        yield "survive", "expected false: a server of SGLang ends with its control plane"
    for key in ("python", "model"):
        if not getattr(table, key):
            yield f"sglang.{key}", f'expected {_NAMED[key]}, found ""'
    for name in table.env:
        if not name or set(name) & {"=", "\0"}:
            yield "sglang.env", f"expected names of environment variables, found {name!r}"
    for at, text in _misplaced(table.extra_args):
        yield f"sglang.extra_args[{at}]", text
    if table.index_k_dtype == "bf16" and _FP4_INDEXER in table.extra_args:
        yield "sglang.extra_args", f"{_FP4_INDEXER} and index_k_dtype bf16 exclude each other"


def arguments(extra: Sequence[str]) -> Iterator[tuple[int, str, str | None]]:
    """Each argument of `extra`: where it stands, its name, and the word behind it, if any."""
    for at, word in enumerate(extra):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        following = extra[at + 1] if at + 1 < len(extra) and not extra[at + 1].startswith("--") else None
        yield at, name, value if equals else following


def _misplaced(extra: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Which of `extra` must not be there, and why."""
    if extra and not extra[0].startswith("--"):
        yield 0, f"{extra[0]!r} belongs to no argument: an argument begins with --"
    for at, name, value in arguments(extra):
        if name == "--hicache-size":
            yield at, f"{name} is refused for DeepSeek-V4, whose pools differ in size: set hicache.ratio"
        elif name in _SAID_ELSEWHERE:
            yield at, f"{name} is said elsewhere: set {_SAID_ELSEWHERE[name]}"
        elif why := next((why for start, why in _UNGUARDED.items() if name.startswith(start)), None):
            yield at, f"{name} is not guarded: {why}"
        elif name == "--page-size" and value != str(PAGE_TOKENS):
            yield at, f"--page-size {value}: DeepSeek-V4 has pages of {PAGE_TOKENS} tokens"
