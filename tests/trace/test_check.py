"""Each race on a trace made by hand, and nothing on the same trace with the edge that orders it."""

from __future__ import annotations

import msgspec
import pytest

from dsv4ctl.controlplane.trace import findings
from trace_story import LAYERS, ROOM, D, P, Story

# ---- read before land ------------------------------------------------------------------------------------


def test_a_read_of_a_layer_that_has_not_landed_names_its_consumer() -> None:
    story = Story()
    story.lease(1, 4, 5, generation=2)
    story.landed(1, 4, 5, generation=2, layers=1)
    story.request(2, 4, generation=2, readable=1)
    story.read(2, 4, generation=2, layer=1, readable=1)
    story.read(2, 4, generation=2, layer=2, readable=1)
    story.landed(1, 4, 5, generation=2)
    (race,) = story.report().races
    assert (race.kind.value, race.consumer, race.room, race.pool) == ("read-before-land", "indexer", ROOM, "index_k")
    assert (race.space, race.pages, race.generations, race.layers, race.count) == ("full", (4,), (2,), [1, 2], 2)
    assert race.first is not None
    assert (race.first.who, race.second.who, race.second.where) == ("hicache", "indexer", "model: index_k")
    assert race.missing == "landed (hicache, layer 1) -> grant (indexer) -> read"
    assert race.landed_after_ns == 2_000_000
    assert race.sentence() == (
        "read-before-land: read by indexer (room 7.1, decode0/0 [step, model: index_k] #3) 2 times, index_k layer 1-2 "
        "of full pages 4 (generation 2), not ordered after the write by hicache (no room's, decode0/0 [step] #0); it "
        "landed 2.000 ms later. Missing edge: landed (hicache, layer 1) -> grant (indexer) -> read."
    )
    assert story.report().consumers() == {ROOM: ["indexer"]}


def test_a_load_of_other_pools_is_none_of_the_reads_business() -> None:
    story = Story()
    story.lease(1, 4, generation=2)
    story.request(2, 4, generation=2, who="attention")
    story.tell("read", "attention", room=ROOM, subject=2, pages=(4,), generation=2, pool="c4_kv", layer=0)
    assert story.kinds() == []
    story.tell("read", "sender", room=ROOM, subject=2, pages=(4,), generation=2, pool="*", layer=0)
    assert story.kinds() == ["read-before-land"]


def test_a_read_after_its_layer_landed_is_none() -> None:
    story = Story()
    story.lease(1, 4, generation=2)
    story.request(2, 4, generation=2)
    for layer in range(LAYERS):
        story.landed(1, 4, generation=2, layers=layer + 1)
        story.read(2, 4, generation=2, layer=layer, readable=layer + 1)
    story.ended(1, 4, generation=2)
    story.read(2, 4, generation=2, layer=LAYERS - 1, readable=LAYERS)
    story.release(2)
    assert story.kinds() == []


@pytest.mark.parametrize(("who", "verified", "found"), [
    ("indexer", False, ["read-before-land"]), ("indexer", True, []), ("checksum", False, []),
])  # fmt: skip
def test_what_landed_is_read_by_checksum_alone_until_it_is_verified(who: str, verified: bool, found: list[str]) -> None:
    story = Story()
    story.lease(1, 4, generation=2, verify=True)
    story.landed(1, 4, generation=2)
    if verified:
        story.landed(1, 4, generation=2, what="verified")
    story.request(2, 4, generation=2, who=who)
    story.read(2, 4, generation=2, who=who)
    assert story.kinds() == found


def test_a_read_of_what_a_failed_load_left() -> None:
    """Its ticket was revoked, and its consumer reads on; the load has ended meanwhile."""
    story = Story()
    story.lease(1, 4, generation=2)
    story.request(2, 4, generation=2)
    story.tell("failed", "hicache", subject=1, pages=(4,), generation=2, note="lost")
    story.tell("revoked", "indexer", room=ROOM, subject=2, pages=(4,), generation=2)
    story.ended(1, 4, generation=2)
    story.read(2, 4, generation=2)
    (race,) = story.report().races
    assert (race.kind.value, race.landed_after_ns) == ("read-before-land", None)
    assert "it never landed" in race.sentence()


