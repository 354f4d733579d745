"""S7 on real bytes: a prefix is used as far as every member pool reaches, and no further."""

from __future__ import annotations

import random

import pytest

from dsv4ctl.controlplane.config.schema import EngineConfig, HiCacheConfig, ReferenceConfig
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.hicache import MISMATCH
from dsv4ctl.engine_adapters.reference.oracle import Oracle
from single import Single

PAGE, DEVICE, HOST = 256, 12, 14
#: Pages of the prompt, and those of its host copies that have index-K: the host keeps it for its first half.
PROMPT, WITH_INDEX = 9, HOST // 2


def prompt(seed: int, tokens: int) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(tokens)]


@pytest.mark.parametrize(
    ("off", "used"), [((), WITH_INDEX), (("whole_groups", "verdict"), PROMPT)], ids=["guarded", "whole_groups off"]
)
def test_an_index_k_sidecar_shorter_than_its_kv_ends_the_prefix(off: tuple[str, ...], used: int) -> None:
    """Report 31. Without the guard the KV is used to its end, and its index keys are whatever lay there."""
    single = Single(
        EngineConfig(
            name="s",
            role="single",
            hicache=HiCacheConfig(pages=HOST, h2d_gbps=0),
            reference=ReferenceConfig(device_pages=DEVICE, fault="short-sidecar"),
        ),
        off,
    )
    try:
        ids = prompt(1, PROMPT * PAGE + 60)
        single.answer(single.ask(ids, 1)[1])
        single.answer(single.ask(prompt(2, (DEVICE - WITH_INDEX) * PAGE - 8), 1)[1])  # evicts what has no index-K
        tokens, finished = single.answer(single.ask(ids, 4)[1])
        assert finished.cached_tokens == used * PAGE
        differs = single.engine._agent.counters[f"{MISMATCH}index_k"]
        if off:
            assert differs > 0
        else:
            assert differs == 0
            assert tokens == Oracle(Geometry(), 0).generate(ids, 4).tokens
    finally:
        single.stop()
