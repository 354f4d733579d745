"""The agent of a rank: each abort acknowledged once and each page set released once, whatever came when."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dsv4ctl.controlplane.link.codec import FrameError
from dsv4ctl.controlplane.link.wire import (
    AbortAck,
    Answer,
    Fenced,
    Quarantined,
    Query,
    Received,
    Refused,
    Role,
    RoomReport,
    SetGuards,
)
from dsv4ctl.controlplane.rooms.effects import Refusal
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey, RoomState
from dsv4ctl.controlplane.rooms.table import RoomTable
from dsv4ctl.controlplane.rooms.writer import Writer
from dsv4ctl.controlplane.tickets.types import Consumer, Guard, TicketState
from dsv4ctl.engine_adapters.agent import QUARANTINE_SHARE, UnknownRoomError
from small_agent import ACK_SECONDS, KEY, SmallAgent, reach

CLIENT = AbortSource.CLIENT
WRITER_STATES = [RoomState.ALLOCATED, RoomState.BOOTSTRAPPING, RoomState.LOADING, RoomState.SENDING]
READER_STATES = [
    *(RoomState.ALLOCATED, RoomState.BOOTSTRAPPING, RoomState.LANDED, RoomState.VERIFIED, RoomState.DECODING)
]


@pytest.fixture
def prefill() -> SmallAgent:
    return SmallAgent(Role.PREFILL)


@pytest.fixture
def decode() -> SmallAgent:
    return SmallAgent(Role.DECODE)


def quiesce(agent: SmallAgent) -> None:
    """Everything that the room may still wait for ends."""
    endings: list[Any] = [lambda half: half.forward_end()]
    if agent._role is Role.PREFILL:
        endings.append(lambda half: half.written(True))
    else:
        agent.peer_ack(KEY, "peer", Quiet.QUIET)
    for ending in endings:
        try:
            agent.apply(KEY, ending)
        except (Refusal, UnknownRoomError):
            continue


@pytest.mark.parametrize(
    ("role", "state"),
    [(Role.PREFILL, s) for s in WRITER_STATES] + [(Role.DECODE, s) for s in READER_STATES],
)
@pytest.mark.parametrize("source", ["control plane", "engine", "peer"])
def test_an_abort_in_any_state_is_acked_once_and_releases_once(role: Role, state: RoomState, source: str) -> None:
    """Reports 10 and 17."""
    agent = SmallAgent(role)
    reach(agent, state)
    assert agent.reported()[-1] is state
    for _ in range(2):
        if source == "control plane":
            agent.told_to_abort()
        elif source == "engine":
            agent.abort(KEY, CLIENT, "left")
        else:
            agent.peer_abort(KEY, "peer", CLIENT, "left")
    quiesce(agent)
    assert agent.calls("release") == [(KEY,)]
    assert len(agent.calls("dropped")) == 1
    states = agent.reported()
    assert states.count(RoomState.ABORTING) == states.count(RoomState.ABORTED) == 1
    assert agent.rooms() == []
    if source != "control plane":
        assert agent.acks() == [AbortAck(KEY, Quiet.QUIET)]
        agent.told_to_abort()  # the control plane learns of it and asks all the same
    assert set(agent.acks()) == {AbortAck(KEY, Quiet.QUIET)}
    if role is Role.PREFILL:
        assert set(agent.calls("ack_peer")) == {(KEY, "peer", Quiet.QUIET)}


def test_a_repeated_abort_frame_is_applied_once_and_reported_each_time(decode: SmallAgent) -> None:
    decode.open()
    decode.told_to_abort(seq=1)
    decode.told_to_abort(seq=1)
    assert [frame for frame in decode.sent if isinstance(frame, Received)] == [Received(1), Received(1)]
    assert len(decode.acks()) == 1


def test_aborts_that_overtake_each_other_are_applied_in_order(decode: SmallAgent) -> None:
    for number in (1, 2):
        decode.open(RoomKey(number, 1))
    decode.told_to_abort(RoomKey(2, 1), seq=2)
    assert decode.acks() == []
    decode.told_to_abort(RoomKey(1, 1), seq=1)
    assert [ack.key.room for ack in decode.acks()] == [1, 2]


@pytest.mark.parametrize("role", list(Role))
def test_an_abort_of_an_unknown_room_is_acked_and_remembered(role: Role) -> None:
    agent = SmallAgent(role)
    agent.told_to_abort()
    assert agent.acks() == [AbortAck(KEY, Quiet.QUIET)]
    agent.open()
    assert agent.reported() == [RoomState.ABORTING, RoomState.ABORTED]
    assert agent.calls("release") == [(KEY,)]
    assert agent.rooms() == []


def test_a_tombstone_does_not_live_for_ever(decode: SmallAgent) -> None:
    decode.told_to_abort()
    decode.now += 3600.0
    decode.tick()
    decode.open()
    assert decode.reported() == [RoomState.ALLOCATED]


def test_an_abort_of_an_ended_room_is_acked_as_it_ended(prefill: SmallAgent) -> None:
    prefill.open()
    prefill.apply(KEY, Writer.post)
    prefill.apply(KEY, lambda half: half.written(False))
    assert prefill.acks() == [AbortAck(KEY, Quiet.POISONED)]
    prefill.told_to_abort()
    prefill.peer_abort(KEY, "peer", CLIENT, "left")
    assert prefill.acks()[-1] == AbortAck(KEY, Quiet.POISONED)
    assert prefill.calls("ack_peer")[-1] == (KEY, "peer", Quiet.POISONED)


def test_a_peers_abort_of_an_unknown_room_is_acked_and_buried(prefill: SmallAgent) -> None:
    prefill.peer_abort(KEY, "peer", CLIENT, "left")
    assert prefill.calls("ack_peer") == [(KEY, "peer", Quiet.QUIET)]
    prefill.open()
    assert prefill.reported() == [RoomState.ABORTING, RoomState.ABORTED]
    with pytest.raises(UnknownRoomError):
        prefill.apply(KEY, Writer.post)


def test_both_readers_of_a_room_are_acked(prefill: SmallAgent) -> None:
    prefill.open(KEY, "D0", "D1")
    prefill.apply(KEY, Writer.post)
    prefill.peer_abort(KEY, "D0", CLIENT, "left")
    prefill.peer_abort(KEY, "D1", CLIENT, "left")
    assert prefill.calls("ack_peer") == []
    prefill.apply(KEY, lambda half: half.written(True))
    assert prefill.calls("ack_peer") == [(KEY, "D0", Quiet.QUIET), (KEY, "D1", Quiet.QUIET)]


# ---- rooms -----------------------------------------------------------------------------------------------


def test_a_generation_is_opened_once(decode: SmallAgent) -> None:
    decode.open()
    decode.open()  # the frame again: the room lives, so nothing may be said that ends it
    assert decode.counters["repeated_rooms"] == 1
    assert decode.reported() == [RoomState.ALLOCATED]
    decode.open(RoomKey(7, 2))
    assert decode.sent[-1] == AbortAck(RoomKey(7, 2), Quiet.QUIET)
    assert isinstance(decode.sent[-2], RoomReport)
    assert "generation 1 lives here" in decode.sent[-2].detail["reason"]
    decode.abort(KEY, CLIENT, "left")
    decode.open()
    assert decode.counters["refused_rooms"] == 2
    assert decode.calls("opened") == [(KEY,)]


def test_a_late_ack_is_counted_and_frees_nothing(decode: SmallAgent) -> None:
    """sglang#37077: abort of generation 1, reuse, then the ack of generation 1."""
    decode.open(RoomKey(7, 2))
    decode.apply(RoomKey(7, 2), Reader.expose)
    decode.abort(RoomKey(7, 2), CLIENT, "left")
    decode.peer_ack(KEY, "peer", Quiet.QUIET)
    assert decode.counters["late_acks"] == 1
    assert decode.calls("release") == []
    decode.peer_ack(RoomKey(7, 2), "peer", Quiet.QUIET)
    assert decode.counters["repeated_acks"] == 0
    decode.peer_ack(RoomKey(7, 2), "peer", Quiet.QUIET)  # told twice, it acks twice
    assert decode.counters["repeated_acks"] == 1
    decode.peer_ack(KEY, "peer", Quiet.QUIET)
    decode.open(RoomKey(7, 3))
    decode.peer_ack(RoomKey(7, 2), "peer", Quiet.QUIET)
    decode.peer_ack(RoomKey(8, 1), "peer", Quiet.QUIET)  # of which nobody here knows
    assert (decode.counters["late_acks"], decode.counters["repeated_acks"]) == (4, 1)
    assert decode.calls("release") == [(RoomKey(7, 2),)]


