"""Rooms of a decode rank: pages and slots until the writers are quiet, and what is committed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.utils.network import NetworkAddress

from dsv4ctl.controlplane.link.url import url
from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.controlplane.rooms.states import Quiet, RoomKey, RoomState
from dsv4ctl.engine_adapters.sglang.hooks import rooms_decode
from sglang_contract.checks import alone, check, needs
from sglang_contract.situations import LANDING, exposed, transfer_queue, turn, world
from sglang_world import PEER, Manager


@check
def failed_room_keeps_its_pages_and_slot_until_the_writer_acknowledged(hooked: bool) -> None:
    made = world(Role.DECODE, hooked)
    key = exposed(made)
    queue = transfer_queue(made, KVPoll.Failed)
    turn(queue)
    assert made.host.done == [], made.host.done
    assert made.rank.rooms.held_pages() == 2
    made.rank.agent.peer_ack(RoomKey(7, 0), PEER, Quiet.QUIET)
    turn(queue)
    assert made.host.done == [], "an ack of an older generation gave the pages back"
    assert made.rank.counters["late_acks"] == 1
    made.rank.agent.peer_ack(key, PEER, Quiet.QUIET)
    turn(queue)
    assert made.host.done == ["released", 0], made.host.done


@needs("hooks.rooms_decode:abort_ack")
@alone
def own_acknowledgement_of_sglang_counts(_: bool) -> None:
    made = world(Role.DECODE, True)
    exposed(made)
    queue = transfer_queue(made, KVPoll.Failed)
    manager = queue.queue[0].kv_receiver.kv_mgr
    manager._deferred_abort_generation = 4
    generation = manager.register_deferred_abort_room(7)
    turn(queue)
    manager.note_abort_ack(7, 0, generation - 1)
    _turn_held(queue)
    assert made.host.done == [], "an acknowledgement of an older generation gave the pages back"
    manager.note_abort_ack(7, 0, generation)
    _turn_held(queue)
    assert made.host.done == ["released", 0], made.host.done


def _turn_held(queue: Any) -> None:
    queue.resolve_deferred_releases()


@check
def failed_room_waits_for_every_writer(hooked: bool) -> None:
    made = world(Role.DECODE, hooked)
    key = made.open(peers=("a", "b"))
    made.rank.agent.apply(key, lambda half: half.expose())
    queue = transfer_queue(made, KVPoll.Failed)
    made.rank.agent.peer_ack(key, "a", Quiet.QUIET)
    turn(queue)
    assert made.host.done == [], made.host.done
    made.rank.agent.peer_ack(key, "b", Quiet.QUIET)
    turn(queue)
    assert made.host.done == ["released", 0]


@check
def foreign_metadata_is_a_verdict_before_the_commit(hooked: bool) -> None:
    made = world(Role.DECODE, hooked)
    exposed(made)
    queue = transfer_queue(made, KVPoll.Success, written=8)
    turn(queue)
    assert made.host.done == [], made.host.done
    assert made.rank.counters["metadata_mismatches"] == 1


@check
def writers_are_told_where_each_space_lands(hooked: bool) -> None:
    made = world(Role.DECODE, hooked)
    key = made.open()
    manager = Manager()
    manager.__dict__.update(enable_staging=False, transfer_statuses={7: SimpleNamespace(expects_state=False)})
    receiver = object.__new__(conn.NixlKVReceiver)
    receiver.__dict__.update(kv_mgr=manager, bootstrap_room=7, bootstrap_addr="host:1", bootstrap_infos=[])
    pages = [np.array(numbers, dtype=np.int32) for numbers in ([5, 6], [8, 9], [2])]
    receiver.send_metadata(pages[0], 3, pages[1:], decode_prefix_len=0)
    room = made.rank.rooms.find(7)
    assert room is not None
    assert room.destination == LANDING
    assert room.exposed
    made.abort(key)
    assert receiver.send_metadata(pages[0], 3, pages[1:], decode_prefix_len=0) is None
    assert manager.request_status[7] == KVPoll.Failed, "an aborted room is not exposed again"


def _gives_back(finished: bool) -> None:
    request = SimpleNamespace(bootstrap_room=7, finished=lambda: finished)
    assert rooms_decode.released(lambda request: "released", request) == "released"


@alone
def room_ends_as_its_request_gives_its_pages_back(_: bool) -> None:
    for aborted, finished, end in ((False, True, RoomState.CLOSED), (True, False, RoomState.ABORTED)):
        made = world(Role.DECODE, True)
        key = exposed(made)
        room = made.rank.rooms.find(7)
        made.rank.rooms.landed(room)
        made.rank.rooms.forward_begin(7)
        _gives_back(False)
        assert made.states(key)[-1] is RoomState.DECODING, "it was retracted"
        if aborted:
            made.abort(key)
            assert made.states(key)[-1] is RoomState.QUIESCING
        _gives_back(finished)
        assert made.states(key)[-1] is end
        assert (made.rank.rooms.find(7), room.forwards) == (None, 0)


@alone
def room_of_a_single_engine_ends_with_its_last_forward(_: bool) -> None:
    for forwards in (1, 2):
        made = world(Role.SINGLE, True)
        key = made.open(peers=())
        for _ in range(forwards):
            made.rank.rooms.forward_begin(7)
        for left in range(forwards - 1, -1, -1):
            assert made.states(key)[-1] is RoomState.LOADING
            _gives_back(True)
            assert (made.rank.rooms.find(7) is None) == (left == 0)
        assert made.states(key)[-2:] == [RoomState.DECODING, RoomState.CLOSED]


@alone
def good_room_is_committed(_: bool) -> None:
    made = world(Role.DECODE, True)
    key = exposed(made)
    queue = transfer_queue(made, KVPoll.Success)
    turn(queue)
    assert made.host.done == ["commit", 0], made.host.done
    assert made.states(key)[-1] is RoomState.VERIFIED


@alone
def room_that_is_aborted_as_it_lands_quiesces(_: bool) -> None:
    made = world(Role.DECODE, True)
    key = exposed(made)
    made.abort(key)
    assert made.states(key)[-1] is RoomState.QUIESCING
    made.rank.rooms.landed(made.rank.rooms.find(7))
    assert made.states(key)[-1] is RoomState.ABORTED


@alone
def writers_listen_where_sglang_says(_: bool) -> None:
    for ip in ("127.0.0.1", "node-1", "fd00::7", "[fd00::7]", "fe80::7%eth0"):
        assert url("tcp", ip, 5) == NetworkAddress(ip, 5).to_tcp()
