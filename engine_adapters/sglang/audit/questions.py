"""The questions of the audit, in the order of the report, and which answers leave a hole open."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dsv4ctl.engine_adapters.sglang.audit import facts
from dsv4ctl.engine_adapters.sglang.audit.sources import Sources


class Fact(NamedTuple):
    key: str
    question: str
    read: Callable[[Sources], facts.Answer]
    #: Answers that leave a hole open.
    open: frozenset[str]
    #: What goes wrong there.
    hole: str = ""
    #: Targets, below `sglang.srt`, of the hooks that close it together.
    closed_by: tuple[str, ...] = ()


class Hazard(NamedTuple):
    """A setting to mind, where the answer to `key` is one of `answers`."""

    key: str
    answers: frozenset[str]
    text: str


_CLOSED: frozenset[str] = frozenset()
_IF_NO = frozenset({facts.NO})

_NIXL = "disaggregation.nixl.conn."
_BOOTSTRAP = _NIXL + "NixlKVManager._start_bootstrap_thread"
_WORKER = _NIXL + "NixlKVManager.transfer_worker"
_LOAD_BACK = "mem_cache.unified_radix_cache.UnifiedRadixCache.load_back"
_CONTROLLER = "mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController."

FACTS = (
    Fact(
        "index_k_gated",
        "index-K accessor waits for the layer's load",
        facts.gated("get_index_k_with_scale_buffer"),
        frozenset({facts.ABSENT}),  # `no` is an ungated consumer, which is a hole of its own
        "nothing is known about who reads index keys",
    ),
    Fact(
        "unified_kv_gated",
        "unified-KV accessor (HIP) waits for the layer's load",
        facts.gated("get_unified_kv"),
        _CLOSED,  # engines run on CUDA
    ),
    Fact(
        "abort_sent",
        "decode tells prefill of an abort",
        facts.abort_sent,
        _IF_NO,
        "prefill goes on writing into freed pages",
    ),
    Fact(
        "abort_survived",
        "NIXL bootstrap thread survives an abort",
        facts.abort_survived,
        _IF_NO,
        "the first abort ends the thread: no room leaves bootstrapping any more",
        (_BOOTSTRAP,),
    ),
    Fact(
        "frames_survived",
        "NIXL bootstrap thread survives any frame",
        facts.frames_survived,
        _IF_NO,
        "a malformed frame ends the thread: no room leaves bootstrapping any more",
        (_BOOTSTRAP,),
    ),
    Fact(
        "bootstrap_death_logged",
        "its death is logged",
        facts.bootstrap_death_logged,
        _IF_NO,
        "the thread ends unnoticed, and /health stays 200",
        (_BOOTSTRAP,),
    ),
    Fact(
        "sender_timeout",
        "NIXL sender gives up on a room that never bootstraps",
        facts.sender_timeout,
        _IF_NO,
        "a prefill request whose decode went away waits for ever",
        (_NIXL + "NixlKVSender.poll",),
    ),
    Fact("early_send", "early send of a cached prefix", facts.early_send, _CLOSED),
    Fact(
        "early_send_skips_loads",
        "early send skipped if its batch started a load",
        facts.early_send_skips_loads,
        _IF_NO,
        "NIXL reads pages that HiCache is still loading",
        (
            _LOAD_BACK,
            _WORKER,
        ),
    ),
    Fact(
        "early_send_fenced",
        "early send waits for the forward before (backends)",
        facts.early_send_fenced,
        _CLOSED,  # what counts is NIXL's order, by whatever means
    ),
    Fact(
        "early_send_ordered",
        "NIXL's early send comes after the forward before by",
        facts.early_send_ordered,
        frozenset({facts.NO, "barrier if HiCache"}),
        "without HiCache, NIXL may read pages that the forward before still writes",
    ),
    Fact(
        "war_barrier",
        "scheduler's barrier after a launch (CUDA)",
        facts.war_barrier,
        _IF_NO,
        "a forward's buffers are reused",
    ),
    Fact(
        "load_fence",
        "HiCache load waits for the forward stream",
        facts.fence("load_fence_stream"),
        _IF_NO,
        "a load writes into reclaimed pages that a forward still touches",
        (_CONTROLLER + "start_loading",),
    ),
    Fact(
        "write_fence",
        "HiCache backup waits for the forward stream",
        facts.fence("write_fence_stream"),
        _IF_NO,
        "a backup reads pages that a forward still writes",
        (_CONTROLLER + "start_writing",),
    ),
    Fact(
        "deferred_release",
        "decode keeps an aborted room's pages until prefill is quiet",
        facts.deferred_release,
        frozenset({facts.ABSENT, "off"}),
        "pages are reused while NIXL still writes into them",
        ("disaggregation.decode.DecodeTransferQueue._poll_with_metadata_gate",),
    ),
    Fact(
        "writing_check",
        "every rank enters HiCache's backup collective",
        facts.enters(
            facts.TREE,
            "UnifiedRadixCache.writing_check",
            ("_all_reduce", "all_reduce"),
            frozenset({"cc", "write_back"}),
        ),
        frozenset({facts.NO, facts.ABSENT}),
        "ranks that disagree about open backups hang",
    ),
    Fact(
        "handshake",
        "every rank enters decode's handshake collective",
        facts.enters(
            facts.DECODE,
            "DecodePreallocQueue._update_handshake_waiters",
            ("poll_and_all_reduce",),
            frozenset({"self", "queue", "all", "decode_req", "waiting_for_input", "pp_size"}),
        ),
        frozenset({facts.NO, facts.ABSENT}),
        "a failure that one rank saw first leaves the ranks in different collectives",
        ("disaggregation.decode.DecodePreallocQueue._update_handshake_waiters",),
    ),
    Fact(
        "metadata_gate",
        "metadata of another room is refused by all ranks",
        facts.metadata_gate,
        _IF_NO,
        "ranks that read a recycled slot differently build different batches",
        ("disaggregation.utils._apply_metadata_gate",),
    ),
    Fact(
        "counter_waits",
        "a fourth load waits for the first",
        facts.counter_waits,
        _IF_NO,
        "an assertion ends the scheduler",
        ("managers.cache_controller.LayerDoneCounter.update_producer",),
    ),
    Fact("hicache_size", "--hicache-size for DeepSeek-V4", facts.hicache_size, _CLOSED),
)

HAZARDS = (
    Hazard(
        "early_send_ordered",
        frozenset({"barrier if HiCache"}),
        "without HiCache, early send may overtake a forward: SGLANG_ENABLE_PREFILL_WAR_READ_DONE=0",
    ),
    Hazard(
        "early_send_skips_loads",
        _IF_NO,
        "early send is on by default and reads loading pages: SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX=0",
    ),
    Hazard(
        "deferred_release",
        frozenset({"off"}),
        "aborted rooms' pages are reused at once: SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=1",
    ),
    Hazard(
        "handshake",
        _IF_NO,
        "with several ranks, overlap makes it likelier that they get out of step: --disable-overlap-schedule",
    ),
    Hazard("hicache_size", frozenset({"refused"}), "--hicache-size is refused for DeepSeek-V4: --hicache-ratio"),
)


def answers(sources: Sources) -> dict[str, facts.Answer]:
    return {fact.key: fact.read(sources) for fact in FACTS}