def test_pages_that_join_a_ticket_bring_their_loads() -> None:
    story = Story()
    story.filled(1, 4, generation=2)
    story.lease(3, 5, generation=2)
    story.request(2, 4, generation=2, readable=LAYERS)
    story.read(2, 4, generation=2, readable=LAYERS)
    story.tell("extend", "indexer", room=ROOM, subject=2, pages=(5,), generation=2)
    story.read(2, 4, 5, generation=2)
    assert story.kinds() == ["read-before-land"]


def test_an_unregistered_consumer_is_named() -> None:
    story = Story()
    story.tell("unregistered", "backup", room=ROOM, pages=(4,), generation=2)
    (race,) = story.report().races
    assert (race.consumer, race.missing) == ("backup", "register (backup) -> request -> grant -> read")


# ---- write under read ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hand_on", ["allocate", "lease"])
@pytest.mark.parametrize("released", [True, False])
def test_a_page_goes_to_another_owner_under_a_reader(hand_on: str, released: bool) -> None:
    story = Story()
    story.filled(1, 4, generation=2)
    story.request(2, 4, generation=2, readable=LAYERS)
    story.read(2, 4, generation=2, readable=LAYERS)
    if released:
        story.release(2)
    if hand_on == "allocate":
        story.allocate(4)
        story.lease(3, 4, generation=4, kind="forward", room="8.1")
    else:
        story.lease(3, 4, generation=3, kind="forward", room="8.1")
    found = story.report().races
    assert [race.kind.value for race in found] == ([] if released else ["write-under-read"])
    if not released:
        assert found[0].missing == f"release (indexer) -> {hand_on}"
        assert (found[0].room, found[0].first and found[0].first.who) == (ROOM, "indexer")
        assert hand_on == "lease" or (found[0].owner and found[0].owner.room) == "8.1"


@pytest.mark.parametrize("completed", [True, False])
def test_a_posted_read_holds_its_page_until_it_completes(completed: bool) -> None:
    story = Story()
    story.filled(1, 4, generation=2)
    story.request(2, 4, generation=2, readable=LAYERS, who="sender")
    story.tell("post", "sender", room=ROOM, subject=2)
    story.read(2, 4, generation=2, readable=LAYERS, who="sender")
    story.release(2, who="sender")
    if completed:
        story.tell("complete", "sender", room=ROOM, subject=2)
    story.allocate(4)
    assert story.kinds() == ([] if completed else ["write-under-read"])


def test_a_page_that_left_its_ticket_is_free_to_go() -> None:
    story = Story()
    story.filled(1, 4, 5, generation=2)
    story.request(2, 4, 5, generation=2, readable=LAYERS)
    story.tell("trim", "indexer", room=ROOM, subject=2, pages=(4,))
    story.allocate(4)
    assert story.kinds() == []
    story.allocate(5)
    assert story.kinds() == ["write-under-read"]


def test_who_waits_reads_nothing() -> None:
    story = Story()
    story.lease(1, 4, generation=2)
    story.request(2, 4, generation=2)
    story.ended(1, 4, generation=2)
    story.allocate(4)
    assert story.kinds() == []


# ---- stale generations -----------------------------------------------------------------------------------


def test_a_read_of_a_page_that_has_another_owner() -> None:
    story = Story()
    story.filled(1, 4, generation=2)
    story.request(2, 4, generation=2, readable=LAYERS)
    story.allocate(4)
    story.read(2, 4, generation=2, readable=LAYERS)
    assert story.kinds() == ["write-under-read", "stale-generation"]


