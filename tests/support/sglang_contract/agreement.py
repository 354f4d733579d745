"""What all ranks of an engine do alike."""

from __future__ import annotations

from types import SimpleNamespace

from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.managers.io_struct import AbortReq

from dsv4ctl.controlplane.link.wire import OpenRoom, Role
from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.engine_adapters.sglang import rank
from sglang_contract.checks import alone, check, needs
from sglang_contract.situations import exposed, prealloc_queue, request_receiver, world
from sglang_world import PEER


@needs("hooks.agreement:handshake_waiters")
@check
def every_rank_enters_the_handshake_reduction(hooked: bool) -> None:
    made = world(Role.DECODE, hooked)
    entered: list[int] = []
    stock = decode.poll_and_all_reduce
    decode.poll_and_all_reduce = lambda pollers, group: entered.append(1) or [KVPoll.WaitingForInput] * len(pollers)
    queue = prealloc_queue(waiting=True)
    try:
        queue._update_handshake_waiters()
    finally:
        decode.poll_and_all_reduce = stock
    assert entered, "the reduction was left out"
    assert queue.queue[0].waiting_for_input
    assert made.rank is not None


@check
def aborts_of_the_link_are_applied_where_every_rank_takes_part(hooked: bool) -> None:
    made = world(Role.DECODE, hooked)
    key = exposed(made)
    receiver = request_receiver(tp_size=1)
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
    receiver = request_receiver(tp_size=1)
    request = SimpleNamespace(bootstrap_room=7, rid="the request", extra_key=None)
    receiver._broadcast_reqs_across_ranks([request])
    assert request.extra_key == "dsv4ctl-7.2"


@alone
def ranks_exchange_with_those_of_equal_parts(_: bool) -> None:
    assert [rank.own_peers(r, 2, ("a", "b")) for r in range(2)] == [("a",), ("b",)]
    assert [rank.own_peers(r, 2, ("a", "b", "c", "d")) for r in range(2)] == [("a", "b"), ("c", "d")]
    assert [rank.own_peers(r, 4, ("a", "b")) for r in range(4)] == [("a",), ("a",), ("b",), ("b",)]
    assert rank.own_peers(0, 1, ()) == ()