def test_an_overdue_ack_quarantines_and_a_fence_releases(decode: SmallAgent) -> None:
    decode.open()
    decode.apply(KEY, Reader.expose)
    decode.abort(KEY, CLIENT, "left")
    decode.now += QUARANTINE_SHARE * ACK_SECONDS - 0.1
    decode.tick()
    assert decode.calls("quarantine") == []
    decode.now += 0.1
    decode.tick()
    decode.tick()
    assert [frame for frame in decode.sent if isinstance(frame, Quarantined)] == [Quarantined(KEY, "peer", {"full": 3})]
    assert decode.calls("release") == []
    decode.handle(Fenced("somebody else"))
    assert decode.calls("release") == []
    decode.handle(Fenced("peer"))
    assert decode.calls("release") == [(KEY,)]
    assert decode.acks() == [AbortAck(KEY, Quiet.QUIET)]


def test_a_fence_aborts_the_rooms_of_that_peer_alone(decode: SmallAgent) -> None:
    decode.open(RoomKey(1, 1), "P0")
    decode.open(RoomKey(2, 1), "P1")
    decode.handle(Fenced("P0"))
    assert [row["key"] for row in decode.rooms()] == ["2.1"]


def test_aborting_revokes_the_rooms_tickets(decode: SmallAgent) -> None:
    decode.open()
    load = decode.gate.load()  # type: ignore[attr-defined]
    mine = decode.gate.request(Consumer.ATTENTION, load.extents, room=KEY)
    theirs = decode.gate.request(Consumer.ATTENTION, load.extents, room=RoomKey(8, 1))
    decode.abort(KEY, CLIENT, "left")
    assert (mine.state, theirs.state) == (TicketState.REVOKED, TicketState.PENDING)


