"""Two transfer halves over real NIXL: what lands, what is refused, and who waits for whom."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey, RoomState
from dsv4ctl.controlplane.tickets.types import Guard, LoadKind
from dsv4ctl.engine_adapters.reference import receiver, sender
from dsv4ctl.engine_adapters.reference.digests import PageDigests
from dsv4ctl.engine_adapters.reference.landed import LandedDigests, digest_landed
from dsv4ctl.engine_adapters.reference.peer_wire import Manifest
from dsv4ctl.policies.integrity import Verdict
from transfer_rank import KEY, LIMIT, PAGES, Rank, same_bytes


@pytest.fixture
def prefill() -> Iterator[Rank]:
    with Rank(Role.PREFILL, "P") as rank:
        yield rank


@pytest.fixture
def decode() -> Iterator[Rank]:
    with Rank(Role.DECODE, "D") as rank:
        yield rank


@pytest.mark.parametrize("tokens", [1, 256, 600, 1024])
def test_the_bytes_land_equal_and_their_digests_match(prefill: Rank, decode: Rank, tokens: int) -> None:
    prefill.open("D")
    source = prefill.computed(tokens)
    landed = decode.expect(decode.open("P"), tokens, prefill.transfer.bootstrap_port)
    prefill.send(source, tokens)
    verified = decode.wait(RoomState.VERIFIED)
    assert verified.detail["digests_compared"] > 0
    assert verified.detail["digest_mismatches"] == []
    decode.until(lambda: KEY in decode.ready)
    assert decode.ready[KEY].first_token == 42
    assert same_bytes(prefill, source, decode, landed)
    closed = prefill.wait(RoomState.CLOSED)
    layers = len(prefill.pools.specs["index_k"].model_layers)
    assert closed.detail["bytes_by_pool"]["index_k"] == layers * 16384 * len(source.full)
    prefill.until(lambda: prefill.gate.room_in("full") == (PAGES["full"], 0))
    assert decode.gate.totals()["loads"] == 0


def test_rooms_do_not_wait_for_one_another(prefill: Rank, decode: Rank) -> None:
    keys = [RoomKey(number, 1) for number in range(4)]
    landed = {}
    for key in keys:
        prefill.open("D", key)
        landed[key] = decode.expect(decode.open("P", key), 600, prefill.transfer.bootstrap_port)
    sources = {key: prefill.computed(600, seed=key.room, key=key) for key in keys}
    for key in reversed(keys):
        prefill.send(sources[key], 600, key)
        decode.wait(RoomState.VERIFIED, key)
        assert same_bytes(prefill, sources[key], decode, landed[key])


def test_without_integrity_nothing_is_compared(prefill: Rank, decode: Rank) -> None:
    prefill.open("D")
    decode.expect(decode.open("P"), 600, prefill.transfer.bootstrap_port, Verdict.NONE)
    prefill.send(prefill.computed(600), 600)
    assert "digests_compared" not in decode.wait(RoomState.VERIFIED).detail


def _loading(prefill: Rank, pool: str) -> tuple[object, object]:
    """A prompt whose pages a HiCache load still fills: digests of what it will hold, stale bytes in one pool."""
    table, load = prefill.take(600, LoadKind.HICACHE)
    prefill.fill(table, seed=1)
    chunks = prefill.chunks(table, 600)
    prefill.pools.bytes_of(pool)[:, table.full[0]] = 0
    for chunk in chunks:
        prefill.transfer.sender.chunk(KEY, chunk)
    prefill.transfer.sender.finish(KEY, Manifest(600, 42, len(chunks)))
    return table, load


def test_a_page_that_is_still_loading_is_not_sent_before_it_landed(prefill: Rank, decode: Rank) -> None:
    prefill.open("D")
    landed = decode.expect(decode.open("P"), 600, prefill.transfer.bootstrap_port)
    table, load = _loading(prefill, "index_k")
    prefill.until(lambda: prefill.gate.totals()["pending"] == 3)
    prefill.fill(table, seed=1)
    prefill.land(load)
    assert decode.wait(RoomState.VERIFIED).detail["digest_mismatches"] == []
    assert same_bytes(prefill, table, decode, landed)
    assert not prefill.gate.violations
    kinds = [event.kind for event in prefill.trace.events() if event.kind in ("landed", "read")]
    assert kinds == ["landed", "read", "read", "read"]


def test_without_the_senders_guard_the_digests_name_the_stale_pool(prefill: Rank, decode: Rank) -> None:
    prefill.guards_off(Guard.SENDER)
    prefill.open("D")
    decode.expect(decode.open("P"), 600, prefill.transfer.bootstrap_port)
    _loading(prefill, "index_k")
    report = decode.wait(RoomState.ABORTED)
    assert report.detail["source"] == AbortSource.INTEGRITY.value
    layers = decode.pools.specs["index_k"].model_layers
    assert report.detail["reason"] == f"digest mismatch in index_k layers {','.join(map(str, layers))}"
    aborting = decode.wait(RoomState.ABORTING)
    assert aborting.detail["digest_mismatches"] == ["index_k"]
    assert decode.agent.counters["digest_mismatches"] == len(layers)
    assert KEY not in decode.ready
    assert prefill.gate.violations["sender read * before hicache landed"] == 3
    decode.until(lambda: decode.gate.room_in("full") == (PAGES["full"], 0))


def test_an_observed_mismatch_is_reported_and_the_room_goes_on(prefill: Rank, decode: Rank) -> None:
    prefill.guards_off(Guard.SENDER)
    prefill.open("D")
    decode.expect(decode.open("P"), 600, prefill.transfer.bootstrap_port, observe=True)
    _loading(prefill, "c128_kv")
    assert decode.wait(RoomState.VERIFIED).detail["digest_mismatches"] == ["c128_kv"]
    decode.until(lambda: KEY in decode.ready)


def test_a_failed_load_of_the_source_ends_the_room_on_both_sides(prefill: Rank, decode: Rank) -> None:
    prefill.open("D")
    decode.expect(decode.open("P"), 600, prefill.transfer.bootstrap_port)
    _, load = _loading(prefill, "index_k")
    prefill.until(lambda: prefill.gate.totals()["pending"] == 3)
    prefill.gate.fail_load(load, "host page lost")
    assert "was not sent" in prefill.wait(RoomState.ABORTED).detail["reason"]
    decode.wait(RoomState.ABORTED)
    decode.until(lambda: decode.gate.room_in("full") == (PAGES["full"], 0))


def test_prompts_that_differ_are_refused(prefill: Rank, decode: Rank) -> None:
    """Report 36: the transferred length is the expected one."""
    prefill.open("D")
    decode.expect(decode.open("P"), 601, prefill.transfer.bootstrap_port)
    prefill.send(prefill.computed(600), 600)
    assert "600 prompt tokens were sent, 601 were expected" in decode.wait(RoomState.ABORTED).detail["reason"]


def test_a_pool_without_digests_is_no_pool_that_was_verified(
    prefill: Rank, decode: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sender._folded

    def folded(*args: Any) -> PageDigests:
        return PageDigests({pool: values for pool, values in real(*args).values.items() if pool != "index_k"})

    monkeypatch.setattr(sender, "_folded", folded)
    prefill.open("D")
    decode.expect(decode.open("P"), 600, prefill.transfer.bootstrap_port)
    prefill.send(prefill.computed(600), 600)
    assert "no digests of index_k were sent" in decode.wait(RoomState.ABORTED).detail["reason"]
    assert KEY not in decode.ready


def test_pools_that_differ_are_refused_with_both_figures(prefill: Rank) -> None:
    with Rank(Role.DECODE, "D", index_k_dtype="fp8") as decode:
        prefill.open("D")
        decode.expect(decode.open("P"), 600, prefill.transfer.bootstrap_port)
        reason = decode.wait(RoomState.ABORTED).detail["reason"]
        assert "index_k page_bytes differs: 16384 here, 8448 on the peer" in reason
        assert decode.transfer.counters()["refused_peers"] == 1
    assert prefill.transfer.counters()["refused_peers"] == 1


def test_a_loop_that_dies_says_so() -> None:
    with Rank(Role.DECODE, "D") as rank:

        def defect() -> None:
            raise RuntimeError("a defect")

        rank.transfer._inbox.put(defect)
        rank.until(lambda: bool(rank.died))
        assert rank.transfer.fault == "the transfer loop died: RuntimeError: a defect"


# ---- a verdict before the output, not before the reads --------------------------------------------------


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The pages before the tail are digested only once the event is set."""
    may = threading.Event()

    def digest(*args: Any, tail: bool) -> LandedDigests:
        assert tail or may.wait(LIMIT)
        return digest_landed(*args, tail=tail)

    monkeypatch.setattr(receiver, "digest_landed", digest)
    yield may
    may.set()


