"""What the audit reads off real wheels: the version matrix, each consumer, and holes that were put there on purpose."""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path

import pytest

from dsv4ctl.engine_adapters.sglang.audit.consumers import POOL, Access, Consumer, accessors, consumers
from dsv4ctl.engine_adapters.sglang.audit.questions import FACTS
from dsv4ctl.engine_adapters.sglang.audit.report import audit
from dsv4ctl.engine_adapters.sglang.audit.sources import Sources
from sglang_wheels import Copy, released

ROOT = Path(__file__).resolve().parents[2]
RECORDED = json.loads((ROOT / "docs" / "sglang.json").read_text())
DOWNLOADED = ("0.5.15", "0.5.16", "0.5.23")
RELEASES = ("0.5.12", "0.5.13", "0.5.14", "0.5.15", "0.5.16", "0.5.18", "0.5.20", "0.5.22", "0.5.23")
#: Found by reading the sources of each release by eye, in the order of RELEASES.
BY_EYE = {
    "index_k_gated": "yes yes yes yes yes yes yes yes yes",
    "unified_kv_gated": "- - no no yes yes yes yes yes",
    "abort_sent": "no yes yes yes yes yes yes yes yes",
    "abort_survived": "- no no no yes yes yes yes yes",
    "bootstrap_death_logged": "no no no no no no no yes yes",
    "sender_timeout": "no no no no no yes yes yes yes",
    "early_send": "- - - on on on on on on",
    "early_send_skips_loads": "- - - no no no no no yes",
    "early_send_fenced": "- - - no mori mori mori mooncake,mori mooncake,mori",
    "early_send_ordered": "- - - barrier barrier barrier barrier barrier barrier_if_HiCache",
    "war_barrier": "no no yes yes yes yes yes yes yes",
    "load_fence": "no no no no no no yes yes yes",
    "write_fence": "no no no no no no no no yes",
    "deferred_release": "- - - - - - off on on",
    "writing_check": "no yes yes yes yes yes yes yes yes",
    "handshake": "yes no no no no no yes yes yes",
}
#: Line of each accessor in 0.5.16, by eye.
ACCESSORS_16 = {
    "get_attention_compress_states": 977,
    "get_indexer_compress_states": 1048,
    "get_swa_key_buffer": 1063,
    "get_swa_key_buffer_radix": 1163,
    "get_extra_key_buffer": 1082,
    "get_index_k_with_scale_buffer": 1103,
    "get_index_k_scale_buffer": 1109,
    "get_unified_kv": 654,
}


def named(found: list[Consumer], name: str) -> Consumer:
    (one,) = (each for each in found if each.name == name)
    return one


@pytest.mark.parametrize("key", BY_EYE)
def test_the_record_is_what_was_read_by_eye(key: str) -> None:
    recorded = [RECORDED[release][key].replace(", ", ",").replace(" ", "_") for release in RELEASES]
    assert recorded == BY_EYE[key].split()


def test_the_record_is_what_the_wheels_say() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "sglang_matrix.py"))
    newest_first = [released(release) for release in reversed(DOWNLOADED)]
    assert list(script["matrix"](newest_first).items()) == [(release, RECORDED[release]) for release in DOWNLOADED]


def test_every_reader_of_the_pool_in_0_5_16_is_gated() -> None:
    found = consumers(released("0.5.16"))
    gated = {each.name: int(each.where.rpartition(":")[2]) for each in found if each.access is Access.GATED}
    assert gated == ACCESSORS_16
    assert {each.platform for each in found if each.access is Access.UNGATED} == {"NPU"}
    index_k = named(found, "get_index_k_with_scale_buffer")
    assert any(reader.startswith("srt/layers/attention/dsv4/indexer.py:") for reader in index_k.readers)


def test_0_5_15_has_an_ungated_reader_on_hip() -> None:
    assert named(accessors(released("0.5.15")), "get_unified_kv").access is Access.UNGATED


def test_new_tokens_are_stored_and_addresses_are_taken_without_a_gate() -> None:
    modules = (POOL, "srt/models/deepseek_v4.py", "srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py")
    found = consumers(Sources("0.5.23", "a part", modules, released("0.5.23").text))
    assert named(found, "get_swa_raw_buffer").access is Access.WRITE
    assert named(found, "MQALayer._forward_prepare").access is Access.WRITE
    assert named(found, "get_contiguous_buf_infos").access is Access.POINTER
    assert named(found, "build_deepseek_v4_hicache_stack").access is Access.POINTER


GATED = """    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        self.wait_layer_transfer(layer_id)
"""
WAIT = "        self.wait_layer_transfer(layer_id)\n"
SNEAKY = """    def peek(self, layer_id: int) -> torch.Tensor:
        pool = self.c4_indexer_kv_pool
        return pool.get_index_k_with_scale_buffer(layer_id)

"""