def test_what_was_noted_goes_with_the_next_report(decode: SmallAgent) -> None:
    decode.open()
    decode.note(KEY, prompt_tokens=5)
    decode.note(KEY, cached_tokens=3)
    decode.abort(KEY, CLIENT, "left")
    reports = [frame.detail for frame in decode.sent if isinstance(frame, RoomReport)]
    assert reports[1] == {"prompt_tokens": 5, "cached_tokens": 3, "source": "client", "reason": "left"}
    assert "prompt_tokens" not in reports[2]
    decode.note(KEY, late=1)
    assert decode._details == {}


def test_a_refused_event_changes_nothing(decode: SmallAgent) -> None:
    decode.open()
    with pytest.raises(Refusal):
        decode.apply(KEY, Reader.verified)
    assert decode.reported() == [RoomState.ALLOCATED]


# ---- frames ----------------------------------------------------------------------------------------------


def test_frames_that_make_no_sense_are_counted(decode: SmallAgent) -> None:
    decode.handle(SetGuards(("indexer_ticket", "nonsense")))
    decode.handle(Refused("late"))
    assert (decode.counters["unknown_guards"], decode.counters["unexpected_frames"]) == (1, 1)
    assert decode.gate.guarded(Guard.INDEXER)
    decode.handle(SetGuards(("indexer_ticket",)))
    assert not decode.gate.guarded(Guard.INDEXER)


def test_queries_are_answered_or_refused_with_the_reason(decode: SmallAgent) -> None:
    decode.open()
    for number, what in enumerate(("rooms", "tickets", "stacks", "nonsense")):
        decode.handle(Query(number, what))
    rooms, tickets, stacks, nonsense = (frame for frame in decode.sent if isinstance(frame, Answer))
    assert rooms.body == [{"key": "7.1", "state": "allocated", "forwards": 0, "reason": None}]
    assert (tickets.body, stacks.body) == ([], {"step": "here"})
    assert nonsense == Answer(3, None, "unknown query 'nonsense'")


def test_a_long_answer_keeps_nobody_waiting(decode: SmallAgent) -> None:
    decode.open()

    def query(what: str) -> str:
        other = threading.Thread(target=decode.current, args=(7,), daemon=True)
        other.start()
        other.join(10.0)
        return "waits" if other.is_alive() else "goes on"

    decode.noted.query = query  # type: ignore[method-assign]
    decode.handle(Query(1, "stacks"))
    assert decode.sent[-1] == Answer(1, "goes on")


