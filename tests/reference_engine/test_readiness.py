"""The CUDA path's device tickets, step by step: on the CPU nothing waits, so each step is decided here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.types import Consumer, Extent, Guard, LoadKind, SpaceSpec
from dsv4ctl.controlplane.trace.ring import Ring
from dsv4ctl.engine_adapters.reference.copies import PacedCopies, StreamCopies
from dsv4ctl.engine_adapters.reference.geometry import Geometry, pool_specs
from dsv4ctl.engine_adapters.reference.indexer import paged_logits
from dsv4ctl.engine_adapters.reference.model import Model
from dsv4ctl.engine_adapters.reference.pools import DevicePools, HostPools
from dsv4ctl.engine_adapters.reference.readiness import Landing, ReadinessWords
from dsv4ctl.engine_adapters.reference.sequence import Chunk, PageTable, make_chunk, open_gate
from dsv4ctl.engine_adapters.reference.warmup import warm_up
from dsv4ctl.kernels import index_k, ops

PAGES = {"full": 6, "swa": 2, "state": 1}
TABLE = PageTable(full=[4, 1, 3], swa={1: 0, 2: 1}, state=0)
LAYER = 1  #: the first with index keys


def extent(*generations: tuple[int, int]) -> Extent:
    return Extent("full", *zip(*generations, strict=True), frozenset({"index_k"}))  # type: ignore[arg-type]


def filled(dtype: str) -> DevicePools:
    pools = DevicePools(Geometry(index_k_dtype=dtype), PAGES)  # type: ignore[arg-type]
    keys = torch.randn(PAGES["full"], index_k.KEYS, index_k.DIM, generator=torch.Generator().manual_seed(1))
    for page in range(PAGES["full"]):
        index_k.store_keys(pools.layer_bytes("index_k", LAYER), dtype, page, 0, keys[page])
    return pools


def chunk_of(pools: DevicePools, tokens: int, landing: Landing | None) -> Chunk:
    return make_chunk(pools, [65] * tokens, 512, TABLE, landing=landing)


def operands(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(tokens, 2, index_k.DIM, generator=generator).bfloat16().float()
    return query, torch.rand(tokens, 2, generator=generator)


def expected(pools: DevicePools, dtype: str, tokens: int) -> torch.Tensor:
    pages = pools.layer_bytes("index_k", LAYER)
    keys = index_k.read_keys(pages, dtype, torch.tensor(TABLE.full), (512 + tokens) // 4)
    return index_k.index_logits(*operands(tokens), keys)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 31, 256])
def test_paged_logits_are_those_of_the_gathered_keys(dtype: str, tokens: int) -> None:
    pools = filled(dtype)
    found = paged_logits(*operands(tokens), chunk_of(pools, tokens, None), LAYER, open_gate)
    torch.testing.assert_close(found, expected(pools, dtype, tokens))


def test_a_page_that_lands_while_the_host_waits_is_read_again() -> None:
    """The kernel gave up on page 1; when the gate opens, its keys are in place and are what the result is made of."""
    pools = filled("bf16")
    right = expected(pools, "bf16", 256)
    page = pools.layer_bytes("index_k", LAYER)[1]
    landed = page.clone()
    page.fill_(0x55)
    words = ReadinessWords(pools, Counter().__setitem__)
    landing = words.landing(TABLE.full, {1: 7})
    assert landing is not None
    asked = []

    def gate(consumer: str, pool: str, layer: int) -> None:
        asked.append((consumer, pool, layer, int(landing.failed)))
        page.copy_(landed)
        words.release(LAYER, extent((1, 7)))

    found = paged_logits(*operands(256), chunk_of(pools, 256, landing), LAYER, gate)
    assert asked == [("indexer", "index_k", LAYER, 1 + 1)], "the kernel flagged logical page 1 before the gate opened"
    torch.testing.assert_close(found, right)
    assert not landing.late(), "a flag is taken once"


def test_only_the_generation_that_was_asked_for_is_granted() -> None:
    pools = filled("bf16")
    words = ReadinessWords(pools, Counter().__setitem__)
    landing = words.landing(TABLE.full, {4: 7, 1: 2})
    assert landing is not None
    flagged = []

    def gate(*_: object) -> None:
        flagged.append(int(landing.failed))

    for released in (None, extent((4, 6), (1, 2)), extent((4, 8)), extent((4, 7))):
        if released is not None:
            words.release(LAYER, released)
        paged_logits(*operands(1), chunk_of(pools, 1, landing), LAYER, gate)
    assert flagged == [1 + 1, 1 + 0, 1 + 0, 0]


def test_another_layer_or_space_grants_nothing() -> None:
    words = ReadinessWords(filled("bf16"), Counter().__setitem__)
    landing = words.landing([4], {4: 7})
    assert landing is not None
    words.release(0, extent((4, 7)))  # has no index keys
    words.release(2, extent((4, 7)))
    words.release(LAYER, replace(extent((4, 7)), space="swa"))
    assert landing.words[:, 4].tolist() == [0, 8, 0]


def test_nothing_to_wait_for_is_no_ticket() -> None:
    assert ReadinessWords(filled("bf16"), Counter().__setitem__).landing([4, 1], {5: 3}) is None


def test_the_gate_tells_what_a_ticket_waits_for() -> None:
    gate = Gate({"full": SpaceSpec(6, ("index_k",)), "host.full": SpaceSpec(6, ("index_k",))}, 2, Ring(lambda: 0))
    gate.register(Consumer.INDEXER, "here")
    taken = gate.allocate({"full": 2})
    assert taken is not None
    load = gate.open_load(LoadKind.HICACHE, [gate.extent("full", taken["full"])], verify=True)
    ticket = gate.request(Consumer.INDEXER, list(load.extents))
    waited = dict(zip(load.extents[0].pages, load.extents[0].generations, strict=True))
    assert gate.landing(ticket, LoadKind.HICACHE, "full") == waited
    assert gate.landing(ticket, LoadKind.TRANSFER, "full") == {}
    gate.layer_landed(load, 2)
    assert gate.landing(ticket, LoadKind.HICACHE, "full") == waited, "landed, and not verified yet"
    gate.set_guards_off([Guard.INDEXER])
    assert gate.landing(ticket, LoadKind.HICACHE, "full") == {}
    gate.set_guards_off([])
    gate.layer_verified(load, 2)
    assert gate.landing(ticket, LoadKind.HICACHE, "full") == {}


def test_the_copies_of_a_stream_move_the_bytes_that_the_paced_ones_move() -> None:
    counts = {**PAGES, "swa": 6, "state": 6}
    here, there = ([DevicePools(Geometry(), counts), HostPools(Geometry(), counts)] for _ in range(2))
    for pools in (here, there):
        generator = torch.Generator().manual_seed(3)
        for side in pools:
            for name in side.specs:
                side.bytes_of(name).random_(0, 256, generator=generator)
    words = ReadinessWords(there[0], Counter().__setitem__)
    paced, stream = PacedCopies(*here, gbps=0), StreamCopies(*there, words)  # type: ignore[arg-type]
    for copies in (paced, stream):
        for name, spec in here[0].specs.items():
            for layer in spec.model_layers:
                copies.load(name, layer, (0, 4), (5, 1))
                copies.save(name, layer, (2, 3), (3, 5))
                copies.release(layer, extent((5, 7), (1, 2)))
    for mine, theirs in zip(here, there, strict=True):
        assert all(torch.equal(mine.bytes_of(name), theirs.bytes_of(name)) for name in mine.specs)
    landing = words.landing([5, 1], {5: 7, 1: 2})
    assert landing is not None
    assert all(torch.equal(landing.words[at, [5, 1]], landing.expected[0]) for at in range(landing.words.shape[0]))


def test_before_it_serves_a_rank_launches_what_it_will_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[str, set[int]] = {"load_pages": set(), "backup_pages": set(), "digest_pages": set()}
    released = []

    def seen(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            launched[name].add(arguments[0].shape[-1])
            return launch(*arguments)

        return call

    for name in launched:
        monkeypatch.setattr(ops, name, seen(name, getattr(ops, name)))
    monkeypatch.setattr(ops, "release_words", lambda words, groups, values: released.append(values.tolist()))
    warm_up(Model(Geometry(), 0))
    sizes = {spec.page_bytes for spec in pool_specs(Geometry()).values()}
    assert launched == dict.fromkeys(launched, sizes)
    assert [1] in released
