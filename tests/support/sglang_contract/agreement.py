"""What all ranks of an engine do alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.scheduler_components import request_receiver

from dsv4ctl.controlplane.link.wire import OpenRoom, Role
from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.engine_adapters.sglang import rank
from sglang_contract.checks import alone, check, needs
from sglang_contract.situations import exposed, world
from sglang_world import PEER


@needs("hooks.agreement:handshake_waiters")
@check
def every_rank_enters_the_handshake_reduction(hooked: bool) -> None:
    made = world(Role.DECODE, hooked)
    entered: list[int] = []
    stock = decode.poll_and_all_reduce
    decode.poll_and_all_reduce = lambda pollers, group: entered.append(1) or [KVPoll.WaitingForInput] * len(pollers)
    waiting = SimpleNamespace(
        waiting_for_input=True,
        kv_receiver=SimpleNamespace(conclude_state=None),
        req=SimpleNamespace(rid="r", time_stats=SimpleNamespace(set_bootstrap_done_time=lambda: None)),
    )
    queue = object.__new__(decode.DecodePreallocQueue)
    queue.__dict__.update(queue=[waiting], gloo_group=None, pp_size=1)
    try:
        queue._update_handshake_waiters()
    finally:
        decode.poll_and_all_reduce = stock
    assert entered, "the reduction was left out"
    assert waiting.waiting_for_input
    assert made.rank is not None


def _receiver() -> Any:
    """SGLang's receiver of a single rank."""
    receiver = object.__new__(request_receiver.SchedulerRequestReceiver)
    alone = SimpleNamespace(tp_size=1, attn_tp_size=1, attn_cp_size=1, enable_dp_attention=False, attn_dp_enabled=False)
    for name in ("ps", "server_args"):
        if name in request_receiver.SchedulerRequestReceiver.__slots__:
            object.__setattr__(receiver, name, alone)
    request_receiver.get_parallel = lambda: alone
    request_receiver.get_exec = lambda: alone
    return receiver


@check
def aborts_of_the_link_are_applied_where_every_rank_takes_part(hooked: bool) -> None:
    made = world(Role.DECODE, hooked)
    key = exposed(made)
    receiver = _receiver()
    request = SimpleNamespace(bootstrap_room=7, rid="the request")
    assert receiver._broadcast_reqs_across_ranks([request]) == [request]
    made.abort(key)
    agreed = receiver._broadcast_reqs_across_ranks([])
    assert [item.rid for item in agreed if isinstance(item, AbortReq)] == ["the request"]
    assert receiver._broadcast_reqs_across_ranks([]) == [], "it is aborted once"


@check
def fresh_room_finds_no_cached_prefix(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    opening = OpenRoom(RoomKey(7, 2), "request", None, "other", (PEER,), {"ack": 10.0}, "off", fresh=True)
    made.rank.agent.handle(opening)
    receiver = _receiver()
    request = SimpleNamespace(bootstrap_room=7, rid="the request", extra_key=None)
    receiver._broadcast_reqs_across_ranks([request])
    assert request.extra_key == "dsv4ctl-7.2"


@alone
def ranks_exchange_with_those_of_equal_parts(_: bool) -> None:
    assert [rank.own_peers(r, 2, ("a", "b")) for r in range(2)] == [("a",), ("b",)]
    assert [rank.own_peers(r, 2, ("a", "b", "c", "d")) for r in range(2)] == [("a", "b"), ("c", "d")]
    assert [rank.own_peers(r, 4, ("a", "b")) for r in range(4)] == [("a",), ("a",), ("b",), ("b",)]
    assert rank.own_peers(0, 1, ()) == ()
