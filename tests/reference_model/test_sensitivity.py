"""Wrong bytes must show: damage in one pool changes the greedy tokens of most prompts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache

import pytest

from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.model import Model
from dsv4ctl.engine_adapters.reference.oracle import private_pools
from dsv4ctl.engine_adapters.reference.pools import DevicePools
from dsv4ctl.engine_adapters.reference.sequence import chunk_spans, make_chunk, open_gate
from dsv4ctl.engine_adapters.reference.tokenizer import encode_prompt

PROMPTS, NEW_TOKENS, RESUME = 10, 12, 768
WORDS = ("alpha", "beta", "tool", "call", "river", "json", "value", "42", "7", "sun", "asks", "weather", "ok")


@cache
def runs(dtype: str) -> tuple[Model, list[tuple[list[int], DevicePools, list[int]]]]:
    """Per prompt: ids, pools with the prefix 0..767 in pages 0..2 and state 0, and the undamaged answer."""
    model, choose, out = Model(Geometry(index_k_dtype=dtype), seed=0), random.Random(3), []
    for _ in range(PROMPTS + 1):
        ids = encode_prompt(" ".join(choose.choices(WORDS, k=400))[: choose.randrange(800, 1000)])
        pools, table = private_pools(model.geometry, 1024)
        for start, end in chunk_spans(model.geometry, 0, RESUME):
            model.forward(make_chunk(pools, ids[start:end], start, table), open_gate)
        out.append((ids, pools, answer(model, ids, pools)))
    return model, out


def answer(model: Model, ids: list[int], pools: DevicePools) -> list[int]:
    """Resume at 768; the rings are put back, so that the prefix can be resumed again."""
    _, table = private_pools(model.geometry, 1024)
    rings = {spec.name: pools.bytes_of(spec.name).clone() for spec in pools.specs.values() if spec.space == "state"}
    hidden = model.forward(make_chunk(pools, ids[RESUME:], RESUME, table), open_gate)
    tokens = [model.next_token(hidden)]
    while len(tokens) < NEW_TOKENS:
        chunk = make_chunk(pools, tokens[-1:], len(ids) + len(tokens) - 1, table)
        tokens.append(model.next_token(model.forward(chunk, open_gate)))
    for pool, ring in rings.items():
        pools.bytes_of(pool).copy_(ring)
    return tokens


def changed(dtype: str, pools_damaged: tuple[str, ...], pages: Callable[[random.Random], list[int]]) -> int:
    """In how many prompts the answer changes when these pools' pages are another prompt's."""
    model, samples = runs(dtype)
    choose, count = random.Random(5), 0
    for (ids, pools, want), (_, other, _) in itertools.pairwise(samples):
        at = pages(choose)
        saved = {pool: pools.bytes_of(pool).clone() for pool in pools_damaged}
        for pool in pools_damaged:
            pools.bytes_of(pool)[:, at] = other.bytes_of(pool)[:, at]
        count += answer(model, ids, pools) != want
        for pool, bytes_ in saved.items():
            pools.bytes_of(pool).copy_(bytes_)
        assert answer(model, ids, pools) == want
    return count


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("pools", "pages"),
    [
        (("index_k",), lambda choose: choose.sample(range(3), 2)),
        (("c4_kv",), lambda choose: choose.sample(range(3), 2)),
        (("c128_kv",), lambda choose: choose.sample(range(3), 2)),
        (("swa_kv",), lambda _: [2]),
        (("c4_state", "index_state", "c128_state"), lambda _: [0]),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_damage_in_one_pool_changes_most_answers(
    dtype: str, pools: tuple[str, ...], pages: Callable[[random.Random], list[int]]
) -> None:
    assert changed(dtype, pools, pages) >= 0.6 * PROMPTS


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_answers_differ_between_prompts(dtype: str) -> None:
    answers = [tuple(want) for _, _, want in runs(dtype)[1]]
    assert len(set(answers)) == len(answers)
    assert len({want[0] for want in answers}) > len(answers) // 3
