import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4ctl.kernels.digest import MASK, MIX, digest_numpy, digest_torch, fold


def one(page: np.ndarray) -> int:
    return int(digest_numpy(page[None])[0])


def by_hand(page: bytes) -> int:
    """The formula of the module, word by word, in Python integers."""
    total = 0
    for at in range(0, len(page), 8):
        x = (at // 8 + 1) * MIX & MASK
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
        word = int.from_bytes(page[at : at + 8], "little")
        word = (word ^ word >> 32) * ((x ^ x >> 31) | 1) & MASK
        word = (word ^ word >> 32) * MIX & MASK
        total = total + (word ^ word >> 32) & MASK
    x = total ^ (len(page) * MIX & MASK)
    x = (x ^ x >> 32) * 0xBF58476D1CE4E5B9 & MASK
    return x ^ x >> 32


@pytest.mark.parametrize("page_bytes", [8, 256, 8448, 16384])
def test_torch_numpy_and_the_formula_give_the_same_bits(page_bytes: int) -> None:
    pages = torch.randint(0, 256, (5, page_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    expected = digest_numpy(pages.numpy())
    assert np.array_equal(digest_torch(pages), expected)
    assert [by_hand(page.numpy().tobytes()) for page in pages] == [int(value) for value in expected]


def test_the_batch_does_not_matter() -> None:
    pages = torch.randint(0, 256, (40, 16384), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    assert np.array_equal(digest_torch(pages), np.concatenate([digest_torch(page[None]) for page in pages]))


@settings(max_examples=60)
@given(st.integers(0, 8447), st.integers(1, 255), st.integers(0, 2**32 - 1))
def test_any_changed_byte_changes_the_digest(at: int, flip: int, seed: int) -> None:
    page = np.random.default_rng(seed).integers(0, 256, 8448, dtype=np.uint8)
    changed = page.copy()
    changed[at] ^= flip
    assert one(changed) != one(page)


def test_swapped_shifted_and_zeroed_bytes_change_the_digest() -> None:
    page = np.random.default_rng(3).integers(1, 256, 16384, dtype=np.uint8)
    words = page.view(np.uint64)
    seen = {one(page), one(np.roll(page, 1)), one(np.roll(page, 8)), one(page[::-1].copy())}
    for first, second in ((0, 1), (7, 2047), (100, 101)):
        swapped = words.copy()
        swapped[[first, second]] = swapped[[second, first]]
        seen.add(one(swapped.view(np.uint8)))
    zeroed = page.copy()
    zeroed[8192:] = 0
    seen.add(one(zeroed))
    assert len(seen) == 8


@pytest.mark.parametrize("bit", [0, 15, 31, 32, 47, 63])
def test_the_same_flip_in_two_words_does_not_cancel(bit: int) -> None:
    page = np.random.default_rng(4).integers(0, 256, 16384, dtype=np.uint8)
    pages = np.repeat(page.view(np.uint64)[None], 2048, axis=0)
    pages[1:, 0] ^= np.uint64(1 << bit)
    pages[np.arange(1, 2048), np.arange(1, 2048)] ^= np.uint64(1 << bit)
    assert len(set(digest_numpy(pages.view(np.uint8)).tolist())) == 2048


def test_zero_pages_of_different_sizes_differ() -> None:
    assert len({one(np.zeros(size, dtype=np.uint8)) for size in (8, 256, 8448, 16384)}) == 4


def test_fold_depends_on_order_and_number() -> None:
    pages = np.array([[1, 2], [3, 4], [0, 0]], dtype=np.uint64)
    folds = {tuple(int(x) for x in fold(pages[list(order)])) for order in ([0, 1, 2], [1, 0, 2], [0, 1], [2, 0, 1], [])}
    assert len(folds) == 5
    assert fold(pages)[0] == fold(pages[:, :1])[0]


def test_odd_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="pages of 12 B"):
        digest_numpy(np.zeros((1, 12), dtype=np.uint8))
    with pytest.raises(ValueError, match="in 1 dimensions"):
        digest_torch(torch.zeros(16, dtype=torch.uint8))
