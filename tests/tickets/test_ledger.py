"""One rule of the ledger a test (S1, S2, S3, S7): what it allows, and what it refuses without changing anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from dsv4ctl.controlplane.tickets.ledger import Ledger, LedgerError
from dsv4ctl.controlplane.tickets.ticket import Load, Ticket
from dsv4ctl.controlplane.tickets.types import Consumer, Extent, LoadKind, SpaceSpec, TicketState

LAYERS = 3
READER, INDEXER, CHECKSUM = Consumer.ATTENTION, Consumer.INDEXER, Consumer.CHECKSUM
PENDING, GRANTED, REVOKING = TicketState.PENDING, TicketState.GRANTED, TicketState.REVOKING
RELEASED, REVOKED = TicketState.RELEASED, TicketState.REVOKED


@pytest.fixture
def ledger() -> Ledger:
    return Ledger({"full": SpaceSpec(8, ("c4_kv", "index_k")), "swa": SpaceSpec(4, ("swa_kv",))}, LAYERS)


def owned(ledger: Ledger, count: int = 1) -> Extent:
    taken = ledger.allocate({"full": count})
    assert taken is not None
    return ledger.extent("full", taken["full"])


def loading(ledger: Ledger, count: int = 1, **options: Any) -> tuple[Load, Extent]:
    load = ledger.open_load(options.pop("kind", LoadKind.HICACHE), [owned(ledger, count)], **options)
    return load, load.extents[0]


def filled(ledger: Ledger, count: int = 1) -> Extent:
    load, extent = loading(ledger, count)
    ledger.layer_landed(load, LAYERS)
    ledger.end_load(load)
    return extent


def refused(ledger: Ledger, call: Callable[[], object], match: str) -> None:
    """The call is refused with a sentence, counted once, and changes nothing."""
    before = (ledger.counts(), ledger.tickets, len(ledger.loads), ledger.refused)
    with pytest.raises(LedgerError, match=match):
        call()
    assert (ledger.counts(), ledger.tickets, len(ledger.loads), ledger.refused - 1) == before


# ---- S1: read after land ---------------------------------------------------------------------------------


def test_a_ticket_is_never_granted_before_its_bytes_landed(ledger: Ledger) -> None:
    load, extent = loading(ledger)
    ticket = ledger.request(READER, [extent])
    assert (ticket.state, ticket.readable) == (PENDING, 0)
    assert ledger.layer_landed(load, LAYERS) == [ticket]
    assert (ticket.state, ticket.readable) == (GRANTED, LAYERS)


def test_the_grant_is_the_watermark_of_the_slowest_load(ledger: Ledger) -> None:
    slow, first = loading(ledger)
    fast, second = loading(ledger)
    ticket = ledger.request(READER, [first, second])
    assert ledger.layer_landed(fast, 3) == []
    for layer in (1, 2, 3):
        assert ledger.layer_landed(slow, layer) == [ticket]
        assert ticket.readable == layer


def test_a_late_request_sees_the_watermark(ledger: Ledger) -> None:
    load, extent = loading(ledger)
    ledger.layer_landed(load, 2)
    assert ledger.request(READER, [extent]).readable == 2


def test_bytes_whose_digest_is_unknown_are_for_the_checksum_alone(ledger: Ledger) -> None:
    load, extent = loading(ledger, verify=True)
    checksum, reader = ledger.request(CHECKSUM, [extent]), ledger.request(READER, [extent])
    assert ledger.layer_landed(load, 2) == [checksum]
    assert (checksum.readable, reader.readable, reader.state) == (2, 0, PENDING)
    assert ledger.layer_verified(load, 1) == [reader]
    assert (checksum.readable, reader.readable) == (2, 1)
    refused(ledger, lambda: ledger.layer_verified(load, 3), "layer 3 verified, only 2 landed")


def test_watermarks_only_rise_and_end_with_the_load(ledger: Ledger) -> None:
    load, _ = loading(ledger)
    ledger.layer_landed(load, 2)
    refused(ledger, lambda: ledger.layer_landed(load, 1), "may only rise: 2 -> 1 of 3")
    refused(ledger, lambda: ledger.layer_landed(load, 4), "may only rise")
    ledger.end_load(load)
    refused(ledger, lambda: ledger.layer_landed(load, 3), "had ended")
    refused(ledger, lambda: ledger.fail_load(load), "had ended")
    refused(ledger, lambda: ledger.quarantine(load), "had ended")
    refused(ledger, lambda: ledger.end_load(load), "ended twice")


@pytest.mark.parametrize("verify", [False, True])
def test_a_load_that_ended_short_left_nothing_to_read(ledger: Ledger, verify: bool) -> None:
    load, extent = loading(ledger, verify=verify)
    early, late = ledger.request(CHECKSUM, [extent]), ledger.request(READER, [extent])
    ledger.layer_landed(load, LAYERS if verify else 2)
    assert set(ledger.end_load(load)) == {early, late}
    assert (early.state, late.state) == (REVOKING, REVOKED if verify else REVOKING)
    refused(ledger, lambda: ledger.request(READER, [extent]), "not every asked pool is filled")


def test_a_failed_load_revokes_the_pending_and_leaves_the_granted_holding(ledger: Ledger) -> None:
    load, extent = loading(ledger, verify=True)
    granted, pending = ledger.request(CHECKSUM, [extent]), ledger.request(READER, [extent])
    ledger.layer_landed(load, 1)
    assert set(ledger.fail_load(load)) == {granted, pending}
    assert (granted.state, pending.state) == (REVOKING, REVOKED)
    refused(ledger, lambda: ledger.request(READER, [extent]), "filled or loading")
    assert ledger.layer_landed(load, 3) == []  # the writer goes on; nobody is granted more
    assert granted.readable == 1
    ledger.end_load(load)
    ledger.free("full", extent.pages)
    assert ledger.available("full") == 7
    ledger.release(granted)
    assert ledger.available("full") == 8


def test_a_load_that_fails_at_its_last_check_revokes_those_it_had_granted_everything(ledger: Ledger) -> None:
    load, extent = loading(ledger)
    ticket = ledger.request(READER, [extent])
    ledger.layer_landed(load, LAYERS)
    assert ledger.fail_load(load) == [ticket]
    assert ticket.state is REVOKING


def test_pages_of_a_forward_are_nobodys_to_read_until_sealed(ledger: Ledger) -> None:
    load, extent = loading(ledger, 2, kind=LoadKind.FORWARD)
    refused(ledger, lambda: ledger.request(READER, [extent]), "filled or loading")
    ledger.seal(load, "full", extent.pages[:1])
    sealed = ledger.extent("full", extent.pages[:1])
    assert ledger.request(READER, [sealed]).state is GRANTED
    refused(ledger, lambda: ledger.seal(load, "full", extent.pages[:1]), "this lease does not hold it")
    ledger.end_load(load)
    refused(ledger, lambda: ledger.request(READER, [ledger.extent("full", extent.pages[1:])]), "filled or loading")


def test_only_a_forward_seals(ledger: Ledger) -> None:
    load, extent = loading(ledger)
    refused(ledger, lambda: ledger.seal(load, "full", extent.pages), "pages of a hicache load can't be sealed")


# ---- generations -----------------------------------------------------------------------------------------


def test_generations_rise_with_each_owner_and_each_load(ledger: Ledger) -> None:
    first = owned(ledger)
    page = first.pages[0]
    load = ledger.open_load(LoadKind.HICACHE, [first])
    assert load.extents[0].generations == (first.generations[0] + 1,)
    ledger.end_load(load)
    ledger.free("full", [page])
    ledger.allocate({"full": 8})
    assert ledger.extent("full", [page]).generations == (first.generations[0] + 2,)


def test_an_extent_of_an_older_generation_is_refused_everywhere(ledger: Ledger) -> None:
    stale = filled(ledger)
    load = ledger.open_load(LoadKind.TRANSFER, [stale])
    ledger.layer_landed(load, LAYERS)
    ledger.end_load(load)
    refused(ledger, lambda: ledger.request(READER, [stale]), "is at generation 3, not 2")
    refused(ledger, lambda: ledger.open_load(LoadKind.HICACHE, [stale]), "is at generation 3, not 2")
    ticket = ledger.request(READER, load.extents)
    refused(ledger, lambda: ledger.extend(ticket, [stale]), "is at generation 3, not 2")


def test_extents_that_share_a_page_share_its_generation(ledger: Ledger) -> None:
    """Two pools of one page, named apart: one load writes both, and either can be read."""
    page = owned(ledger).pages[0]
    halves = [ledger.extent("full", [page], [pool]) for pool in ("c4_kv", "index_k")]
    load = ledger.open_load(LoadKind.TRANSFER, halves)
    assert load.extents[0].generations == load.extents[1].generations
    whole = ledger.request(READER, [ledger.extent("full", [page])])
    ledger.layer_landed(load, LAYERS)
    assert whole.readable == LAYERS


# ---- S2: no write under a reader -------------------------------------------------------------------------


@pytest.mark.parametrize("state", [PENDING, GRANTED, REVOKING])
def test_no_load_opens_under_a_reader(ledger: Ledger, state: TicketState) -> None:
    extent = loading(ledger)[1] if state is PENDING else filled(ledger)
    ticket = ledger.request(READER, [extent], room=1)
    if state is REVOKING:
        ledger.revoke(1)
    assert ticket.state is state
    refused(ledger, lambda: ledger.open_load(LoadKind.TRANSFER, [extent]), "a ticket reads it")


def test_no_two_loads_write_a_page(ledger: Ledger) -> None:
    _, extent = loading(ledger)
    refused(ledger, lambda: ledger.open_load(LoadKind.TRANSFER, [extent]), "another load writes it")


def test_a_page_is_free_only_after_its_last_reader_and_its_load(ledger: Ledger) -> None:
    load, extent = loading(ledger)
    first, second = ledger.request(READER, [extent]), ledger.request(INDEXER, [extent])
    ledger.layer_landed(load, LAYERS)
    assert ledger.free("full", extent.pages) == 0
    ledger.release(first)
    ledger.end_load(load)
    assert ledger.available("full") == 7
    refused(ledger, lambda: ledger.request(READER, [extent]), "has no owner")
    ledger.release(second)
    assert ledger.available("full") == 8


def test_a_page_of_a_new_owner_holds_nothing_of_the_one_before(ledger: Ledger) -> None:
    ledger.free("full", filled(ledger).pages)
    every = owned(ledger, 8)
    for page in every.pages:
        refused(ledger, lambda p=page: ledger.request(READER, [ledger.extent("full", [p])]), "not every asked")  # type: ignore[misc]


def test_a_page_is_free_only_after_its_load_even_if_nobody_reads(ledger: Ledger) -> None:
    load, extent = loading(ledger)
    assert ledger.free("full", extent.pages) == 0
    ledger.layer_landed(load, LAYERS)
    assert ledger.available("full") == 7
    ledger.end_load(load)
    assert ledger.available("full") == 8


def test_a_sealed_page_outlives_its_lease_and_a_freed_one_does_not(ledger: Ledger) -> None:
    load, extent = loading(ledger, kind=LoadKind.FORWARD)
    assert ledger.free("full", extent.pages) == 0
    ledger.seal(load, "full", extent.pages)
    assert ledger.available("full") == 8


def test_freeing_twice_or_what_nobody_owns_is_refused(ledger: Ledger) -> None:
    extent = owned(ledger, 2)
    refused(ledger, lambda: ledger.free("full", (*extent.pages, 7)), "page 7 is freed, but nobody owns it")
    refused(ledger, lambda: ledger.free("full", [extent.pages[0]] * 2), "one of them twice")
    assert ledger.free("full", extent.pages) == 2
    refused(ledger, lambda: ledger.free("full", extent.pages), "nobody owns it")


def test_allocation_is_all_or_nothing(ledger: Ledger) -> None:
    assert ledger.allocate({"full": 8, "swa": 5}) is None
    assert (ledger.available("full"), ledger.available("swa")) == (8, 4)
    assert ledger.allocate({"full": 8, "swa": 4}) is not None


# ---- S3: quarantine --------------------------------------------------------------------------------------


def test_quarantined_pages_are_neither_read_nor_reused_until_the_writer_is_quiet(ledger: Ledger) -> None:
    load, extent = loading(ledger, kind=LoadKind.TRANSFER)
    pending = ledger.request(READER, [extent])
    ledger.free("full", extent.pages)
    assert ledger.quarantine(load) == [pending]
    assert pending.state is REVOKED
    assert ledger.layer_landed(load, LAYERS) == []
    refused(ledger, lambda: ledger.request(READER, [extent]), "has no owner")
    refused(ledger, lambda: ledger.free("full", extent.pages), "nobody owns it")
    assert ledger.counts()["quarantined"]["full"] == 1
    ledger.end_load(load)
    assert (ledger.counts()["quarantined"]["full"], ledger.available("full")) == (0, 8)


def test_a_reader_that_was_granted_holds_a_quarantined_page_beyond_its_load(ledger: Ledger) -> None:
    load, extent = loading(ledger, kind=LoadKind.TRANSFER)
    ticket = ledger.request(READER, [extent])
    ledger.layer_landed(load, 1)
    ledger.quarantine(load)
    ledger.end_load(load)
    assert ledger.counts()["quarantined"]["full"] == 1
    ledger.release(ticket)
    assert ledger.available("full") == 8


# ---- S7: whole groups ------------------------------------------------------------------------------------


def test_a_group_with_a_member_missing_is_not_readable(ledger: Ledger) -> None:
    """KV restored, index sidecar missing: the prefix is not cached."""
    page = owned(ledger).pages[0]
    load = ledger.open_load(LoadKind.HICACHE, [ledger.extent("full", [page], ["c4_kv"])])
    both, kv = ledger.extent("full", [page]), load.extents[0]
    refused(ledger, lambda: ledger.request(READER, [both]), "not every asked pool is filled or loading")
    assert ledger.request(READER, [kv]).state is PENDING
    ledger.layer_landed(load, LAYERS)
    ledger.end_load(load)
    refused(ledger, lambda: ledger.request(INDEXER, [ledger.extent("full", [page], ["index_k"])]), "not every")
    assert ledger.request(READER, [kv]).state is GRANTED


def test_pages_of_the_host_and_of_the_device_are_not_taken_for_one_another() -> None:
    """Both spaces have a page 0, and here both are at the same generation: only the space tells them apart."""
    ledger = Ledger({name: SpaceSpec(2, ("c4_kv",)) for name in ("full", "host.full")}, LAYERS)
    here, there = (
        ledger.extent(name, pages) for name, pages in (ledger.allocate({"full": 1, "host.full": 1}) or {}).items()
    )
    words = "backup writes host pages, and full is a space of the device"
    refused(ledger, lambda: ledger.open_load(LoadKind.BACKUP, [here]), words)
    for kind in (LoadKind.HICACHE, LoadKind.TRANSFER, LoadKind.FORWARD):
        words = f"{kind.value} writes device pages, and host.full is a space of the host"
        refused(ledger, lambda kind=kind: ledger.open_load(kind, [there]), words)  # type: ignore[misc]
    for kind, extent in ((LoadKind.HICACHE, here), (LoadKind.BACKUP, there)):
        load = ledger.open_load(kind, [extent])
        ledger.layer_landed(load, LAYERS)
        ledger.end_load(load)
    here, there = (ledger.extent(name, [0]) for name in ("full", "host.full"))
    for consumer in Consumer:
        mine, other = (there, here) if consumer is Consumer.LOAD else (here, there)
        refused(ledger, lambda c=consumer, e=other: ledger.request(c, [e]), f"{consumer.value} reads ")  # type: ignore[misc]
        ticket = ledger.request(consumer, [mine])
        refused(ledger, lambda t=ticket, e=other: ledger.extend(t, [e]), f"{consumer.value} reads ")  # type: ignore[misc]
        ledger.release(ticket)


def test_what_does_not_exist_is_named(ledger: Ledger) -> None:
    refused(ledger, lambda: ledger.extent("full", [0], ["c8_kv"]), "has pools .*c4_kv.*asked are .*c8_kv")
    refused(ledger, lambda: ledger.extent("full", [0], []), "asked are")
    refused(ledger, lambda: ledger.extent("full", [8]), "has pages 0..7, asked are 8..8")
    refused(ledger, lambda: ledger.extent("full", [-1]), "has pages 0..7, asked are -1..-1")
    refused(ledger, lambda: ledger.free("full", [-1]), "has pages 0..7")
    refused(ledger, lambda: ledger.extent("host", [0]), "no space host, only full, swa")
    refused(ledger, lambda: ledger.allocate({"host": 1}), "no space host")


# ---- tickets ---------------------------------------------------------------------------------------------


def test_a_refused_request_leaves_no_reader(ledger: Ledger) -> None:
    good, two = filled(ledger), filled(ledger, 2)
    stale = replace(two, generations=(two.generations[0], two.generations[1] - 1))
    refused(ledger, lambda: ledger.request(READER, [good, stale]), "is at generation")
    refused(ledger, lambda: ledger.request(READER, [good, replace(two, space="host")]), "no space host")
    refused(ledger, lambda: ledger.request(READER, [replace(two, space="host")]), "no space host")
    for extent in (good, two):
        ledger.open_load(LoadKind.HICACHE, [extent])


def test_a_second_release_is_refused(ledger: Ledger) -> None:
    ticket = ledger.request(READER, [filled(ledger)])
    ledger.release(ticket)
    refused(ledger, lambda: ledger.release(ticket), "already released")
    assert ticket.readable == 0


def test_two_releases_do_not_free_a_page_that_another_reads(ledger: Ledger) -> None:
    extent = filled(ledger)
    once, other = ledger.request(READER, [extent]), ledger.request(READER, [extent])
    ledger.release(once)
    refused(ledger, lambda: ledger.release(once), "already released")
    assert ledger.free("full", extent.pages) == 0
    ledger.release(other)
    assert ledger.available("full") == 8


def test_posted_reads_outlive_release_and_revocation(ledger: Ledger) -> None:
    extent = filled(ledger)
    ticket = ledger.request(Consumer.SENDER, [extent], room=1)
    ledger.post(ticket)
    ledger.post(ticket)
    ledger.free("full", extent.pages)
    ledger.revoke(1)
    ledger.release(ticket)
    refused(ledger, lambda: ledger.release(ticket), "released twice while its reads are in flight")
    ledger.complete(ticket)
    assert (ticket.state, ledger.available("full")) == (REVOKING, 7)
    ledger.complete(ticket)
    assert (ticket.state, ledger.available("full")) == (RELEASED, 8)
    refused(ledger, lambda: ledger.complete(ticket), "completed that was not posted")
    refused(ledger, lambda: ledger.post(ticket), "already released")


def test_reads_complete_before_release(ledger: Ledger) -> None:
    ticket = ledger.request(Consumer.SENDER, [filled(ledger)])
    ledger.post(ticket)
    ledger.complete(ticket)
    assert ticket.state is GRANTED
    ledger.release(ticket)
    assert ticket.state is RELEASED


@pytest.mark.parametrize("landed", [0, 2])
def test_nothing_is_posted_before_all_layers_are_granted(ledger: Ledger, landed: int) -> None:
    load, extent = loading(ledger)
    ticket = ledger.request(Consumer.SENDER, [extent])
    ledger.layer_landed(load, landed)
    refused(ledger, lambda: ledger.post(ticket), f"{landed} layers granted")


def test_an_unguarded_read_in_flight_still_holds_its_pages(ledger: Ledger) -> None:
    """With the guard off the read is early; its pages are not reused under it all the same."""
    load, extent = loading(ledger)
    ticket = ledger.request(Consumer.SENDER, [extent], room=1)
    ledger.post(ticket, guarded=False)
    ledger.revoke(1)
    assert ticket.state is REVOKING
    ledger.end_load(load)
    ledger.free("full", extent.pages)
    ledger.release(ticket)
    assert ledger.available("full") == 7
    ledger.complete(ticket)
    assert ledger.available("full") == 8


def test_revoking_a_room_touches_its_tickets_alone(ledger: Ledger) -> None:
    load, extent = loading(ledger)
    mine, theirs = ledger.request(READER, [extent], room=1), ledger.request(READER, [extent], room=2)
    assert ledger.revoke(1) == [mine]
    assert ledger.revoke(1) == []
    assert ledger.layer_landed(load, LAYERS) == [theirs]
    refused(ledger, lambda: ledger.revoke(None), "tickets of no room")


def test_a_revoked_ticket_is_granted_no_more(ledger: Ledger) -> None:
    load, extent = loading(ledger)
    ticket = ledger.request(READER, [extent], room=1)
    ledger.layer_landed(load, 1)
    ledger.revoke(1)
    assert ledger.layer_landed(load, 3) == []
    assert ticket.readable == 1


def test_extend_shrinks_the_grant_to_what_may_be_read_of_all(ledger: Ledger) -> None:
    ticket = ledger.request(READER, [filled(ledger)])
    load, extent = loading(ledger)
    ledger.layer_landed(load, 1)
    ledger.extend(ticket, [extent])
    assert ticket.readable == 1
    ledger.free("full", extent.pages)
    ledger.layer_landed(load, 3)
    ledger.end_load(load)
    assert (ticket.readable, ledger.available("full")) == (3, 6)
    ledger.release(ticket)
    assert ledger.available("full") == 7
    refused(ledger, lambda: ledger.extend(ticket, [extent]), "a released ticket may not be extended")


def test_a_refused_extend_leaves_the_ticket_as_it_was(ledger: Ledger) -> None:
    extent = filled(ledger)
    ticket = ledger.request(READER, [extent])
    good, bad = filled(ledger), owned(ledger)
    refused(ledger, lambda: ledger.extend(ticket, [good, bad]), "filled or loading")
    assert ticket.extents == (extent,)
    assert ledger.free("full", good.pages) == 1


def test_trim_gives_back_single_pages(ledger: Ledger) -> None:
    extent = filled(ledger, 3)
    ticket = ledger.request(READER, [extent])
    ledger.free("full", extent.pages)
    ledger.trim(ticket, "full", extent.pages[:1])
    assert ledger.available("full") == 6
    assert ticket.extents[0].pages == extent.pages[1:]
    refused(ledger, lambda: ledger.trim(ticket, "full", extent.pages[:1]), "that it does not hold")
    ledger.trim(ticket, "full", extent.pages[1:])
    assert (ticket.extents, ledger.available("full")) == ((), 8)
    ledger.release(ticket)


def test_trim_waits_for_posted_reads(ledger: Ledger) -> None:
    extent = filled(ledger)
    ticket = ledger.request(Consumer.SENDER, [extent])
    ledger.post(ticket)
    refused(ledger, lambda: ledger.trim(ticket, "full", extent.pages), "1 reads posted may not be trimmed")


def test_every_live_ticket_is_reported(ledger: Ledger) -> None:
    extent = filled(ledger)
    tickets: list[Ticket] = [ledger.request(READER, [extent], room=room) for room in (None, None, 1)]
    assert set(ledger.live()) == set(tickets)
    for ticket in tickets:
        ledger.release(ticket)
    assert ledger.live() == []
    assert ledger.tickets == 0


def test_what_has_ended_keeps_no_other_ticket(ledger: Ledger) -> None:
    """Who holds on to one of them does not hold on to all that were requested since."""
    extent = filled(ledger)
    tickets = [ledger.request(READER, [extent], room=1) for _ in range(3)]
    for ticket in (tickets[1], tickets[0], tickets[2]):
        ledger.release(ticket)
        assert ticket.before is None
        assert ticket.after is None


# ---- guards that experiments switch off -----------------------------------------------------------------


def test_a_reader_that_does_not_hold_keeps_nobody_from_its_pages(ledger: Ledger) -> None:
    extent = filled(ledger)
    ticket = ledger.request(Consumer.BACKUP, [extent], holds=False)
    assert ledger.free("full", extent.pages) == 1
    assert not ledger.stale(ticket)
    assert ledger.allocate({"full": 8}) is not None
    assert ledger.stale(ticket)
    ledger.release(ticket)
    assert ledger.free("full", extent.pages) == 1, "its end takes no other reader's place"


def test_pages_given_away_under_a_load_are_another_s_at_once(ledger: Ledger) -> None:
    load, extent = loading(ledger, 2)
    ticket = ledger.request(READER, [extent])
    assert ledger.loading("full", extent.pages) == 2
    assert ledger.free("full", extent.pages, guarded=False) == 2
    assert ledger.allocate({"full": 8}) is not None
    ledger.layer_landed(load, LAYERS)
    ledger.end_load(load)
    assert (ticket.state, ledger.stale(ticket)) == (GRANTED, True)
    ledger.release(ticket)
    assert ledger.counts()["owned"]["full"] == 8
