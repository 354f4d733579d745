import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4ctl.kernels import ops
from dsv4ctl.kernels.buffers import PageBuffers, Parts, Places, digest_parts_torch
from dsv4ctl.kernels.digest import digest_numpy
from dsv4ctl.kernels.digest_triton import (
    digest_buffers_triton,
    digest_into_triton,
    digest_pages_triton,
    digest_parts_triton,
)
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


def test_pages_of_several_buffers_in_one_launch() -> None:
    layers = [torch.randint(0, 256, (6, 24), dtype=torch.uint8) for _ in range(3)]
    buffers = PageBuffers([*layers[:2], layers[2].view(torch.int8)])
    chosen = torch.tensor([5, 0, 3, 3])
    expected = np.stack([digest_numpy(layer[chosen].numpy()) for layer in layers])
    assert (digest_buffers_triton(buffers, chosen).numpy().view(np.uint64) == expected).all()
    assert (ops.digest_buffers(buffers, chosen).numpy().view(np.uint64) == expected).all()
    assert ops.digest_buffers(buffers, chosen[:0]).shape == (3, 0)


def part(words: int, buffers: int, pages: list[int], seed: int) -> tuple[PageBuffers, list[int]]:
    random = torch.Generator().manual_seed(seed)
    shape = (4, words * 8)
    return PageBuffers(
        [torch.randint(0, 256, shape, dtype=torch.uint8, generator=random) for _ in range(buffers)]
    ), pages


def by_numpy(parts: Parts) -> list[int]:
    layers = [(layer.numpy(), pages) for buffers, pages in parts for layer in buffers.layers]
    return [int(value) for layer, pages in layers for value in digest_numpy(layer[np.array(pages, dtype=int)])]


# Around the block of 4,096 words of a step, and pages of one word.
WORDS = st.one_of(st.sampled_from([1, 2, 4095, 4096, 4097, 8192, 8193]), st.integers(1, 9000))
PART = st.builds(part, WORDS, st.integers(1, 2), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 99))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(PART, min_size=1, max_size=4))
def test_pages_of_any_sizes_in_one_launch(parts: list[tuple[PageBuffers, list[int]]]) -> None:
    expected = by_numpy(parts)
    assert digest_parts_triton(parts).numpy().view(np.uint64).tolist() == expected
    assert digest_parts_torch(parts).numpy().view(np.uint64).tolist() == expected


def test_a_page_of_sglangs_window_beside_one_of_a_state() -> None:
    parts = [part(149760 // 8, 1, [2], 1), part(1728 // 8, 2, [3, 0], 2), part(5, 1, [], 3)]
    assert digest_parts_triton(parts).numpy().view(np.uint64).tolist() == by_numpy(parts)
    assert ops.digest_parts(parts).numpy().view(np.uint64).tolist() == by_numpy(parts)
    assert ops.digest_parts(parts[2:]).shape == digest_parts_triton(parts[2:]).shape == (0,)


PAGES_OF = st.lists(st.integers(0, 3), max_size=4)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.lists(PART, min_size=1, max_size=3), PAGES_OF), min_size=1, max_size=3))
def test_digests_of_any_pages_go_where_their_places_are(
    spaces: list[tuple[list[tuple[PageBuffers, list[int]]], list[int]]],
) -> None:
    def places() -> Places:
        return [
            (pools, torch.tensor(pages, dtype=torch.int64), torch.full((sum(len(p.layers) for p in pools), 4), -1))
            for parts, pages in spaces
            for pools in [[buffers for buffers, _ in parts]]
        ]

    triton, plain = places(), places()
    digest_into_triton(triton)
    ops.digest_into(plain)
    for (pools, pages, out), (_, _, other) in zip(triton, plain, strict=True):
        expected = torch.full_like(out, -1)
        chosen = sorted(set(pages.tolist()))
        values = by_numpy([(buffers, chosen) for buffers in pools])
        expected[:, chosen] = torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64)).view(len(out), -1)
        assert out.tolist() == other.tolist() == expected.tolist()


def test_a_page_that_has_no_place_is_neither_read_nor_written() -> None:
    buffers, _ = part(3, 2, [], 5)
    memory = torch.full((4, 4), -1)  # the rows of two buffers, and what lies around them
    digest_into_triton([([buffers], torch.tensor([-1, 4, 2]), memory[1:3])])
    expected = torch.full((4, 4), -1)
    expected[1:3, 2] = torch.from_numpy(np.array(by_numpy([(buffers, [2])]), dtype=np.uint64).view(np.int64))
    assert memory.tolist() == expected.tolist()


def test_buffers_of_two_page_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="one page size"):
        PageBuffers([torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 16, dtype=torch.uint8)])
