"""One engine, no peer: cached, loaded and cold prompts give the oracle's tokens, and every page comes back."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from dsv4ctl.controlplane.config.schema import EngineConfig, HiCacheConfig, ReferenceConfig
from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.oracle import Oracle
from single import Single


def prompt(seed: int, tokens: int) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(tokens)]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(Geometry(), 0)


@pytest.fixture
def single() -> Iterator[Single]:
    config = EngineConfig(
        name="s", role="single", hicache=HiCacheConfig(pages=64), reference=ReferenceConfig(device_pages=24)
    )
    engine = Single(config)
    yield engine
    engine.stop()


def test_a_cold_a_cached_and_a_loaded_prompt_give_the_oracles_tokens(single: Single, oracle: Oracle) -> None:
    shared = prompt(1, 8 * 256)
    wanted = {}
    for seed in (2, 3):
        ids = shared + prompt(seed, 100)
        wanted[seed] = oracle.generate(ids, 12, ignore_eos=True).tokens
        tokens, finished = single.answer(single.ask(ids, 12)[1])
        assert tokens == wanted[seed]
        assert finished.cached_tokens == (0 if seed == 2 else 8 * 256)
    evictor = prompt(9, 20 * 256)
    assert single.answer(single.ask(evictor, 4)[1])[0] == oracle.generate(evictor, 4, ignore_eos=True).tokens
    ids = shared + prompt(2, 100)
    tokens, finished = single.answer(single.ask(ids, 12)[1])
    assert tokens == wanted[2]
    assert finished.cached_tokens == 8 * 256
    assert single.engine._agent.counters["host_tokens_loaded"] >= 4 * 256


def test_two_requests_of_one_batch_share_a_prefix_that_is_still_loading(single: Single, oracle: Oracle) -> None:
    shared = prompt(1, 8 * 256)
    asked = [shared + prompt(seed, 60) for seed in (2, 3)]
    wanted = [oracle.generate(ids, 8, ignore_eos=True).tokens for ids in asked]
    single.answer(single.ask(asked[0], 8)[1])
    single.answer(single.ask(prompt(9, 20 * 256), 1)[1])
    keys = [single.open(), single.open()]
    pending = [single.ask(ids, 8, key)[1] for ids, key in zip(asked, keys, strict=True)]
    assert [single.answer(outputs)[0] for outputs in pending] == wanted
    assert single.engine.gate.totals()["violations"] == 0


def test_a_stale_host_page_is_refused_and_a_fresh_room_recomputes_it(single: Single, oracle: Oracle) -> None:
    """The digest travels with the page: what a load brings is compared with what was sealed, before it is read.

    Report 31, in bytes.
    """
    ids = prompt(1, 8 * 256) + prompt(2, 100)
    single.answer(single.ask(ids, 1)[1])
    single.answer(single.ask(prompt(9, 22 * 256), 1)[1])
    hicache = single.engine._hicache
    assert hicache is not None
    hicache._host.bytes_of("index_k").view(-1)[::997] ^= 255
    _, finished = single.answer(single.ask(ids, 8)[1])
    assert (finished.reason, finished.source) == ("abort", AbortSource.INTEGRITY)
    key = single.open(fresh=True)
    tokens, finished = single.answer(single.ask(ids, 8, key)[1])
    assert tokens == oracle.generate(ids, 8).tokens
    assert finished.cached_tokens == 0
    again, finished = single.answer(single.ask(ids, 8)[1])
    assert again == tokens
    assert finished.cached_tokens == 8 * 256


def test_every_page_comes_back(single: Single) -> None:
    for seed in range(3):
        single.answer(single.ask(prompt(seed, 700), 8)[1])
    single.settle()
    single.engine.flush()
    single.settle()
    counts = single.engine.gate.counts()
    assert counts["owned"] == counts["retiring"] == dict.fromkeys(counts["owned"], 0)
    assert single.engine.gate.totals()["tickets"] == 0
    assert single.ended == []


def test_a_flush_that_a_request_overtakes_is_kept(single: Single) -> None:
    """Asked for between two requests, it takes effect once neither lives: it is delayed, never lost."""
    loop = single.engine._loop
    with single.between_rounds():
        single.engine.flush()
        _, outputs = single.ask(prompt(1, 700), 8)
    single.answer(outputs)
    single.settle()
    assert loop._flush is False
    counts = single.engine.gate.counts()
    assert counts["owned"] == dict.fromkeys(counts["owned"], 0)
