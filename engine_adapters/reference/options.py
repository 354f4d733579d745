"""What a rank of the reference engine is told at its start: its table of the configuration, strictly decoded."""

from __future__ import annotations

from typing import Literal

import msgspec

from dsv4ctl.engine_adapters.protocol import ENGINE_VARIABLE, LaunchRequest


class HiCacheOptions(msgspec.Struct, frozen=True):
    enabled: bool
    pages: int
    h2d_gbps: float | None
    load_threshold_pages: int


class ReferenceOptions(msgspec.Struct, frozen=True):
    index_k_dtype: Literal["bf16", "fp8"]
    device_pages: int
    state_slots: int
    max_batch: int
    context_tokens: int
    seed: int
    device: Literal["cpu", "cuda"]
    collective_timeout: float
    fault: str | None


class EngineOptions(msgspec.Struct, frozen=True):
    """The keys of `[[engines]]` that the engine itself reads."""

    name: str
    role: Literal["prefill", "decode", "single"]
    host: str
    port: int
    bootstrap_port: int
    ranks: int
    hicache: HiCacheOptions
    reference: ReferenceOptions
    survive: bool = False


def read(environment: dict[str, str]) -> tuple[LaunchRequest, EngineOptions]:
    """Raises ValueError if the variable is missing or does not decode."""
    text = environment.get(ENGINE_VARIABLE)
    if text is None:
        raise ValueError(f"{ENGINE_VARIABLE} is not set: engines are started by `dsv4ctl start`")
    request = msgspec.json.decode(text, type=LaunchRequest)
    return request, msgspec.convert(request.engine, EngineOptions)
