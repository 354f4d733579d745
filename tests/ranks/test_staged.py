"""What is staged on one rank comes in an order that no speed decides."""

from __future__ import annotations

import msgspec

from dsv4ctl.controlplane.config.schema import DeadlinesConfig
from dsv4ctl.controlplane.link.wire import AbortAck, OpenRoom, RoomReport, ToControlPlane
from dsv4ctl.controlplane.rooms.states import Quiet, RoomKey, RoomState
from dsv4ctl.engine_adapters.reference.staged import Fault, Staged

STRUCK, OTHER = RoomKey(1, 1), RoomKey(2, 1)
DEADLINES = msgspec.to_builtins(DeadlinesConfig())


class Rank:
    """A rank with staged faults: what it told the control plane, and the rounds that it has begun."""

    def __init__(self) -> None:
        self.told: list[ToControlPlane] = []
        self.rounds = 0
        self.staged = Staged(Fault.BY_REQUEST, lambda key: None, lambda: None, lambda: self.rounds)
        self.tell = self.staged.send(self.told.append)

    def open(self, key: RoomKey, request_id: str) -> OpenRoom:
        return self.staged.opening(OpenRoom(key, request_id, None, None, (), DEADLINES, "read"))


def test_an_abort_is_told_once_the_ranks_have_met_twice_since_and_in_its_order() -> None:
    rank = Rank()
    aborting, acked, alive = (
        RoomReport(STRUCK, RoomState.ABORTING),
        AbortAck(STRUCK, Quiet.QUIET),
        RoomReport(OTHER, RoomState.LOADING),
    )
    rank.tell(aborting)
    rank.rounds = 1
    rank.tell(acked)
    for rank.rounds, told in ((2, []), (3, [aborting]), (4, [aborting, acked])):
        rank.tell(alive)
        assert [frame for frame in rank.told if frame is not alive] == told


def test_the_load_of_a_room_whose_clock_runs_ahead_begins_after_its_deadline() -> None:
    rank = Rank()
    begun: list[RoomKey] = []
    assert rank.open(STRUCK, "a!clock").deadlines["loading"] < 1e-3
    assert rank.open(OTHER, "b").deadlines == DEADLINES
    for key in (STRUCK, OTHER):
        rank.staged.clock.after(key, lambda key=key: begun.append(key))
    assert begun == [OTHER]
    rank.tell(RoomReport(STRUCK, RoomState.LOADING))
    assert begun == [OTHER]
    rank.tell(RoomReport(STRUCK, RoomState.ABORTING))
    assert begun == [OTHER, STRUCK]
    rank.staged.clock.after(STRUCK, lambda: begun.append(STRUCK))
    assert begun == [OTHER, STRUCK, STRUCK], "it is over: nothing waits for it"
