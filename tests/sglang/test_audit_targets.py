"""What a hook's target is, in the real wheels."""

from __future__ import annotations

import pytest

from dsv4ctl.engine_adapters.sglang.audit.targets import Kind, kind
from sglang_wheels import released


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk", Kind.DEF),
        ("srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool", Kind.CLASS),
        ("srt.layers.attention.dsv4.compressor_v2.CompressorBackendMixin.forward_core_compressor", Kind.ALIAS),
        (
            "srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool.register_layer_transfer_counter",
            Kind.INHERITED,
        ),
        ("srt.disaggregation.nixl.conn.NixlKVManager._start_bootstrap_thread.bootstrap_thread", Kind.CLOSURE),
        ("srt.disaggregation.nixl.conn.NixlKVManager.nothing", Kind.MISSING),
        ("srt.nowhere.Thing.method", Kind.MISSING),
    ],
)
def test_kind(target: str, expected: Kind) -> None:
    assert kind(released("0.5.16"), f"sglang.{target}") is expected


def test_a_method_that_moved_to_the_base_class_is_inherited_since() -> None:
    target = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController.start_loading"
    found = {release: kind(released(release), target) for release in ("0.5.16", "0.5.23")}
    assert found == {"0.5.16": Kind.DEF, "0.5.23": Kind.INHERITED}
