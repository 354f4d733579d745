"""Digests from the seal to the commit: what was sent is what was sealed."""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.utils import FastQueue
from sglang.srt.disaggregation.nixl import conn

from dsv4ctl.controlplane.link.wire import OpenRoom, Role, RoomReport
from dsv4ctl.controlplane.rooms.states import Quiet, RoomKey, RoomState
from dsv4ctl.engine_adapters.sglang import geometry, peers, rank
from dsv4ctl.engine_adapters.sglang.hooks import bootstrap, rooms_decode, sender
from dsv4ctl.engine_adapters.sglang.peers import MARK
from dsv4ctl.engine_adapters.sglang.rooms import Room
from sglang_contract.checks import alone, check
from sglang_contract.situations import (
    COUNTS,
    LANDING,
    acks,
    check_again,
    something_to_read,
    transfer_queue,
    turn,
    world,
)
from sglang_world import LAYERS, PEER, STATE_TYPES, Manager, Queue, World, chunk

COMPARED = sum(len(pages) * COUNTS[space] for space, pages in LANDING.items())


def _buffers(made: World) -> list[tuple[tuple[str, str, int], torch.Tensor]]:
    """((space, pool, layer), buffer [pages, bytes]) of everything that a room is sent by."""
    return [
        ((space, name, layer), buffer.view(torch.uint8))
        for space, group in made.rank.pools.groups.items()
        for name, (layers, found) in group.items()
        for layer, buffer in zip(layers, found, strict=True)
    ]


class _Pair:
    """A prompt of two pages, cached on the host of a prefill rank, sent to a decode rank during its load."""

    def __init__(self, *off: str, land_first: bool = False, verdict: str | None = None) -> None:
        torch.manual_seed(5)
        prefill = World(Role.PREFILL, off, "read")
        prefill.compute(10, 11)
        for host, device in enumerate((10, 11)):
            prefill.back_up(device, host)
        prefill.compute(1, 2)  # the pages that the load will get hold something else
        pages = prefill.load_back()
        assert pages == (1, 2)
        prefill.controller.start_loading()
        if land_first:
            prefill.device.run()
        sent = self._send(prefill, pages)
        self.prefill = prefill
        self.decode = World(Role.DECODE, () if verdict is None else (verdict,), "read")
        self.decode.rank.launch = prefill.rank.launch
        key = self.decode.open(peers=("me",))
        room = self.decode.rank.rooms.find(7)
        assert room is not None
        self.decode.rank.rooms.expose(room, ["tcp://127.0.0.1:9"], LANDING)
        self._arrive(sent)
        self.queue = transfer_queue(self.decode, KVPoll.Success)
        self.key = key

    def _send(self, prefill: World, pages: tuple[int, ...]) -> list[Any]:
        """What NIXL reads at the moment of the post, and the digests that follow."""
        prefill.open()
        prefill.rank.rooms.heard(PEER, "tcp://127.0.0.1:9")
        frames = acks(prefill)
        prefill.rank.outbox.call = lambda function: function()
        queue = Queue()
        chunks = sender.Chunks(queue, Manager(), prefill.rank)
        queue.put(chunk(7, *pages, last=True))
        chunks.get()
        read = {"full": list(pages), "swa": list(pages), "state": [1]}
        self.read = {place: buffer[read[place[0]]].clone() for place, buffer in _buffers(prefill)}
        prefill.device.run()
        return [frame for _, frame in frames if isinstance(frame, peers.Digests)]

    def _arrive(self, frames: list[Any]) -> None:
        for place, buffer in _buffers(self.decode):
            buffer[list(LANDING[place[0]])] = self.read[place]
        assert len(frames) == 1
        self.decode.rank.rooms.told_digests(frames[0])


@alone
def right_bytes_pass_the_check_from_seal_to_commit(_: bool) -> None:
    pair = _Pair(land_first=True)
    turn(pair.queue)
    assert pair.decode.host.done == ["commit", 0], pair.decode.host.done
    assert pair.decode.rank.counters["digests_compared"] == COMPARED
    assert pair.decode.rank.counters["digest_mismatches"] == 0
    check_again(pair.prefill)
    assert pair.prefill.rank.counters["load_mismatches"] == 0


@alone
def digests_that_are_no_numbers_are_refused_where_they_arrive(_: bool) -> None:
    """The scheduler's own thread, which compares them, is not the one that hears of them."""
    made = world(Role.DECODE, True)
    key = made.open()
    frame = msgspec.msgpack.encode(peers.Digests(key, PEER, {"full": 1}, b"123"))
    try:
        bootstrap.from_prefill(made.rank, [MARK, frame])
    except ValueError:
        assert not made.rank.rooms.find(7).told
    else:
        raise AssertionError("three bytes are taken for the digests of a page")