@pytest.mark.parametrize("tokens", [600, 512])
def test_decode_begins_before_the_verdict_and_writes_on_without_spoiling_it(
    prefill: Rank, decode: Rank, slow: threading.Event, tokens: int
) -> None:
    prefill.open("D")
    landed = decode.expect(decode.open("P"), tokens, prefill.transfer.bootstrap_port, Verdict.BEFORE_OUTPUT)
    prefill.send(prefill.computed(tokens), tokens)
    decode.until(lambda: KEY in decode.ready)
    assert decode.vouched == []
    pages = -(-tokens // 256)
    lease = decode.gate.open_load(  # what a forward does first: it waits for no digest
        LoadKind.FORWARD,
        [decode.gate.extent("full", landed.full[pages - 1 :]), decode.gate.extent("state", [landed.state])],
    )
    decode.pools.bytes_of("index_k")[:, landed.full[pages - 1]] = 7
    decode.pools.bytes_of("c4_state")[:, landed.state] = 7
    slow.set()
    decode.until(lambda: decode.vouched == [KEY])
    assert decode.reported(RoomState.ABORTING) is None
    decode.gate.end_load(lease)


def test_stale_bytes_are_found_while_the_room_decodes_and_end_it(
    prefill: Rank, decode: Rank, slow: threading.Event
) -> None:
    prefill.guards_off(Guard.SENDER)
    prefill.open("D")
    decode.expect(decode.open("P"), 600, prefill.transfer.bootstrap_port, Verdict.BEFORE_OUTPUT)
    _loading(prefill, "index_k")
    decode.until(lambda: KEY in decode.ready)
    decode.agent.apply(KEY, lambda reader: reader.forward_begin())
    slow.set()
    assert decode.wait(RoomState.ABORTING).detail["source"] == AbortSource.INTEGRITY.value
    assert decode.vouched == []
    decode.agent.apply(KEY, lambda reader: reader.forward_end())
    decode.wait(RoomState.ABORTED)


def test_a_room_of_one_page_has_its_verdict_at_once(prefill: Rank, decode: Rank) -> None:
    prefill.open("D")
    decode.expect(decode.open("P"), 200, prefill.transfer.bootstrap_port, Verdict.BEFORE_OUTPUT)
    prefill.send(prefill.computed(200), 200)
    decode.until(lambda: decode.vouched == [KEY])
    assert decode.wait(RoomState.VERIFIED).detail["digest_mismatches"] == []
