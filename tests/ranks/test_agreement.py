"""Ranks act alike in the same step on what only one of them saw; without agreement they part and hang (S4)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from dsv4ctl.controlplane.config.schema import EngineConfig, HiCacheConfig, ReferenceConfig
from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.oracle import Oracle
from ranks import ENDLESS, HURRIED, Ranks


def prompt(seed: int, tokens: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(256) for _ in range(tokens)]


def config(ranks: int) -> EngineConfig:
    return EngineConfig(
        name="s",
        role="single",
        ranks=ranks,
        hicache=HiCacheConfig(pages=64, h2d_gbps=0),
        reference=ReferenceConfig(device_pages=24),
    )


@pytest.fixture
def two() -> Iterator[Ranks]:
    ranks = Ranks(config(2))
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("number", [2, 4])
def test_ranks_give_the_tokens_of_one(number: int) -> None:
    oracle = Oracle(Geometry(heads=max(2, number)), 0)
    ranks = Ranks(config(number))
    try:
        shared = prompt(1, 2 * 256)
        asked = [shared + prompt(seed, 70) for seed in (2, 3)]
        pending = [ranks.ask(ids, 6)[1] for ids in asked]
        answers = [ranks.answer(outputs)[0] for outputs in pending]
        assert answers == [oracle.generate(ids, 6).tokens for ids in asked]
        ranks.until("at rest", ranks.at_rest)
    finally:
        ranks.stop()


def test_an_abort_that_one_rank_saw_ends_the_room_on_both(two: Ranks) -> None:
    """Report 23."""
    key, outputs = two.ask(prompt(1, 600), ENDLESS)
    two.until("decoding", lambda: bool(two.engines[1]._loop.decoding))
    two.engines[1]._agent.abort(key, AbortSource.DEADLINE, "this rank's clock ran out")
    _, finished = two.answer(outputs)
    assert finished.reason == "abort"
    assert finished.source is AbortSource.DEADLINE
    two.until("at rest", two.at_rest)
    assert two.answer(two.ask(prompt(2, 300), 4)[1])[0] == Oracle(Geometry(), 0).generate(prompt(2, 300), 4).tokens


def test_a_load_that_failed_on_one_rank_is_forgotten_by_both(two: Ranks) -> None:
    """A stale byte in one rank's host copy: its digest says so, and no rank keeps what it was to fill. Report 24."""
    shared = prompt(1, 4 * 256)
    two.answer(two.ask(shared + prompt(2, 10), 1)[1])
    two.answer(two.ask(prompt(9, 20 * 256), 1)[1])
    two.until("at rest", two.at_rest)
    hicache = two.engines[1]._hicache
    assert hicache is not None
    hicache._host.bytes_of("index_k").view(-1)[::97] ^= 255
    _, finished = two.answer(two.ask(shared + prompt(3, 10), 4)[1])
    assert finished.reason == "abort"
    assert two.engines[1]._agent.counters["digest_mismatches"] > 0
    assert two.engines[0]._agent.counters["digest_mismatches"] == 0
    two.until("at rest", two.at_rest)
    two.until("both forgot it", lambda: len({len(list(engine._loop._cache.nodes())) for engine in two.engines}) == 1)
    ids = shared + prompt(3, 10)
    assert two.answer(two.ask(ids, 4)[1])[0] == Oracle(Geometry(), 0).generate(ids, 4).tokens


def test_waves_of_aborts_seen_in_different_order(two: Ranks) -> None:
    for wave in range(5):
        rooms = [two.ask(prompt(100 * wave + at, 300 + at), 40) for at in range(8)]
        order = list(rooms)
        for engine in two.engines:
            random.Random(wave + engine._launch.rank).shuffle(order)
            for key, _ in order[:6]:
                engine._agent.abort(key, AbortSource.ADMIN, "wave")
        for _, outputs in rooms:
            two.answer(outputs)
        two.until("at rest", two.at_rest)
    assert two.ended == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_without_agreement_the_ranks_part() -> None:
    """The same one-sided abort, each rank acting on what it knows: one leaves the batch, the other waits for it.

    Reports 23 and 24.
    """
    ranks = Ranks(config(2), ("rank_agreement",))
    try:
        key, _ = ranks.ask(prompt(1, 600), ENDLESS)
        ranks.until("decoding", lambda: bool(ranks.engines[1]._loop.decoding))
        ranks.meeting.timeout = HURRIED
        ranks.engines[1]._agent.abort(key, AbortSource.DEADLINE, "this rank's clock ran out")
        ranks.until("an engine that ended", lambda: bool(ranks.ended))
        assert "step thread died" in ranks.ended[0]
    finally:
        ranks.stop()
