"""What an embedded engine needs of memory, told to the configuration check. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dsv4ctl.engine_adapters.reference.geometry import Geometry, pool_specs


class _Options(msgspec.Struct):
    """The keys of an engine's table `reference` that shape a page."""

    index_k_dtype: Literal["bf16", "fp8"]
    context_tokens: int


def host_page_bytes(engine: dict[str, Any]) -> int:
    """Bytes that one host page (256 tokens in every pool, all layers) takes on one rank.

    `engine` is its table of the configuration, without `launch.problems`.
    """
    options = msgspec.convert(engine["reference"], _Options)
    geometry = Geometry(index_k_dtype=options.index_k_dtype, context_tokens=options.context_tokens)
    return sum(spec.page_bytes * len(spec.model_layers) for spec in pool_specs(geometry).values())