@pytest.mark.parametrize(("meant", "found"), [(2, ["stale-generation"]), (3, [])])
def test_a_request_for_a_generation_that_is_gone(meant: int, found: list[str]) -> None:
    story = Story()
    story.filled(1, 4, generation=2)
    story.filled(3, 4, generation=3)
    story.request(2, 4, generation=meant, readable=LAYERS)
    assert story.kinds() == found


def test_a_read_after_its_ticket_ended() -> None:
    story = Story()
    story.filled(1, 4, generation=2)
    story.request(2, 4, generation=2, readable=LAYERS)
    story.release(2)
    story.read(2, 4, generation=2, readable=0)
    assert story.kinds() == [], "nobody has the page: it still holds what was meant"
    story.allocate(4)
    story.read(2, 4, generation=2, readable=0)
    assert story.kinds() == ["stale-generation"]


# ---- reuse before quiescence -----------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [True, False])
def test_a_page_is_reused_while_a_load_may_write_it(ended: bool) -> None:
    story = Story()
    story.lease(1, 4, generation=2)
    if ended:
        story.ended(1, 4, generation=2)
    story.tell("free", pages=(4,))
    story.allocate(4)
    if not ended:
        story.landed(1, 4, generation=2, layers=1)
    assert story.kinds() == ([] if ended else ["reuse-before-quiescence", "stale-generation"])


def test_a_sealed_page_has_left_its_lease() -> None:
    story = Story()
    story.lease(1, 4, 5, generation=2, kind="forward")
    story.tell("seal", "forward", subject=1, pages=(4,))
    story.allocate(4)
    assert story.kinds() == []
    story.allocate(5)
    assert story.kinds() == ["reuse-before-quiescence"]


@pytest.mark.parametrize(("quiet", "found"), [
    ("", ["reuse-before-quiescence"]), ("ack:poisoned", ["reuse-before-quiescence"]),
    ("ack:quiet", []), ("landed", []), ("fenced", []),
])  # fmt: skip
def test_a_page_told_to_a_peer_waits_for_its_word(quiet: str, found: list[str]) -> None:
    """Rank D's trace alone: what the peer did is not known."""
    story = Story(D)
    story.exposed(1, 4, generation=2)
    if quiet == "fenced":
        story.tell("fenced", P)
    elif quiet:
        story.tell("received", P, room=ROOM, note=quiet)
    story.ended(1, 4, generation=2, kind="transfer")
    story.allocate(4)
    story.lease(3, 4, generation=4, kind="transfer", room="8.1")
    races = story.report().races
    assert [race.kind.value for race in races] == found
    for race in races:
        assert (race.room, race.pages, race.generations) == (ROOM, (4,), (2,))
        assert race.owner is not None
        assert race.owner.room == "8.1"
        assert race.missing == "ack of P (or its landed frame, or its fence) -> free -> allocate"


def test_a_page_that_was_told_to_nobody_waits_for_nobody() -> None:
    story = Story(D)
    story.lease(1, 4, generation=2, kind="transfer", room=ROOM)
    story.ended(1, 4, generation=2, kind="transfer")
    story.allocate(4)
    assert story.kinds() == []


def test_a_late_notification_for_a_page_of_a_newer_generation() -> None:
    story = Story(D)
    story.exposed(1, 4, generation=2)
    story.ended(1, 4, generation=2, kind="transfer")
    story.allocate(4)
    story.tell("received", P, room=ROOM, note="late")
    assert story.kinds() == ["reuse-before-quiescence", "stale-generation"]


def test_landed_is_not_believed_while_a_peer_may_write() -> None:
    story = Story(D)
    story.exposed(1, 4, generation=2)
    story.tell("landed", "transfer", room=ROOM, subject=1, pages=(4,), generation=2, value=LAYERS)
    story.request(2, 4, generation=2, readable=LAYERS)
    story.read(2, 4, generation=2, readable=LAYERS)
    (race,) = story.report().races
    assert race.missing == "landed frame of P -> landed (transfer, layer 0) -> grant (indexer) -> read"


