"""The forward pass: cold and cached runs are bit-equal, decode agrees with prefill, gates stand before reads."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from dsv4ctl.engine_adapters.reference.digests import PageDigests, digest_page
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.model import Model
from dsv4ctl.engine_adapters.reference.oracle import Oracle, layer_seconds, private_pools
from dsv4ctl.engine_adapters.reference.pools import DevicePools, HostPools, backup_pages, load_pages
from dsv4ctl.engine_adapters.reference.sequence import (
    PageTable,
    chunk_spans,
    make_chunk,
    open_gate,
)

NEW_TOKENS = 8


@cache
def oracle(dtype: str) -> Oracle:
    return Oracle(Geometry(index_k_dtype=dtype), seed=11)


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(32, 127), k=length)


def prefill(
    model: Model, pools: DevicePools, table: PageTable, ids: list[int], start: int, state_from: int | None = None
) -> tuple[torch.Tensor, list[PageDigests]]:
    """Prefill tokens start.., the first chunk from the snapshot; a snapshot of page i's end goes to state 1 + i."""
    pages = []
    for first, end in chunk_spans(model.geometry, start, len(ids)):
        chunk = make_chunk(pools, ids[first:end], first, table, state_from if first == start else None)
        hidden = model.forward(chunk, open_gate)
        pages.append(digest_page(pools, chunk.page, end, table))
        if end % 256 == 0 and pools.pages["state"] > 1 + chunk.page:
            pools.copy_state(table.state, 1 + chunk.page)
    return hidden, pages


def decode(model: Model, pools: DevicePools, table: PageTable, length: int, hidden: torch.Tensor) -> list[int]:
    tokens = [model.next_token(hidden)]
    while len(tokens) < NEW_TOKENS:
        chunk = make_chunk(pools, tokens[-1:], length + len(tokens) - 1, table)
        tokens.append(model.next_token(model.forward(chunk, open_gate)))
    return tokens


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(("length", "resume"), [(900, 768), (769, 768), (771, 512), (1024, 768), (1023, 256)])
def test_a_cached_run_equals_the_cold_one_bit_for_bit(dtype: str, length: int, resume: int) -> None:
    """Prefix computed in one rank's pools, moved through the host to other pages of another, resumed there."""
    model, geometry, ids = oracle(dtype).model, oracle(dtype).model.geometry, prompt(length, length)
    cold = oracle(dtype).generate(ids, NEW_TOKENS)
    counts = {"full": 6, "swa": 6, "state": 6}
    first, host, second = DevicePools(geometry, counts), HostPools(geometry, counts), DevicePools(geometry, counts)
    for pool in second.specs:
        second.bytes_of(pool).random_(0, 128)
    table = PageTable(full=list(range(5)), swa={page: page for page in range(5)}, state=0)
    prefill(model, first, table, ids[:resume], 0)
    count = resume // 256
    moved_to = {"full": [5 - page for page in range(count)], "swa": [4], "state": [3]}
    moved_from = {"full": list(range(count)), "swa": [count - 1], "state": [count]}
    for spec in first.specs.values():
        for layer in spec.model_layers:
            source, target = moved_from[spec.space], moved_to[spec.space]
            backup_pages(first, host, spec.name, layer, source, target)
            load_pages(host, second, spec.name, layer, target, target)
    rest = [page for page in range(6) if page not in moved_to["full"]]
    swa = {count - 1: 4, **{count + at: at for at in range(4)}}
    resumed = PageTable(full=moved_to["full"] + rest, swa=swa, state=5)
    hidden, pages = prefill(model, second, resumed, ids, resume, state_from=3)
    assert [page.differences(want) for page, want in zip(pages, cold.pages[count:], strict=True)] == [[]] * len(pages)
    assert set(pages[-1].values) == set(cold.pages[-1].values) == set(second.specs)
    assert decode(model, second, resumed, length, hidden) == cold.tokens


def test_bytes_of_a_page_do_not_depend_on_the_batch() -> None:
    """Two sequences, layer by layer in turn in shared pools, against each of them alone."""
    model = oracle("bf16").model
    prompts = [prompt(500, 1), prompt(300, 2)]
    pools = DevicePools(model.geometry, {"full": 4, "swa": 4, "state": 2})
    tables = [
        PageTable(full=[2, 0], swa={0: 1, 1: 3}, state=1),
        PageTable(full=[1, 3], swa={0: 0, 1: 2}, state=0),
    ]
    for start in (0, 256):
        chunks = [
            make_chunk(pools, ids[start : start + 256], start, table)
            for ids, table in zip(prompts, tables, strict=True)
        ]
        hidden = [model.embed(chunk) for chunk in chunks]
        for layer in range(model.geometry.layers):
            hidden = [
                model.forward_layer(layer, state, chunk, open_gate) for state, chunk in zip(hidden, chunks, strict=True)
            ]
    for ids, table, state in zip(prompts, tables, hidden, strict=True):
        alone = oracle("bf16").generate(ids, 1)
        assert model.next_token(state) == alone.tokens[0]
        assert digest_page(pools, 1, len(ids), table).differences(alone.pages[1]) == []