@pytest.mark.parametrize(
    ("new", "culprit"),
    [
        (GATED.replace(WAIT, ""), "get_index_k_with_scale_buffer"),
        (GATED.replace(WAIT, f"        if layer_id:\n    {WAIT}"), "get_index_k_with_scale_buffer"),
        (SNEAKY + GATED, "peek"),
        (SNEAKY.replace("peek", "set_peek") + GATED.replace(WAIT, ""), "get_index_k_with_scale_buffer"),
        ("    def peek(self, i):\n        return self.get_swa_raw_buffer(i)\n\n" + GATED, "peek"),
    ],
    ids=["gate-removed", "gate-conditional", "reader-inserted", "writer-beside", "reader-through-another"],
)
def test_a_hole_made_in_the_pool_is_found(new: str, culprit: str) -> None:
    sound = audit(Copy(released("0.5.16"), POOL, GATED, GATED, only=(POOL,)))
    report = audit(Copy(released("0.5.16"), POOL, GATED, new, only=(POOL,)))
    assert named(report.consumers, culprit).access is Access.UNGATED
    assert {hole.key for hole in report.holes} - {hole.key for hole in sound.holes} == {culprit}


INDEXER = "srt/layers/attention/dsv4/indexer.py"


@pytest.mark.parametrize(
    "read",
    [
        "return pool.c4_indexer_kv_pool.index_k_with_scale_buffer[layer]",
        "return pool.compress_state_pools[layer]",
        "swa = pool.swa_kv_pool\n    return swa.kv_buffer[layer]",
        "return pool.get_swa_raw_buffer(layer)",
    ],
)
def test_a_reader_that_goes_past_the_pool_is_found(read: str) -> None:
    original = released("0.5.16")
    first = ast.get_source_segment(original.text(INDEXER), original.tree(INDEXER).body[0])
    assert first
    peek = f"{first}\n\ndef peek(pool, layer):\n    {read}\n\n"
    copy = Copy(original, INDEXER, f"{first}\n", peek, only=(INDEXER,))
    assert named(consumers(copy), "peek").access is Access.UNGATED


@pytest.mark.parametrize(
    ("path", "platform"),
    [
        ("srt/layers/attention/dsv4/compress_hip.py", "HIP"),
        ("srt/layers/attention/aiter/paged.py", "HIP"),
        ("srt/hardware_backend/npu/pool.py", "NPU"),
        ("srt/managers/waiters.py", ""),
        ("srt/layers/membership.py", ""),
    ],
)
def test_only_a_module_of_another_platform_is_excused(path: str, platform: str) -> None:
    copy = Sources("copy", "memory", [path], lambda _: "def peek(pool):\n    return pool.c4_kv_pool.kv_buffer\n")
    (found,) = consumers(copy)
    assert (found.access, found.platform) == (Access.UNGATED, platform)


COMMON, NIXL = "srt/disaggregation/common/conn.py", "srt/disaggregation/nixl/conn.py"
CONTROLLER, SCHEDULER = "srt/managers/cache_controller.py", "srt/managers/scheduler.py"
TREE, DECODE = "srt/mem_cache/unified_radix_cache.py", "srt/disaggregation/decode.py"
COUNT = "    if finish_count is None:\n            # Every rank must enter the all_reduce below; ongoing_write"
POLL = "        # Receiver polling observes"
#: Of 0.5.23: what answers a fact with `yes`, and the same without it.
REMOVALS = {
    "abort_sent": (COMMON, "AbortNotification(\n", "Other(\n"),
    "abort_survived": (NIXL, "if self._handle_abort_notification(", "if self._handle_nothing("),
    "bootstrap_death_logged": (
        NIXL,
        'exception(\n                    "prefill boot',
        'debug(\n                    "prefill boot',
    ),
    "sender_timeout": (COMMON, "self._check_bootstrap_timeout()", "None"),
    "early_send_skips_loads": (SCHEDULER, ", allow_send=not load_pending", ""),
    "war_barrier": (SCHEDULER, "self.schedule_stream.wait_stream(", "self.schedule_stream.other("),
    "load_fence": (
        CONTROLLER,
        "wait_stream(\n                self.load_fence",
        "other(\n                self.load_fence",
    ),
    "write_fence": (SCHEDULER, "cache_controller.write_fence_stream =", "ignored ="),
    "writing_check": (TREE, COUNT, f"    if not self.ongoing_write_through:\n            return\n    {COUNT}"),
    "handshake": (DECODE, POLL, f"        if self.queue[0].kv_receiver.conclude_state:\n            return\n{POLL}"),
}


@pytest.mark.parametrize("key", REMOVALS)
def test_what_0_5_23_does_right_is_missed_when_it_is_gone(key: str) -> None:
    fact = next(fact for fact in FACTS if fact.key == key)
    assert fact.read(released("0.5.23")).value == "yes"
    assert fact.read(Copy(released("0.5.23"), *REMOVALS[key])).value == "no"