# ---- both sides of a transfer ----------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["write, complete, ack", "write, ack, complete", "ack, write"])
def test_an_ack_comes_after_the_last_write_completed(kept: str) -> None:
    story = Story(D, P)
    story.exposed(1, 4, generation=2)
    for step in kept.split(", "):
        match step:
            case "write":
                story.write(9, 4)
            case "complete":
                story.complete(9)
            case "ack":
                story.acked()
    found = story.kinds()
    assert found == ([] if kept == "write, complete, ack" else ["reuse-before-quiescence"])


@pytest.mark.parametrize(("acked", "found"), [("7.2", []), ("7.1", ["reuse-before-quiescence"])])
def test_a_rooms_next_generation_has_its_own_pages_and_acks(acked: str, found: list[str]) -> None:
    """A retracted room begins again on the pages that it had: a word on an older generation is none on this one."""
    story = Story(D, P)
    story.exposed(1, 4, generation=2, room="7.2")
    story.write(8, 4, room="7.2")
    story.complete(8)
    story.acked(room=acked)
    story.ended(1, 4, generation=2, kind="transfer")
    story.tell("room", room="7.2", note="aborted")
    story.allocate(4)
    story.exposed(2, 4, generation=4, room="7.3")
    story.write(9, 4, room="7.3")
    story.complete(9)
    story.tell("received", P, room="7.3", note="landed")
    story.tell("landed", "transfer", room="7.3", subject=2, pages=(4,), generation=4, value=LAYERS)
    story.request(3, 4, generation=4, readable=LAYERS)
    story.read(3, 4, generation=4, readable=LAYERS)
    assert story.kinds() == found


@pytest.mark.parametrize("received", [True, False])
def test_a_peers_write_is_over_when_a_frame_says_so(received: bool) -> None:
    """D learns of the end by the ack's receipt alone, whatever time it is."""
    story = Story(D, P)
    story.exposed(1, 4, generation=2)
    story.write(9, 4)
    story.complete(9)
    story.tell("sent", D, on=P, room=ROOM, note="ack:quiet")
    if received:
        story.tell("received", P, on=D, room=ROOM, note="ack:quiet")
    story.ended(1, 4, generation=2, kind="transfer")
    story.allocate(4)
    assert story.kinds() == ([] if received else ["reuse-before-quiescence"])


def test_an_ack_for_another_room_orders_nothing() -> None:
    story = Story(D, P)
    story.exposed(1, 4, generation=2)
    story.write(9, 4)
    story.complete(9)
    story.acked(room="8.1")
    story.ended(1, 4, generation=2, kind="transfer")
    story.allocate(4)
    assert story.kinds() == ["reuse-before-quiescence"]


@pytest.mark.parametrize("completed", [True, False])
def test_an_ack_that_does_not_cover_the_write_orders_nothing(completed: bool) -> None:
    """D believes the ack; the clocks say that the write ended after it was sent, or not at all."""
    story = Story(D, P)
    story.exposed(1, 4, generation=2)
    story.tell("sent", D, on=P, room=ROOM, note="ack:quiet")
    story.write(9, 4)
    if completed:
        story.complete(9)
    story.tell("received", P, on=D, room=ROOM, note="ack:quiet")
    story.ended(1, 4, generation=2, kind="transfer")
    story.allocate(4)
    races = story.report().races
    assert [race.missing for race in races] == [
        "last write -> ack to decode0/0", "complete on prefill0/0 -> ack -> free -> allocate",
    ]  # fmt: skip


@pytest.mark.parametrize("told", [True, False])
def test_a_peer_writes_where_it_was_told_to(told: bool) -> None:
    story = Story(D, P)
    if told:
        story.exposed(1, 4, generation=2)
    else:
        story.lease(1, 4, generation=2, kind="transfer", room=ROOM)
    story.write(9, 4)
    found = story.report().races
    assert [race.missing for race in found] == ([] if told else ["destination frame of decode0/0 -> write"])


