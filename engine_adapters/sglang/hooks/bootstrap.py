"""How ranks hear each other: what hears lives through any frame, and its death is reported.

A prefill rank's frames begin work, and a thread waits for them. A decode rank's are of use to a turn of its loop only,
and to wake a thread costs that loop the interpreter for longer than to look: it looks itself (`Rank.attend`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.nixl.conn import GUARD, KVArgsRegisterInfo, TransferInfo
from sglang.srt.disaggregation.utils import DisaggregationMode

from dsv4ctl.controlplane.link.url import url
from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.engine_adapters.sglang import peers, rank
from dsv4ctl.engine_adapters.sglang.peers import Trailer

logger = logging.getLogger(__name__)

#: Frames that a look takes in at most: whoever sends faster must not keep the loop.
_AT_ONCE = 32


def start(manager: Any) -> None:
    """Instead of SGLang's bootstrap thread of a prefill rank."""
    here = _bound(manager)
    here.thread("bootstrap", lambda: serve(manager, here, lambda parts: from_decode(manager, here, parts)))


def listen(_: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Beside SGLang's manager of a decode rank, which does not read its socket itself."""
    if manager.disaggregation_mode == DisaggregationMode.DECODE:
        here = _bound(manager)
        _hears(manager, here, lambda parts: from_prefill(here, parts))


def listen_beside(manager: Any) -> None:
    """Instead of SGLang's listener of a decode rank: its frames and ours."""
    here = _bound(manager)

    def heard(parts: list[bytes]) -> None:
        if parts[0] == peers.MARK:
            from_prefill(here, parts)
        elif not manager.handle_chunk_ready(parts) and not manager.handle_abort_ack_message(parts):
            status = manager.parse_kv_status_message(parts)
            if status is None:
                raise ValueError(f"a frame {parts[0][:16]!r} that no decode rank knows")
            room, state, prefill_rank, reason = status
            manager.apply_prefill_status(
                bootstrap_room=room, status=state, prefill_rank=prefill_rank, failure_reason=reason
            )

    _hears(manager, here, heard)


def serve(manager: Any, here: rank.Rank, handle: Callable[[list[bytes]], None]) -> None:
    """Never returns."""
    while True:
        parts = manager.server_socket.recv_multipart()
        here.take_in()  # the room's opening, which was written before its request was sent to anybody
        _survive(here, parts, handle)


def take_in(manager: Any, here: rank.Rank, handle: Callable[[list[bytes]], None]) -> bool:
    """What has arrived by now, or the first of it: then True."""
    with suppress(zmq.Again):
        for _ in range(_AT_ONCE):
            _survive(here, manager.server_socket.recv_multipart(zmq.NOBLOCK), handle)
        return True
    return False


def _hears(manager: Any, here: rank.Rank, handle: Callable[[list[bytes]], None]) -> None:
    """By ZMQ_FD (zmq_getsockopt(3)): once the socket was read until it had nothing, that is readable if it has more."""
    here.hears(manager.server_socket.getsockopt(zmq.FD), lambda: take_in(manager, here, handle))


def _survive(here: rank.Rank, parts: list[bytes], handle: Callable[[list[bytes]], None]) -> None:
    """A frame that can't be handled is logged, counted and dropped."""
    try:
        handle(parts)
    except Exception as error:  # noqa: BLE001 - whatever a frame does, the next one is heard
        here.counters["bad_frames"] += 1
        room = parts[2][:20] if len(parts) > 2 and parts[0] == GUARD else parts[1][:20] if len(parts) > 1 else b""
        logger.warning("a frame of room %r from another rank is refused: %r", room, error)


def from_decode(manager: Any, here: rank.Rank, parts: list[bytes]) -> None:
    """One frame at a prefill rank. Raises for anything that it can't use."""
    parts, trailer = peers.split_trailer(parts)
    if trailer is None:
        raise ValueError(f"{len(parts)} parts beginning with {parts[0][:16]!r} of no rank of this control plane")
    if parts[0] == b"ABORT":
        here.rooms.heard(trailer.incarnation, _endpoint(parts[2], parts[3]))
        key = RoomKey(int(parts[1]), trailer.generation)
        here.agent.peer_abort(key, trailer.incarnation, trailer.source, trailer.reason)
        if hasattr(manager, "register_deferred_ack_target"):
            manager._handle_abort_notification(parts)  # SGLang's own acknowledgement, once its chunks have drained
        return
    if parts[0] != GUARD:
        raise ValueError(f"a frame {parts[0][:16]!r}: ABORT or {GUARD!r} expected")
    body = parts[1:]
    here.rooms.heard(trailer.incarnation, _endpoint(body[1], body[2]))
    if body[0] == b"None":
        manager._add_remote_peer(KVArgsRegisterInfo.from_zmq(body))
        return
    _destination(manager, here, TransferInfo.from_zmq(body), trailer)


def _destination(manager: Any, here: rank.Rank, info: Any, trailer: Trailer) -> None:
    if not here.rooms.destination(RoomKey(info.room, trailer.generation), trailer.incarnation):
        return
    room = here.rooms.find(info.room)
    if room is None or room.key.generation != trailer.generation:
        return  # it ended meanwhile
    infos = manager.transfer_infos[info.room] = room.infos  # not with what an older generation left
    infos[info.agent_name] = info
    if len(infos) < info.required_dst_info_num:
        return
    manager.resolve_kv_replica_factor(infos)
    prefixes = (known.decode_prefix_len for known in infos.values())
    manager.req_to_decode_prefix_len[info.room] = next((n for n in prefixes if n is not None), 0)

    def ready(half: Any) -> list[Any]:
        # Under the agent's lock: an abort comes before or after. In some releases this status undoes a failure.
        if half.live:
            manager.update_status(info.room, KVPoll.WaitingForInput)
        return []

    here.rooms.apply(room, ready)


def from_prefill(here: rank.Rank, parts: list[bytes]) -> None:
    """One frame at a decode rank. Raises ValueError for anything that it can't use."""
    match peers.decode(parts):
        case peers.Ack(key, incarnation, outcome):
            here.agent.peer_ack(key, incarnation, outcome)
        case peers.Digests() as digests:
            if not here.rooms.told_digests(digests):
                here.counters["late_digests"] += 1
                logger.info("digests of room %s: it is over here, or of another generation", digests.key)


def _bound(manager: Any) -> rank.Rank:
    here = rank.here()
    if here is None:
        raise RuntimeError("a transfer manager was made before its scheduler was attached")

    def failed(room: int, reason: str) -> None:
        manager.record_failure(room, reason)
        manager.update_status(room, KVPoll.Failed)

    here.rooms.failed = failed
    here.rooms.address = (str(manager.local_ip).encode(), str(manager.rank_port).encode())
    return here


def _endpoint(ip: bytes, port: bytes) -> str:
    return url("tcp", ip.decode("ascii"), int(port))
