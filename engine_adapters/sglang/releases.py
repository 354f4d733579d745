"""What is hooked in which release of SGLang, and why. Plain data: nothing of SGLang is imported to read it.

Bf16 index keys have a table of their own: `index_k.hooks`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

#: Releases on which every hook below was verified against the real wheel.
VERIFIED: tuple[str, ...] = ("0.5.16", "0.5.23")
#: Without an acknowledgement of aborts, a deferred release and a sender time-out of its own.
_BARE = ("0.5.16",)
#: With them: the hooks build on them.
_DEFERRED = ("0.5.23",)

Kind = Literal["around", "after", "replace"]


class Hook(NamedTuple):
    """One hook. `target` is a dotted path below `sglang.srt`, `function` is `module:name` below this package."""

    target: str
    function: str
    kind: Kind
    why: str
    releases: tuple[str, ...] = VERIFIED
    roles: tuple[str, ...] = ("prefill", "decode", "single")  #: of an engine: in others it would be in the way


#: Engines that may have a cache on their host: a decode engine that has one ends (`hooks.life:attach`).
_LOADING = ("prefill", "single")
_SCHEDULER = "managers.scheduler.Scheduler."
_RECEIVER = "managers.scheduler_components.request_receiver.SchedulerRequestReceiver."
_CONTROLLER = "mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController."
_PREFILL = "disaggregation.prefill.SchedulerDisaggregationPrefillMixin."
_NIXL = "disaggregation.nixl.conn."
_DECODE = "disaggregation.decode."

HOOKS: tuple[Hook, ...] = (
    Hook(
        _SCHEDULER + "init_disaggregation",
        "hooks.life:attach",
        "around",
        "pools exist and the transfer manager does not: the rank gets its ledger and its agent",
    ),
    Hook(
        _SCHEDULER + "run_event_loop",
        "hooks.life:connect",
        "around",
        "the rank is ready: it greets the control plane, and a rank that does not is never sent a request; what was "
        "built by then is left out of collections",
    ),
    Hook(
        _SCHEDULER + "run_batch",
        "hooks.life:run_batch",
        "around",
        "a launched forward of a room: its abort is acknowledged after it",
        roles=("prefill",),
    ),
    Hook(
        "managers.tp_worker.TpModelWorker.forward_batch_generation",
        "hooks.life:forward",
        "around",
        "a captured prefill waits for whole loads; pages are sealed behind the forward that computes them",
        roles=("prefill", "single"),
    ),
    Hook(
        _PREFILL + "process_batch_result_disagg_prefill",
        "hooks.life:batch_result",
        "around",
        "the forward has ended",
    ),
    Hook(
        _RECEIVER + "_broadcast_reqs_across_ranks",
        "hooks.agreement:requests",
        "around",
        "openings are taken in before requests; rank 0 adds the aborts that the control plane asked for: every rank "
        "applies them at the same step",
    ),
    Hook(
        "mem_cache.unified_radix_cache.UnifiedRadixCache.load_back",
        "hooks.loads:load_back",
        "around",
        "pages become visible to every other request here, before their copy has begun: the load opens here",
        roles=_LOADING,
    ),
    Hook(
        _CONTROLLER + "start_loading",
        "hooks.loads:start_loading",
        "around",
        "the copy begins: behind the running forward and the backups it reads; its events land the load",
        roles=_LOADING,
    ),
    Hook(
        "managers.cache_controller.LayerDoneCounter.update_producer",
        "hooks.loads:update_producer",
        "around",
        "waits for the fourth load back instead of ending the scheduler with an assertion",
        roles=_LOADING,
    ),
    Hook(
        _CONTROLLER + "start_writing",
        "hooks.backup:start_writing",
        "around",
        "the backup reads device pages behind the forward that writes them and the loads that fill them",
        roles=_LOADING,
    ),
    Hook(
        "mem_cache.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool.wait_layer_transfer",
        "hooks.readers:wait_layer_transfer",
        "around",
        "every reader in the process: a batch that carries no load of its own waits for the loads of others",
        roles=_LOADING,
    ),
    Hook(
        _PREFILL + "send_kv_chunk",
        "hooks.sender:send_kv_chunk",
        "around",
        "the one place where a room's pages are handed to the transfer: not those of an aborted room",
    ),
    Hook(
        _NIXL + "NixlKVManager.transfer_worker",
        "hooks.sender:transfer_worker",
        "around",
        "each write is posted under a granted ticket of its source pages, and its end is known",
    ),
    Hook(
        _NIXL + "NixlKVSender.__init__",
        "hooks.rooms_prefill:created",
        "after",
        "a room that is aborted, or was never opened here, fails",
    ),
    Hook(
        _NIXL + "NixlKVSender.poll",
        "hooks.rooms_prefill:poll",
        "around",
        "a sender that no decode rank answers ends by the time-out",
        _BARE,
    ),
    Hook(
        "disaggregation.utils.poll_and_all_reduce_attn_cp_tp_group",
        "hooks.rooms_prefill:agree",
        "around",
        "a failed room keeps its source pages until its writer is quiet on every rank",
    ),
    Hook(
        _SCHEDULER + "process_pending_chunked_abort",
        "hooks.rooms_prefill:chunked_abort",
        "around",
        "pages of an aborted chunked prefill are given back when no write of its earlier chunks is in flight",
    ),
    Hook(
        _SCHEDULER + "abort_request",
        "hooks.rooms_prefill:abort_request",
        "around",
        "an aborted request that waited leaves nothing behind in the transfer manager",
    ),
    Hook(
        _NIXL + "NixlKVManager._start_bootstrap_thread",
        "hooks.bootstrap:start",
        "replace",
        "the loop lives through any frame, and says so if it dies",
    ),
    Hook(
        _NIXL + "NixlKVManager.__init__",
        "hooks.bootstrap:listen",
        "after",
        "where a decode rank hears its prefill ranks",
        _BARE,
    ),
    Hook(
        _NIXL + "NixlKVManager._start_decode_listener_thread",
        "hooks.bootstrap:listen_beside",
        "replace",
        "where a decode rank hears its prefill ranks: our digests beside SGLang's own frames, and it lives through any",
        _DEFERRED,
    ),
    Hook(
        _SCHEDULER + "process_decode_queue",
        "hooks.rooms_decode:queues",
        "around",
        "a decode rank hears control plane and writers here, in each of its turns",
    ),
    Hook(
        _NIXL + "NixlKVReceiver.__init__",
        "hooks.rooms_decode:created",
        "after",
        "a room that is aborted, or was never opened here, fails",
    ),
    Hook(
        "disaggregation.common.conn.CommonKVReceiver._connect_to_bootstrap_server",
        "hooks.rooms_decode:socket",
        "around",
        "frames to a prefill rank say which incarnation and which generation of the room they are of",
    ),
    Hook(
        _NIXL + "NixlKVReceiver.send_metadata",
        "hooks.rooms_decode:expose",
        "around",
        "from here the prefill ranks may write into the room's pages",
    ),
    Hook(
        "disaggregation.utils._apply_metadata_gate",
        "hooks.rooms_decode:metadata_gate",
        "around",
        "a wrong room number in the metadata, and a wrong digest, are verdicts of every rank",
    ),
    Hook(
        _DECODE + "DecodeTransferQueue._poll_with_metadata_gate",
        "hooks.rooms_decode:hold",
        "around",
        "a failed room keeps its pages and its metadata slot until every writer acknowledged or was fenced",
        _BARE,
    ),
    Hook(
        _DECODE + "DecodeTransferQueue._defer_release",
        "hooks.rooms_decode:defer",
        "around",
        "a deferred release has no time-out: only an acknowledgement or a fence gives pages back",
        _DEFERRED,
    ),
    Hook(
        "disaggregation.common.conn.CommonKVManager.is_abort_release_safe",
        "hooks.rooms_decode:release_safe",
        "around",
        "safe is what the agent knows: every writer of this generation acknowledged, or was fenced",
        _DEFERRED,
    ),
    Hook(
        "disaggregation.common.conn.CommonKVManager.note_abort_ack",
        "hooks.rooms_decode:abort_ack",
        "around",
        "SGLang's own acknowledgement counts as ours",
        _DEFERRED,
    ),
    Hook(
        _DECODE + "DecodeTransferQueue._commit_transfer_to_req",
        "hooks.rooms_decode:commit",
        "around",
        "the room is decoding from here",
    ),
    Hook(
        _DECODE + "DecodePreallocQueue._update_handshake_waiters",
        "hooks.agreement:handshake_waiters",
        "around",
        "every rank enters the reduction: stock skips it on what one rank alone knows",
        _BARE,
    ),
    Hook(
        "mem_cache.common.release_kv_cache",
        "hooks.rooms_decode:released",
        "around",
        "the request gave its pages back: the room ends",
    ),
)


def hooks_of(release: str) -> tuple[Hook, ...]:
    """The hooks of `release`; an unverified one gets those of the newest verified one below it."""
    base = nearest(release)
    return tuple(hook for hook in HOOKS if base in hook.releases)


def nearest(release: str) -> str:
    """The newest verified release that is not newer than `release`, else the oldest."""
    below = [known for known in VERIFIED if _order(known) <= _order(release)]
    return max(below, key=_order) if below else min(VERIFIED, key=_order)


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in release.split(".")[:3])