def test_a_write_into_a_page_that_has_another_owner() -> None:
    story = Story(D, P)
    story.exposed(1, 4, generation=2)
    story.tell("received", P, on=D, room=ROOM, note="ack:quiet")
    story.ended(1, 4, generation=2, kind="transfer")
    story.allocate(4)
    story.write(9, 4)
    (race,) = story.report().races
    assert (race.kind.value, race.rank, race.second.rank) == ("stale-generation", "decode0/0", "prefill0/0")


def test_whole_rooms_leave_nothing_behind() -> None:
    """Many rooms over the same pages, written, read, closed: no race, and nothing remembered of them."""
    story = Story(D, P)
    for number in range(20):
        room = f"{number}.1"
        story.allocate(4, 5)
        story.exposed(number, 4, 5, generation=2 * number + 2, room=room)
        story.write(9, 4, 5, room=room)
        story.complete(9)
        story.tell("received", P, on=D, room=room, note="landed")
        story.tell(
            "landed", "transfer", room=room, subject=number, pages=(4, 5), generation=2 * number + 2, value=LAYERS
        )
        story.ended(number, 4, 5, generation=2 * number + 2, kind="transfer")
        story.request(2, 4, 5, generation=2 * number + 2, readable=LAYERS)
        story.read(2, 4, 5, generation=2 * number + 2, readable=LAYERS)
        story.release(2)
        story.tell("free", pages=(4, 5))
        story.tell("room", room=room, note="closed")
    assert story.kinds() == []


# ---- traces that begin anywhere --------------------------------------------------------------------------


def test_after_lost_events_nothing_is_guessed() -> None:
    story = Story()
    story.lease(1, 4, generation=2)
    story.request(2, 4, generation=2)
    story.lose(10)
    story.read(2, 4, generation=2, readable=LAYERS, layer=1)
    story.allocate(4)
    report = story.report()
    assert [race.kind.value for race in report.races] == ["write-under-read"], "a reader that was seen since"
    assert report.resets == 1


def test_a_load_that_is_older_than_the_trace() -> None:
    story = Story()
    story.landed(1, 4, generation=2, layers=1)
    story.request(2, 4, generation=2, readable=1)
    story.read(2, 4, generation=2, layer=0, readable=1)
    assert story.kinds() == []
    story.read(2, 4, generation=2, layer=1, readable=1)
    assert story.kinds() == ["read-before-land"]


def test_a_read_that_nothing_granted_and_whose_load_is_older_than_the_trace() -> None:
    story = Story()
    story.read(2, 4, generation=2, layer=1, readable=1)
    (race,) = story.report().races
    assert (race.consumer, race.first) == ("indexer", None)
    assert "what was before the trace begins" in race.sentence()


def test_races_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "MAX_RACES", 3)
    story = Story()
    for page in range(5):
        story.lease(page, page, generation=2)
        story.request(10 + page, page, generation=2)
        story.read(10 + page, page, generation=2)
    report = story.report()
    assert (len(report.races), report.dropped, report.accesses) == (3, 2, 5)


def test_a_report_is_plain_data_and_sums_up() -> None:
    story = Story()
    story.lease(1, 4, generation=2)
    story.request(2, 4, generation=2)
    story.read(2, 4, generation=2)
    report = story.report()
    assert msgspec.json.decode(msgspec.json.encode(report))["races"][0]["kind"] == "read-before-land"
    (row,) = report.rows()
    assert {name: row[name] for name in ("kind", "who", "pool", "against", "rooms", "accesses")} == {
        "kind": "read-before-land", "who": "indexer", "pool": "index_k", "against": "hicache",
        "rooms": 1, "accesses": 1,
    }  # fmt: skip
