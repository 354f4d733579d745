"""Who is behind a wrong room that read nothing too early itself: pages are followed through backups and loads."""

from __future__ import annotations

from dsv4ctl.controlplane.trace.format import Event, Extent, Extents
from dsv4ctl.controlplane.trace.lineage import inherited
from dsv4ctl.controlplane.trace.races import Access, Race, RaceKind

RANK = "prefill-0"
Step = tuple[str, Event, Extents]


def step(kind: str, who: str, room: str, space: str, *pages: int) -> Step:
    return RANK, Event(0, 0, kind, "step", room, who), (Extent(space, pages),)


def race(room: str, consumer: str = "indexer") -> Race:
    read = Access(RANK, "step", "read", consumer, room, 1, 1)
    return Race(
        RaceKind.READ_BEFORE_LAND, RANK, room, consumer, "full", "index_k", (3,), (1,), [0], None, read, "landed"
    )


def test_a_room_that_reads_what_a_racing_room_computed_is_traced_back() -> None:
    events = [step("seal", "forward", "1.1", "full", 7), step("request", "attention", "2.1", "full", 5, 7)]
    assert inherited([race("1.1")], events) == {"1.1": {"indexer"}, "2.1": {"indexer"}}


def test_it_is_followed_to_the_host_and_back_and_to_those_who_inherit() -> None:
    events = [
        step("seal", "forward", "1.1", "full", 7),
        step("request", "backup", "", "full", 7),
        step("lease", "backup", "", "host.full", 2),
        step("allocate", "", "", "full", 7),
        step("request", "load", "", "host.full", 1, 2),
        step("lease", "hicache", "", "full", 8, 9),
        step("request", "attention", "2.1", "full", 9),
        step("seal", "forward", "2.1", "full", 4),
        step("request", "indexer", "3.1", "full", 4),
        step("request", "attention", "4.1", "full", 7, 8),
    ]
    assert inherited([race("1.1")], events) == {room: {"indexer"} for room in ("1.1", "2.1", "3.1")}


def test_pages_of_rooms_without_a_race_and_races_without_a_reader_name_nobody() -> None:
    events = [step("seal", "forward", "1.1", "full", 7), step("request", "attention", "2.1", "full", 7)]
    assert inherited([], events) == {}
    assert inherited([race("1.1", consumer="")], events) == {}
