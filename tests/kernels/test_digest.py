from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4ctl.kernels import digest_rows_triton, launch_triton, ops
from dsv4ctl.kernels.buffers import Firsts, PageBuffers, Places, Sealer, SpaceBuffers, Table, Tokens
from dsv4ctl.kernels.digest import digest_numpy
from dsv4ctl.kernels.digest_rows_triton import SealerTriton
from dsv4ctl.kernels.digest_triton import digest_pages_triton
from dsv4ctl.kernels.tickets import Tickets

PAGES = torch.tensor([3, 1, 1], dtype=torch.int32)


def source(page_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (2, 5, page_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("page_bytes", [8, 256, 8448, 16384, 16392])
def test_the_kernel_gives_the_bits_of_numpy_for_listed_pages_of_each_layer(page_bytes: int) -> None:
    pages = source(page_bytes)
    digests = digest_pages_triton(pages, PAGES).numpy().view(np.uint64)
    for layer in range(2):
        assert np.array_equal(digests[layer], digest_numpy(pages[layer, PAGES.long()].numpy()))


def test_a_page_that_has_not_landed_is_not_digested_and_is_reported() -> None:
    pages = source(256)
    words = torch.tensor([0, 4, 0, 7, 0, 0, 4, 0, 6, 0], dtype=torch.int64)  # layer 1: page 3 is a generation behind
    failed = torch.zeros(3, dtype=torch.int32)
    expected = torch.tensor([7, 4, 0], dtype=torch.int64)
    tickets = Tickets(words, expected, failed, deadline_us=3)
    digests = digest_pages_triton(pages, PAGES, tickets).numpy().view(np.uint64)
    assert np.array_equal(digests[0], digest_numpy(pages[0, PAGES.long()].numpy()))
    assert np.array_equal(digests[1, 1:], digest_numpy(pages[1, PAGES[1:].long()].numpy()))
    assert digests[1, 0] == 0
    assert failed.tolist() == [1, 0, 0]


def pool(words: int, buffers: int, seed: int) -> PageBuffers:
    random = torch.Generator().manual_seed(seed)
    shape = (4, words * 8)
    return PageBuffers([torch.randint(0, 256, shape, dtype=torch.uint8, generator=random) for _ in range(buffers)])


#: Of a space, page numbers.
Listed = Sequence[tuple[int, Sequence[int]]]


def now(sealer: Sealer, listed: Listed) -> list[int]:
    values, there = sealer.digests([(space, pages, 1) for space, pages in listed])
    assert there is None
    return list(values.tolist())


def by_numpy(spaces: SpaceBuffers, parts: Listed) -> list[int]:
    layers = [(layer, pages) for space, pages in parts for buffers in spaces.pools[space] for layer in buffers.layers]
    return [int(one) for layer, pages in layers for one in digest_numpy(layer.numpy()[np.array(pages, dtype=int)])]


# Around the block of 4,096 words of a step, and pages of one word.
WORDS = st.one_of(st.sampled_from([1, 2, 4095, 4096, 4097, 8192, 8193]), st.integers(1, 9000))
POOL = st.builds(pool, WORDS, st.integers(1, 2), st.integers(0, 99))
SPACES = st.builds(SpaceBuffers, st.lists(st.lists(POOL, min_size=1, max_size=2), min_size=1, max_size=3))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(SPACES, st.data())
def test_pages_of_any_sizes_in_one_launch(spaces: SpaceBuffers, data: st.DataObject) -> None:
    one = st.tuples(st.integers(0, len(spaces.pools) - 1), st.lists(st.integers(0, 3), max_size=3))
    parts = data.draw(st.lists(one, min_size=1, max_size=5))
    expected = by_numpy(spaces, parts)
    assert now(SealerTriton(spaces), parts) == expected
    assert now(ops.sealer(spaces), parts) == expected


def test_what_is_no_page_has_no_digest() -> None:
    spaces = SpaceBuffers([[pool(3, 2, 5)]])
    digest, other = by_numpy(spaces, [(0, [2])])
    for sealer in (SealerTriton(spaces), ops.sealer(spaces)):
        assert now(sealer, [(0, [-1, 2, 4, 1 << 40])]) == [0, digest, 0, 0, 0, other, 0, 0]


def test_a_page_of_sglangs_window_beside_one_of_a_state() -> None:
    spaces = SpaceBuffers([[pool(149760 // 8, 1, 1)], [pool(1728 // 8, 2, 2), pool(5, 1, 3)]])
    parts = [(0, [2]), (1, [3, 0]), (0, [])]
    for sealer in (SealerTriton(spaces), ops.sealer(spaces)):
        assert now(sealer, parts) == by_numpy(spaces, parts)
        assert now(sealer, parts[2:]) == []


@settings(max_examples=15, deadline=None, derandomize=True)
@given(SPACES, st.data())
def test_digests_of_any_pages_go_where_their_places_are(spaces: SpaceBuffers, data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, 4 * 3 - 1), max_size=4)
    chosen = data.draw(st.lists(tokens, min_size=1, max_size=len(spaces.pools)))
    firsts = [
        data.draw(st.lists(st.sampled_from(range(len(listed))), max_size=4)) if listed else [] for listed in chosen
    ]

    def places() -> Places:
        return [
            (
                space,
                Firsts(torch.tensor(listed, dtype=torch.int64), firsts[space]),
                3,
                Table(torch.full((spaces.counts[space], 4), -1)),
            )
            for space, listed in enumerate(chosen)
        ]

    triton, plain = places(), places()
    SealerTriton(spaces).seal((), triton)
    ops.sealer(spaces).seal((), plain)
    for (space, (listed, at), _, out), (*_, other) in zip(triton, plain, strict=True):
        expected = torch.full_like(out.numbers, -1)
        found = sorted({int(listed[one]) // 3 for one in at})
        values = by_numpy(spaces, [(space, found)])
        expected[:, found] = torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64)).view(out.rows, -1)
        assert out.numbers.tolist() == other.numbers.tolist() == expected.tolist()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(SPACES, st.data())
def test_digests_of_any_pages_as_they_are_now(spaces: SpaceBuffers, data: st.DataObject) -> None:
    def drawn() -> tuple[tuple[int, Tokens, int], list[int]]:
        """A part, and its pages: -1 is none."""
        pages = data.draw(st.lists(st.integers(-1, 4), max_size=20))
        tokens = [page * 3 + data.draw(st.integers(0, 2)) if page >= 0 else -1 for page in pages]
        space = data.draw(st.sampled_from(range(len(spaces.pools))))
        there = Firsts(torch.tensor([0, *tokens]), range(1, len(tokens) + 1))
        return (space, data.draw(st.sampled_from([tokens, there])), 3), [page if page < 4 else -1 for page in pages]

    parts = [drawn() for _ in range(data.draw(st.integers(0, 3)))]
    expected = []
    for (space, *_), pages in parts:
        values = np.array(by_numpy(spaces, [(space, [max(page, 0) for page in pages])]), dtype=np.uint64)
        expected += np.where(np.array(pages * spaces.counts[space]) < 0, 0, values).tolist()
    for sealer in (SealerTriton(spaces), ops.sealer(spaces)):
        values, there = sealer.digests([part for part, _ in parts])
        assert values.tolist() == expected
        assert there is None


def test_a_token_that_has_no_page_is_neither_read_nor_written_for() -> None:
    spaces = SpaceBuffers([[pool(3, 2, 5)]])
    expected = torch.full((4, 4), -1)
    values = by_numpy(spaces, [(0, [2])])
    expected[1:3, 2] = torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64))
    for sealer in (SealerTriton(spaces), ops.sealer(spaces)):
        memory = torch.full((4, 4), -1)  # the rows of two buffers, and what lies around them
        sealer.seal((), [(0, Firsts(torch.tensor([-1, 4 * 9, 2 * 9 + 8]), [0, 1, 2]), 9, Table(memory[1:3]))])
        assert memory.tolist() == expected.tolist()


def test_many_pages_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = SpaceBuffers([[pool(1, 2, 1)], [pool(2, 1, 2)]])
    parts = [(0, [at % 4 for at in range(70)]), (1, [3]), (1, list(range(4)) * 8)]
    sealer = SealerTriton(spaces)
    started: list[tuple[int, int, int]] = []

    def start(grid: tuple[int, int, int], *arguments: Any) -> None:
        started.append(grid)
        kernel(grid, *arguments)

    kernel = digest_rows_triton._digest_rows
    monkeypatch.setattr(digest_rows_triton, "_digest_rows", start)
    assert now(sealer, parts) == by_numpy(spaces, parts)
    assert now(sealer, [(1, [2, 1])]) == by_numpy(spaces, [(1, [2, 1])])
    assert now(sealer, [(0, ())]) == []
    assert started == [(16, 2, 5 + 1 + 2), (2, 2, 1)]


def test_digests_of_one_piece_of_memory_and_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_triton, "_MEMORY", 10)
    spaces = SpaceBuffers([[pool(1, 2, 1)]])
    sealer = SealerTriton(spaces)
    parts: list[Listed] = [[(0, pages)] for pages in ([0], [1, 2], [3, 2], [1], list(range(4)) * 3, [2])]
    found = [sealer.digests([(space, pages, 1) for space, pages in part])[0] for part in parts]
    assert [one.tolist() for one in found] == [by_numpy(spaces, part) for part in parts]
    pieces = [id(one.base) for one in found]
    assert [pieces.index(piece) for piece in pieces] == [0, 0, 0, 3, 4, 5]


def test_each_page_of_a_long_list_goes_to_its_place() -> None:
    spaces = SpaceBuffers([[PageBuffers([torch.arange(50 * 8, dtype=torch.int32).view(torch.uint8).view(50, 32)] * 2)]])
    pages = torch.randperm(50, generator=torch.Generator().manual_seed(1))[:37]
    out = torch.full((2, 50), -1)
    SealerTriton(spaces).seal(
        (), [(0, Firsts(pages, range(2)), 1, Table(out)), (0, Firsts(pages, range(2, 37)), 1, Table(out))]
    )
    expected = torch.full((2, 50), -1)
    values = np.array(by_numpy(spaces, [(0, pages.tolist())]), dtype=np.uint64).view(np.int64)
    expected[:, pages] = torch.from_numpy(values).view(2, -1)
    assert out.tolist() == expected.tolist()


def test_buffers_of_two_page_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="one page size"):
        PageBuffers([torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 16, dtype=torch.uint8)])