@pytest.mark.parametrize("error", [FrameError("Answer is 17000000 bytes"), TypeError("no such type")])
def test_an_answer_that_no_frame_can_carry_is_refused_and_the_link_lives(decode: SmallAgent, error: Exception) -> None:
    sent: list[Any] = []

    def send(frame: Any) -> None:
        if frame.error is None:
            raise error
        sent.append(frame)

    decode._send = send
    decode.handle(Query(1, "stacks"))
    assert sent == [Answer(1, None, str(error))]


# ---- threads ---------------------------------------------------------------------------------------------


def test_many_threads_end_every_room_exactly_once() -> None:
    """Peers, the link, the step loop and the clock at once, in every order."""
    agent, keys = SmallAgent(Role.DECODE), [RoomKey(number, 1) for number in range(60)]
    barrier = threading.Barrier(4)

    def over_all(act: Any) -> None:
        barrier.wait(60.0)
        for key in keys:
            try:
                act(key)
            except (UnknownRoomError, Refusal):
                continue

    def decode_it(key: RoomKey) -> None:
        for event in (Reader.expose, lambda half: half.landed("peer"), Reader.forward_begin, Reader.forward_end):
            agent.apply(key, event)  # type: ignore[arg-type]

    for key in keys:
        agent.open(key)
    acts: list[Any] = [
        decode_it,
        lambda key: agent.abort(key, CLIENT, "left"),
        lambda key: (agent.tick(), agent.peer_abort(key, "peer", CLIENT, "left")),
        lambda key: agent.peer_ack(key, "peer", Quiet.QUIET),
    ]
    with ThreadPoolExecutor(len(acts)) as pool:
        for future in [pool.submit(over_all, act) for act in acts]:
            future.result(60.0)
    for row in agent.rooms():
        agent.peer_ack(RoomKey(int(row["key"].split(".")[0]), 1), "peer", Quiet.QUIET)
    assert agent.rooms() == []
    assert sorted(key for (key,) in agent.calls("release")) == keys
    assert sorted(ack.key for ack in agent.acks()) == keys


# ---- a control plane that is gone -----------------------------------------------------------------------


@pytest.mark.parametrize("state", READER_STATES)
def test_without_a_control_plane_a_room_is_aborted_and_quiesces_all_the_same(
    decode: SmallAgent, state: RoomState
) -> None:
    reach(decode, state)
    decode.orphaned("the control plane is gone")
    assert [peer for _, peer, *_ in decode.calls("tell_peer")] == ["peer"]
    quiesce(decode)
    assert decode.calls("release") == [(KEY,)]
    assert decode.rooms() == []


def test_the_next_control_plane_counts_its_aborts_from_one(prefill: SmallAgent) -> None:
    prefill.open(RoomKey(1, 1))
    prefill.told_to_abort(RoomKey(1, 1), seq=1)
    prefill.orphaned("gone")
    prefill.adopted()
    prefill.open(RoomKey(2, 1))
    prefill.told_to_abort(RoomKey(2, 1), seq=1)
    assert prefill.acks()[-1] == AbortAck(RoomKey(2, 1), Quiet.QUIET)


def test_rooms_of_the_next_control_plane_open_though_it_counts_their_turns_from_1(prefill: SmallAgent) -> None:
    prefill._rooms = RoomTable(ends=0)
    prefill.open(RoomKey(1, 1), turn=1000)
    prefill.orphaned("gone")
    prefill.adopted()
    prefill.open(RoomKey(2, 1), turn=1)
    assert prefill.reported()[-1] is RoomState.ALLOCATED


def test_the_next_control_plane_learns_what_only_it_can_end(decode: SmallAgent, prefill: SmallAgent) -> None:
    """A room whose writer never acked, and a writer whose writes ended without a known state."""
    reach(decode, RoomState.BOOTSTRAPPING)
    decode.orphaned("gone")
    decode.now += ACK_SECONDS
    decode.tick()
    reach(prefill, RoomState.SENDING)
    prefill.orphaned("gone")
    prefill.apply(KEY, lambda writer: writer.written(False))
    prefill.apply(KEY, lambda writer: writer.forward_end())
    for agent in (decode, prefill):
        agent.sent.clear()
        agent.adopted()
    assert [type(frame) for frame in decode.sent] == [RoomReport, Quarantined]
    assert decode.sent[0].state is RoomState.QUIESCING
    assert decode.sent[1].peer == "peer"
    poisoned = [ack for ack in prefill.acks() if ack.outcome is Quiet.POISONED]
    assert [ack.key for ack in poisoned] == [KEY]
