"""Rounds and abort waves against a deployment that is played."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import anyio
import pytest

from dsv4ctl.controlplane.incident import drive
from dsv4ctl.controlplane.incident.deployment import VIOLATION, RequestFailedError, Running, since
from dsv4ctl.controlplane.incident.evaluate import Stormed
from dsv4ctl.controlplane.incident.rows import quick_rows, rank_rows, storm_rows
from dsv4ctl.controlplane.incident.workload import PAGE_TOKENS, Turn

ON, *_, QUIESCE, _ = quick_rows()
TURNS = {(session, round_): Turn(session, round_, (session, round_), 6) for session in range(4) for round_ in range(2)}
pytestmark = pytest.mark.asyncio


class Played:
    """Answers as soon as every other request of the round is there; what is held is answered when it is let go."""

    def __init__(self, held: Sequence[str] = (), refused: Sequence[str] = (), gone: Sequence[str] = ()) -> None:
        self.held, self.refused, self.gone = set(held), set(refused), set(gone)
        self.calls: list[str] = []
        self.in_flight: Counter[str] = Counter()
        self.most = 0

    async def generate(self, prompt: Sequence[int], new_tokens: int, request_id: str) -> tuple[list[int], str]:
        if request_id in self.refused:
            raise RequestFailedError("502: broken", "13.1")
        if request_id in self.gone:
            raise RequestFailedError("502: the engine ended", None, engine_gone=True)
        self.in_flight[request_id] += 1
        self.most = max(self.most, self.in_flight.total())
        try:
            await anyio.sleep_forever() if request_id in self.held else await anyio.sleep(0.001)
        finally:
            self.in_flight[request_id] -= 1
        return list(prompt), f"{prompt[0] * 10 + prompt[1]}.1"

    async def rooms(self) -> list[dict[str, Any]]:
        flying = [request_id for request_id, count in self.in_flight.items() if count]
        return [{"key": f"{name}.room", "request_id": name, "state": "sending"} for name in flying]

    async def room(self, key: str) -> dict[str, Any]:
        return {"key": key, "state": "closed", "source": None, "detail": {}}

    async def idle(self) -> list[str]:
        return []

    async def ready(self) -> None:
        self.calls.append("ready")

    async def set_guards(self, off: Sequence[str]) -> None:
        self.calls.append(f"guards {','.join(off)}")

    async def flush(self) -> None:
        self.calls.append("flush")

    async def engine_infos(self) -> list[dict[str, Any]]:
        self.calls.append("infos")
        loaded = 256 * self.calls.count("infos")
        return [{"counters": {"host_tokens_loaded": loaded, "violation: a read b": loaded}}]


async def run(played: Played, row: Any, victims: frozenset[int] = frozenset()) -> Any:
    with anyio.fail_after(60):
        return await drive.run_row(cast(Running, played), row, TURNS, lambda round_: victims, lambda: None)


async def test_a_row_switches_guards_then_flushes_then_asks_each_round_at_once() -> None:
    played = Played()
    measured = await run(played, QUIESCE._replace(waves=False))
    assert played.calls == ["ready", "guards quiesce,verdict", "flush", "infos", "infos"]
    assert played.most == 4
    assert sorted((one.session, one.round) for one in measured.asked) == sorted(TURNS)
    assert all(one.output_ids == (one.session, one.round) for one in measured.asked)
    assert measured.host_tokens == 256
    assert measured.edges == {"a read b": 256}
    assert measured.aborts == 0


async def test_victims_are_aborted_on_their_way_and_asked_again() -> None:
    held = [f"incident-{session}-{round_}.{attempt}" for session in (1, 2) for round_ in (0, 1) for attempt in range(2)]
    measured = await run(Played(held), QUIESCE, frozenset({1, 2}))
    assert measured.aborts == len(held)
    assert len(measured.asked) == len(TURNS)
    assert all(one.output_ids is not None for one in measured.asked)
    assert {f"{request_id}.room" for request_id in held} <= set(measured.rooms)


async def test_without_waves_nobody_is_a_victim() -> None:
    assert (await run(Played(), ON, frozenset({1, 2}))).aborts == 0


async def test_an_error_is_kept_and_the_others_go_on() -> None:
    measured = await run(Played(refused=["incident-3-1"]), ON)
    (failed,) = [one for one in measured.asked if one.error is not None]
    assert (failed.session, failed.round, failed.error, failed.room) == (3, 1, "502: broken", "13.1")


async def test_a_request_that_never_ends_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "REQUEST_DEADLINE", 0.05)
    measured = await run(Played(held=["incident-0-0"]), ON)
    (stuck,) = [one for one in measured.asked if one.output_ids is None]
    assert (stuck.session, stuck.round, stuck.error) == (0, 0, None)


async def test_a_request_that_a_staged_fault_ended_is_asked_again_once_the_engine_is_there() -> None:
    row = next(row for row in rank_rows() if row.name == "abort-agreed")
    played = Played(refused=["incident-0-0!abort", "incident-1-1!abort"])
    measured = await run(played, row)
    assert all(one.error is None for one in measured.asked)
    assert measured.aborts == 2
    assert played.calls.count("ready") == 3
    assert not any(call.startswith("guards") for call in played.calls), "they are off, or on, from the start"


async def test_what_was_under_way_when_the_ranks_parted_is_stuck() -> None:
    row = next(row for row in rank_rows() if row.name == "abort-alone")
    played = Played(gone=["incident-0-0!abort", "incident-2-0"])
    measured = await run(played, row)
    stuck = {(one.session, one.round) for one in measured.asked if one.output_ids is None and one.error is None}
    assert stuck == {(0, 0), (2, 0)}
    assert {one.round for one in measured.asked} == {0}, "the engine is gone: no further round"


class Crowded(Played):
    """Two growing requests fill the decode pool, as the next look at it shows, and end once others came.

    At the second visit a room gives way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entering = self.growing = self.visits = 0
        self.met: list[int] = []  #: growing requests that the first of the others met, by visit
        self.came = anyio.Event()

    async def generate(self, prompt: Sequence[int], new_tokens: int, request_id: str) -> tuple[list[int], str]:
        if new_tokens <= PAGE_TOKENS:
            if not self.came.is_set():
                self.met.append(self.growing)
                self.came.set()
            return await super().generate(prompt, new_tokens, request_id)
        if not self.entering + self.growing:
            self.visits += 1
            self.came = anyio.Event()
        self.entering += 1
        await self.came.wait()
        self.growing -= 1
        return await super().generate(prompt, new_tokens, request_id)

    async def engine_infos(self) -> list[dict[str, Any]]:
        self.growing, self.entering = self.growing + self.entering, 0
        none = {state: {"full": 0} for state in ("owned", "retiring", "quarantined", "leased")}
        counted = {"host_tokens_loaded": 0, "retractions": int(self.visits == 2)}
        prefill, decode = ({"free": {"full": free}, **none} for free in (8, 8 - 4 * self.growing))
        return [
            {"role": "prefill", "pages": prefill, "counters": {}},
            {"role": "decode", "pages": decode, "counters": counted},
        ]


async def test_a_crowd_comes_once_the_pool_is_full_and_again_until_a_room_gave_way() -> None:
    (row,) = (row for row in storm_rows() if row.must_retract)
    turns = {(session, 0): Turn(session, 0, (session, 0), 300 if session < 2 else 3) for session in range(5)}
    played = Crowded()
    with anyio.fail_after(60):
        measured = await drive.run_row(cast(Running, played), row, turns, lambda round_: (), lambda: None)
    assert played.met == [2, 2]
    assert (measured.retractions, len(measured.asked)) == (1, 10)
    assert measured.stormed is not None
    assert measured.stormed == Stormed(10, 0, 0, measured.stormed.seconds, 0)


async def test_edges_are_counted_between_two_looks() -> None:
    before = {"violation: a": 3, "violation: b": 1, "tokens_out": 5}
    after = {"violation: a": 5, "violation: b": 1, "violation: c": 2, "tokens_out": 9}
    assert since(before, after, VIOLATION) == {"a": 2, "c": 2}
