"""Frames between ranks: destinations, aborts and their acknowledgements, whatever else arrives."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import traceback
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
import zmq
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.disaggregation.utils import DisaggregationMode

from dsv4ctl.controlplane.link.wire import Fenced, LoopStatus, Role, RoomReport
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomState
from dsv4ctl.engine_adapters.sglang import peers
from dsv4ctl.engine_adapters.sglang.hooks import bootstrap, rooms_decode, sender
from dsv4ctl.engine_adapters.sglang.peers import MARK, Ack, Trailer
from sglang_contract.checks import alone, check, needs
from sglang_contract.situations import acks, exposed, something_to_read, world
from sglang_world import PEER, Manager, Queue, World, chunk

BAD_FRAMES: list[list[bytes]] = [
    [b""],
    [b"hello"],
    [b"ABORT"],
    [b"ABORT", b"seven", b"127.0.0.1", b"5", MARK, b"\x80"],
    [conn.GUARD, b"7"],
    [conn.GUARD, b"7", b"127.0.0.1", b"1", b"agent", b"odd", b"0", b"1", b"", b""],
    [b"WATERMARK", b"1"],
]
_NUMBERS = itertools.count()


class _End(BaseException):
    pass


class _Socket:
    def __init__(self, frames: list[list[bytes]]) -> None:
        self._frames = iter(frames)

    def recv_multipart(self) -> list[bytes]:
        for frame in self._frames:
            return frame
        raise _End


def bootstrapped(made: World, hooked: bool, frames: list[list[bytes]]) -> Any:
    """A prefill rank's manager that heard these frames."""
    manager = Manager()
    manager.__dict__.update(
        server_socket=_Socket(frames),
        local_ip="127.0.0.1",
        rank_port=5,
        enable_staging=False,
        req_to_decode_prefix_len={},
        resolve_kv_replica_factor=lambda infos: None,
        _handle_abort_notification=lambda parts: parts[0] == b"ABORT",
    )
    try:
        if hooked:
            bootstrap._bound(manager)
            bootstrap.serve(manager, made.rank, lambda parts: bootstrap.from_decode(manager, made.rank, parts))
        else:
            conn.threading = SimpleNamespace(Thread=lambda target: SimpleNamespace(start=target))
            conn.NixlKVManager._start_bootstrap_thread.__wrapped__(manager)
    except _End:
        pass
    except Exception:  # noqa: BLE001 - what stock's thread ends with
        traceback.print_exc()
    finally:
        conn.threading = threading
    return manager


def destination(room: int) -> list[bytes]:
    pages = torch.tensor([3, 4], dtype=torch.int32).numpy().tobytes()
    frame = [conn.GUARD, str(room).encode(), b"127.0.0.1", b"9", b"agent", pages, b"0", b"1", b"", b"0"]
    return peers.with_trailer(frame, Trailer(PEER, 1))