@pytest.mark.parametrize("ratios", [(0,), (4,), (128,)])
def test_decode_computes_what_prefill_computes(ratios: tuple[int, ...]) -> None:
    """One layer, 300 tokens: page-sized chunks against token by token (other shapes: close, not equal)."""
    model = Model(Geometry(compress_ratios=ratios), seed=3)
    ids = prompt(300, 4)
    whole, table = private_pools(model.geometry, 300)
    expected = torch.cat(
        [
            model.forward(make_chunk(whole, ids[start:end], start, table), open_gate)
            for start, end in chunk_spans(model.geometry, 0, 300)
        ]
    )
    single, table = private_pools(model.geometry, 300)
    found = torch.cat(
        [model.forward(make_chunk(single, [token], at, table), open_gate) for at, token in enumerate(ids)]
    )
    off = (found - expected).abs().amax(dim=1) > 0.05 * expected.abs().max()
    assert int(off.sum()) <= 3
    for spec in whole.specs.values():
        if spec.space != "state" and spec.name != "index_k":
            rows = whole.rows(spec.name, 0).to(torch.float32) - single.rows(spec.name, 0).to(torch.float32)
            assert float(rows.abs().max()) < 0.05


def test_no_token_sees_a_later_one() -> None:
    model, ids = oracle("bf16").model, prompt(256, 5)
    pools, table = private_pools(model.geometry, 256)
    before = model.forward(make_chunk(pools, ids, 0, table), open_gate)
    after = model.forward(make_chunk(pools, [*ids[:200], *prompt(56, 6)], 0, table), open_gate)
    assert torch.equal(before[:200], after[:200])
    assert not torch.equal(before[200:], after[200:])


class LateLanding:
    """A gate at which the bytes it guards land: not before it is reached. `seen`: the calls."""

    def __init__(self, good: DevicePools, pools: DevicePools, table: PageTable, pages: int) -> None:
        self.seen: list[tuple[str, str, int]] = []
        self._good, self._pools, self._table, self._pages = good, pools, table, pages

    def __call__(self, consumer: str, pool: str, layer: int) -> None:
        self.seen.append((consumer, pool, layer))
        spec = self._pools.specs[pool]
        source, target = self._good.layer_bytes(pool, layer), self._pools.layer_bytes(pool, layer)
        if spec.space == "state":
            target[3].copy_(source[self._pages])
            return
        for page in range(self._pages):
            target[self._table.full[page] if spec.space == "full" else self._table.swa[page]] = source[page]


def late_resume(model: Model, ids: list[int], skip: tuple[str, str] | None) -> tuple[list[int], LateLanding]:
    """Resume at 768 on pools of another prompt; every gate but `skip` lands the bytes it guards."""
    counts = {"full": 4, "swa": 4, "state": 5}
    table = PageTable(full=list(range(4)), swa={page: page for page in range(4)}, state=0)
    good, pools = DevicePools(model.geometry, counts), DevicePools(model.geometry, counts)
    prefill(model, good, table, ids[:768], 0)
    prefill(model, pools, table, prompt(768, 99), 0)
    log = LateLanding(good, pools, table, 3)

    def gate(consumer: str, pool: str, layer: int) -> None:
        if (consumer, pool) != skip:
            log(consumer, pool, layer)

    chunk = make_chunk(pools, ids[768:], 768, table, state_from=3)
    hidden = model.forward(chunk, gate)
    return decode(model, pools, table, len(ids), hidden), log


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_bytes_that_land_at_their_gate_are_in_time_and_without_it_are_not(dtype: str) -> None:
    """Each gate stands before the first read of its bytes, and each one is needed. Report 30."""
    model, ids = oracle(dtype).model, prompt(900, 8)
    want = oracle(dtype).generate(ids, NEW_TOKENS).tokens
    tokens, log = late_resume(model, ids, skip=None)
    assert tokens == want
    order = [entry for entry in log.seen if entry[2] == 1]
    assert order == [
        ("compressor", "c4_state", 1),
        ("compressor", "index_state", 1),
        ("indexer", "index_k", 1),
        ("attention", "c4_kv", 1),
        ("attention", "swa_kv", 1),
    ]
    assert [entry[:2] for entry in log.seen if entry[2] == 3] == [("attention", "c128_kv"), ("attention", "swa_kv")]
    for skip in (("indexer", "index_k"), ("attention", "c4_kv"), ("attention", "swa_kv"), ("attention", "c128_kv")):
        assert late_resume(model, ids, skip)[0] != want, skip


def test_chunks_the_model_cannot_compute_are_refused() -> None:
    geometry = Geometry(context_tokens=512)
    pools = DevicePools(geometry, {"full": 2, "swa": 2, "state": 1})
    table = PageTable(full=[0, 1], swa={1: 0}, state=0)
    with pytest.raises(ValueError, match=r"page table lacks swa pages \[0\]; positions 129..257"):
        make_chunk(pools, [65, 66], 256, table)
    with pytest.raises(ValueError, match="inside a page only single tokens"):
        make_chunk(pools, [65, 66], 3, table)
    with pytest.raises(ValueError, match="ends at 513, beyond the context of 512"):
        make_chunk(pools, [65], 512, table)
    with pytest.raises(ValueError, match="has 0 full pages; position 0 needs 1"):
        make_chunk(pools, [65], 0, PageTable(swa={0: 0}, state=0))
    with pytest.raises(ValueError, match="no state slot"):
        make_chunk(pools, [65], 0, PageTable(full=[0], swa={0: 0}))
    with pytest.raises(ValueError, match="a multiple of 256 below the length"):
        chunk_spans(geometry, 100, 300)


def test_layer_seconds_has_one_figure_a_layer() -> None:
    seconds = layer_seconds(oracle("bf16").model, context=256, repeats=1)
    assert len(seconds) == oracle("bf16").model.geometry.layers
    assert all(value > 0 for value in seconds)