@alone
def digests_of_a_room_that_is_over_are_no_bad_frame(_: bool) -> None:
    made = world(Role.DECODE, True)
    key = made.open()
    for known, late in ((key, 0), (RoomKey(key.room, key.generation + 1), 1)):
        frame = msgspec.msgpack.encode(peers.Digests(known, PEER, {"full": 1}, bytes(8)))
        bootstrap.from_prefill(made.rank, [MARK, frame])
        assert made.rank.counters["late_digests"] == late
    frame = msgspec.msgpack.encode(peers.Digests(key, "another", {"full": 1}, bytes(8)))
    try:
        bootstrap.from_prefill(made.rank, [MARK, frame])
    except ValueError:
        assert set(made.rank.rooms.find(7).told) == {PEER}
    else:
        raise AssertionError("digests of a rank that does not write to the room are taken")


@alone
def stale_bytes_of_an_early_send_are_a_verdict(_: bool) -> None:
    pair = _Pair("sender_ticket")
    turn(pair.queue)
    assert pair.decode.host.done == [], pair.decode.host.done
    assert pair.decode.rank.counters["digest_mismatches"] == 2 * COUNTS["full"]
    assert pair.decode.states(pair.key)[-1] is not RoomState.VERIFIED
    pair.decode.rank.agent.peer_ack(pair.key, "me", Quiet.QUIET)
    turn(pair.queue)
    assert pair.decode.host.done == ["released", 0], pair.decode.host.done


@check
def state_that_did_not_arrive_is_a_verdict(hooked: bool) -> None:
    for space, name in (("swa", "swa_kv"), ("swa", "c4_state"), ("swa", "index_state"), ("state", "c128_state")):
        pair = _Pair(land_first=True)
        buffer = next(buffer for place, buffer in _buffers(pair.decode) if place[:2] == (space, name))
        buffer[LANDING[space][-1], 7] ^= 1
        if not hooked:
            rank._Process.rank = None
        turn(pair.queue)
        assert pair.decode.host.done == [], (name, pair.decode.host.done)
        assert pair.decode.rank.counters["digest_mismatches"] == 1


@alone
def rooms_that_arrive_together_have_each_its_own_digests(_: bool) -> None:
    made = World(Role.DECODE, (), "read")
    made.compute(3, 4, 5)
    rooms = [{"full": (3, 4), "swa": (5,), "state": (1,)}, {"full": (5,), "swa": (4, 3)}, {"full": (4,)}]
    together = [found.get().tolist() for found in made.rank.digests.landed(rooms)]
    assert together == [made.rank.digests.landed([room])[0].get().tolist() for room in rooms]
    assert [len(values) for values in together] == [2 * 5 + 8 + 1, 5 + 2 * 8, 5]


@alone
def the_same_digests_of_other_pages_are_a_difference(_: bool) -> None:
    digests, found = World(Role.DECODE, (), "read").rank.digests, np.arange(40, dtype="<u8")
    room = Room(OpenRoom(RoomKey(7, 1), "request", None, "other", (PEER,), {"ack": 10.0}, "read"))
    room.destination = {"full": (1,) * 8}
    for pages, wrong in (({"full": 8}, []), ({"swa": 5}, [("full", -1, 0), ("swa", -1, 5)])):
        told = peers.Digests(room.key, PEER, pages, found.tobytes())
        assert sorted(rooms_decode._differences(digests, room, found, told)) == wrong


@alone
def window_that_a_writer_did_not_send_is_a_verdict(_: bool) -> None:
    pair = _Pair(land_first=True)
    room = pair.decode.rank.rooms.find(7)
    assert room is not None
    room.destination["swa"] = (8, 9, 10)
    room.found = None
    turn(pair.queue)
    assert pair.decode.host.done == [], pair.decode.host.done
    assert pair.decode.rank.counters["digest_mismatches"] == 1