@check
def bootstrap_loop_lives_through_any_frame(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    key = made.open()
    manager = bootstrapped(made, hooked, [*BAD_FRAMES, destination(7)])
    assert 7 in manager.transfer_infos, "the good frame after bad ones was not heard"
    assert made.rank.counters["bad_frames"] == len(BAD_FRAMES)
    assert made.states(key)[-1] is RoomState.BOOTSTRAPPING


def _posted(made: World, manager: Manager, *queued: Any) -> tuple[list[Any], sender.Chunks]:
    """What the rank acknowledges to a peer that it knows, and its chunks, of which the first is being written."""
    sent = acks(made)
    made.rank.rooms.heard(PEER, "tcp://127.0.0.1:9")
    chunks = sender.Chunks(Queue(*queued), manager, made.rank)
    chunks.get()
    return sent, chunks


@alone
def abort_of_a_room_is_acknowledged_when_its_writes_have_ended(_: bool) -> None:
    made = world(Role.PREFILL, True)
    key, manager = made.open(), Manager()
    sent, chunks = _posted(made, manager, chunk(7, 3), chunk(7, 4))
    made.rank.agent.peer_abort(key, PEER, AbortSource.CLIENT, "gone")
    assert not sent, "acknowledged with a write in flight"
    with contextlib.suppress(Queue.Empty):
        chunks.get()
    assert [frame for _, frame in sent] == [Ack(key, "me", Quiet.QUIET)]
    assert manager.request_status[7] == KVPoll.Failed, "a chunk of an aborted room is not posted"


@alone
def a_decode_ranks_abort_says_where_it_began(_: bool) -> None:
    """Whether a request is sent again is decided by that, and a prefill rank may be the first to report the abort."""
    decode, prefill = world(Role.DECODE, True), world(Role.PREFILL, True)
    decode.open()
    room = decode.rank.rooms.find(7)
    decode.rank.rooms.expose(room, ["tcp://127.0.0.1:9"], {"full": (3,)})
    decode.rank.rooms.address = (b"127.0.0.1", b"9")
    sent: list[list[bytes]] = []
    decode.rank.outbox.send = lambda endpoint, parts: sent.append(parts)
    decode.rank.rooms.fail(7, "page digests differ", AbortSource.INTEGRITY)
    prefill.open(peers=("me",))
    bootstrap.from_decode(Manager(), prefill.rank, sent[0])
    told = [frame.detail for frame in prefill.frames if isinstance(frame, RoomReport) and "source" in frame.detail]
    assert (told[0]["source"], told[0]["reason"]) == ("integrity", "page digests differ"), told


@alone
def poisoned_room_is_never_acknowledged_as_quiet(_: bool) -> None:
    made = world(Role.PREFILL, True)
    key, manager = made.open(), Manager()
    sent, chunks = _posted(made, manager, chunk(7, 3))
    manager.exceptions[7] = RuntimeError("NIXL transfer encountered ERR")
    with contextlib.suppress(Queue.Empty):
        chunks.get()
    assert [frame for _, frame in sent] == [Ack(key, "me", Quiet.POISONED)]
    assert made.rank.rooms.held(7), "the source pages of a poisoned room are given back"


@alone
def destinations_of_an_older_generation_are_forgotten(_: bool) -> None:
    made = world(Role.PREFILL, True)
    manager = Manager()
    manager.__dict__.update(resolve_kv_replica_factor=lambda infos: None, transfer_infos={7: {"gone": None}})
    made.open()
    info = SimpleNamespace(room=7, agent_name="here", required_dst_info_num=1, decode_prefix_len=None)
    bootstrap._destination(manager, made.rank, info, Trailer(PEER, 1))
    assert manager.transfer_infos == {7: {"here": info}}


@alone
def abort_while_a_destination_is_taken_in_is_not_undone(_: bool) -> None:
    made = world(Role.PREFILL, True)
    key, manager = made.open(), Manager()
    manager.__dict__.update(local_ip="127.0.0.1", rank_port=5, resolve_kv_replica_factor=lambda infos: made.abort(key))
    bootstrap._bound(manager)
    info = SimpleNamespace(room=7, agent_name="here", required_dst_info_num=1, decode_prefix_len=None)
    bootstrap._destination(manager, made.rank, info, Trailer(PEER, 1))
    assert made.states(key)[-1] is RoomState.ABORTED
    assert manager.request_status == {7: KVPoll.Failed}


@alone
def nothing_is_kept_of_a_fenced_peer(_: bool) -> None:
    for role in (Role.PREFILL, Role.DECODE):
        made = world(role, True)
        key, endpoint = made.open(peers=(PEER, "other")), "tcp://127.0.0.1:9"
        if role is Role.PREFILL:
            made.rank.rooms.heard(PEER, endpoint)
        else:
            made.rank.rooms.expose(made.rank.rooms.find(7), [endpoint, "tcp://127.0.0.1:10"], {"full": (5,)})
        made.rank.outbox.send(endpoint, [b"frame"])
        made.rank._on_frame(Fenced(PEER))
        made.rank.rooms.tick()
        made.rank.agent.peer_abort(key, PEER, AbortSource.CLIENT, "gone")
        kept: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        made.rank.outbox.call(lambda kept=kept, made=made: kept.put(list(made.rank.outbox._sockets)))
        assert endpoint not in kept.get(timeout=60)
        assert PEER not in made.rank.rooms._endpoints


@alone
def destination_of_an_unknown_room_is_answered_with_an_ack(_: bool) -> None:
    made = world(Role.PREFILL, True)
    sent = acks(made)
    manager = bootstrapped(made, True, [destination(99)])
    assert not manager.transfer_infos
    assert [frame.outcome for _, frame in sent] == [Quiet.QUIET]


def _listening(mode: DisaggregationMode = DisaggregationMode.DECODE) -> tuple[Any, Any]:
    """A manager that the hooks of this release made hear, and a socket to it: what is sent there has arrived."""
    context, manager = zmq.Context.instance(), object.__new__(conn.NixlKVManager)
    there, here = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    address = f"inproc://{next(_NUMBERS)}"
    there.bind(address)
    here.connect(address)
    manager.__dict__.update(
        server_socket=there,
        local_ip="127.0.0.1",
        rank_port=5,
        disaggregation_mode=mode,
        request_status={},
        failure_records={},
        failure_lock=threading.Lock(),
    )
    if hasattr(manager, "_start_decode_listener_thread"):
        bootstrap.listen_beside(manager)
    else:
        bootstrap.listen(None, manager)
    return manager, here


@alone
def decode_rank_hears_in_its_turns_and_wakes_no_thread(_: bool) -> None:
    threads = {thread.ident for thread in threading.enumerate()}
    made = world(Role.DECODE, True)
    key = exposed(made)
    _, socket = _listening()
    made.abort(key)
    bad = [[b""], [b"hello"], [MARK], [MARK, b"\x80"]]
    for frame in [*bad, [MARK, msgspec.msgpack.encode(Ack(key, PEER, Quiet.QUIET))]]:
        socket.send_multipart(frame)
    made.rank.step()
    assert made.states(key)[-1] is RoomState.QUIESCING, "heard before all ranks agreed on the turn"
    at_stock = rooms_decode.queues(lambda scheduler: made.states(key)[-1], made.scheduler)
    assert at_stock is RoomState.ABORTED
    assert made.rank.counters["bad_frames"] == len(bad)
    new = {thread.name for thread in threading.enumerate() if thread.ident not in threads}
    assert new == {"dsv4ctl-peers", "dsv4ctl-queries"}, new


@alone
def who_sends_faster_than_a_rank_listens_does_not_keep_its_loop(_: bool) -> None:
    made = world(Role.DECODE, True)
    _, socket = _listening()
    for _ in range(100):
        socket.send_multipart([b"hello"])
    found = []
    for _ in range(4):
        made.rank.attend()
        found.append(made.rank.counters["bad_frames"])
    assert found == [32, 64, 96, 100]
    made.rank._hear = mock.Mock()
    made.rank.attend()
    made.rank._hear.assert_not_called()  # it would find nothing
    socket.send_multipart([b"hello"])
    made.rank.attend()
    made.rank._hear.assert_called_once_with()


@needs("hooks.bootstrap:listen_beside")
@alone
def frames_of_sglangs_own_are_heard_beside_ours(_: bool) -> None:
    made = world(Role.DECODE, True)
    manager, socket = _listening()
    told: list[Any] = []
    manager.apply_prefill_status = lambda **status: told.append(status)
    tag = [] if manager.kv_status_msg_tag is None else [manager.kv_status_msg_tag]
    socket.send_multipart([*tag, b"7", str(int(KVPoll.Success)).encode(), b"1"])
    made.rank.attend()
    success = {"bootstrap_room": 7, "status": KVPoll.Success, "prefill_rank": 1, "failure_reason": None}
    assert told == [success], told
    assert not made.rank.counters["bad_frames"]


@needs("hooks.bootstrap:listen")
@alone
def socket_of_a_prefill_rank_is_its_threads(_: bool) -> None:
    made = world(Role.PREFILL, True)
    manager, socket = _listening(DisaggregationMode.PREFILL)
    socket.send_multipart([b"hello"])
    made.rank.attend()
    assert manager.server_socket.poll(0)


@alone
def one_thread_attends_and_no_other_waits_for_it(_: bool) -> None:
    made = world(Role.DECODE, True)
    heard: list[int] = []

    def hear() -> bool:
        heard.append(1)
        made.rank.attend()  # as another thread would
        return False

    made.rank.hears(something_to_read(), hear)
    made.rank.attend()
    made.rank.attend()
    assert heard == [1, 1]


@alone
def a_rank_that_can_not_hear_any_more_says_so_once_and_ends(_: bool) -> None:
    made = world(Role.DECODE, True)
    told: list[Any] = []

    def hear() -> bool:
        raise OSError("the socket is gone")

    made.rank.hears(something_to_read(), hear)
    made.rank._loops["agent"] = LoopStatus(3)
    made.rank.report = lambda: told.append(made.rank._loops["agent"])
    made.rank.flush = lambda: told.append("flushed")
    made.rank.end = told.append
    for attending in range(2):
        try:
            rooms_decode.queues(lambda scheduler: told.append("served on"), made.scheduler)
        except OSError:
            continue
        raise AssertionError(f"served on, {attending}")
    why = "the agent thread died: OSError: the socket is gone"
    assert told == [LoopStatus(3, why), "flushed", why], told
    made.rank.ran("agent")
    assert made.rank._loops["agent"] == LoopStatus(4, why)