@alone
def everything_that_a_room_is_sent_by_has_digests(_: bool) -> None:
    made = World(Role.PREFILL, (), "read")
    pool, groups = made.kvcache, made.rank.pools.groups
    own = getattr(pool, "get_c128_state_buf_infos", None) or pool.get_request_state_buf_infos
    registered = {"full": pool.get_contiguous_buf_infos(), "swa": pool.get_state_buf_infos(), "state": own()}
    for space, (addresses, _, item_bytes) in registered.items():
        buffers = [buffer for _, found in groups[space].values() for buffer in found]
        assert [(buffer.data_ptr(), buffer[0].nbytes) for buffer in buffers] == [
            *zip(addresses, item_bytes, strict=True)
        ]
        assert len(buffers) == COUNTS[space]
    args = SimpleNamespace()
    utils.setup_state_kv_args(args, pool)
    pages = {"swa": (3, 4), "state": (1,)}
    assert geometry.state_pages(args.state_types, [[3, 4], [1]]) == pages
    sent = [count * len(pages[space]) for space, count in zip(pages, map(sum, args.state_item_lens), strict=True)]
    assert sum(made.rank.pools.bytes_of(pages).values()) == sum(sent)


@check
def room_knows_its_bytes_by_pool(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    key, queue = made.open(), Queue()
    chunks = sender.Chunks(queue, Manager(), made.rank) if hooked else queue
    queue.put(chunk(7, 3))
    queue.put(chunk(7, 4, 5, last=True))
    chunks.get()
    with contextlib.suppress(Queue.Empty):
        chunks.get()
        chunks.get()
    reports = [frame.detail for frame in made.frames if isinstance(frame, RoomReport) and frame.key == key]
    told = {name: size for detail in reports for name, size in detail.get("bytes_by_pool", {}).items()}
    pool = made.kvcache
    item = {name: pool.get_contiguous_buf_infos()[2][at] for name, at in (("c4_kv", 0), ("index_k", 2), ("c128_kv", 4))}
    assert [told.get(name) for name in item] == [3 * 2 * item["c4_kv"], 3 * 2 * item["index_k"], 3 * item["c128_kv"]]
    assert set(told) == {*item, "swa_kv", "c4_state", "index_state", "c128_state"}
    assert told["swa_kv"] == 2 * LAYERS * pool.get_state_buf_infos()[2][0], "the window goes with the last chunk"


@alone
def chunk_of_sglang_says_all_that_is_sent_for_it(_: bool) -> None:
    made = World(Role.PREFILL, (), "read")
    made.compute(3, 4)
    made.open()
    room, fast = made.rank.rooms.find(7), FastQueue()
    manager = object.__new__(conn.NixlKVManager)
    manager.__dict__.update(
        disaggregation_mode=utils.DisaggregationMode.PREFILL,
        enable_staging=False,
        transfer_queues=[fast],
        transfer_infos={7: {"agent": SimpleNamespace(dst_port=0)}},
        kv_args=SimpleNamespace(state_types=STATE_TYPES),
    )
    chunks = sender.Chunks(fast, manager, made.rank)
    more = {"chunk_id": 0} if "chunk_id" in inspect.signature(manager.add_transfer_request).parameters else {}
    full, *states = (np.array(pages, dtype=np.int32) for pages in ([3, 4], [4], [1]))
    manager.add_transfer_request(7, full, slice(0, 2), True, aux_index=0, state_indices=states, **more)
    assert chunks.get().room == 7
    assert room is not None
    assert room.source == {"full": (3, 4), "swa": (4,), "state": (1,)}
    assert room.sealed is not None
    assert room.sealed.get().tolist() == made.rank.digests.landed([room.source])[0].get().tolist()


@alone
def verdict_off_counts_and_goes_on(_: bool) -> None:
    pair = _Pair("sender_ticket", verdict="verdict")
    turn(pair.queue)
    assert pair.decode.host.done == ["commit", 0], pair.decode.host.done
    assert pair.decode.rank.counters["digest_mismatches"] == 2 * COUNTS["full"]


def _landed_untold() -> tuple[_Pair, Room, dict[str, peers.Digests]]:
    """A pair whose bytes are in place, its room on decode, and the digests that it has not heard of."""
    pair = _Pair(land_first=True)
    room = pair.decode.rank.rooms.find(7)
    assert room is not None
    told, room.told = room.told, {}
    return pair, room, told


@alone
def commit_waits_for_the_digests(_: bool) -> None:
    pair, room, told = _landed_untold()
    turn(pair.queue)
    assert pair.decode.host.done == [], "committed before the digests came"
    room.told = told
    turn(pair.queue)
    assert pair.decode.host.done == ["commit", 0], pair.decode.host.done


@alone
def digests_that_come_a_moment_after_the_bytes_are_heard_in_the_same_turn(_: bool) -> None:
    pair, room, told = _landed_untold()
    pair.decode.rank.hears(something_to_read(), lambda: bool(room.told.update(told)))
    turn(pair.queue)
    assert pair.decode.host.done == ["commit", 0], pair.decode.host.done
