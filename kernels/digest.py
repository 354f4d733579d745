"""64-bit page digests: the same bits from torch and from NumPy.

A page is W little-endian 64-bit words w[i] (its size is a multiple of 8). All arithmetic is modulo 2^64,
all shifts are logical:

    x = w[i];  x ^= x >> 32;  x *= odd(i);  x ^= x >> 32;  x *= MIX;  x ^= x >> 32
    digest = finish((sum of all x) ^ (bytes * MIX)),  finish(x): x ^= x >> 32;  x *= FINISH;  x ^= x >> 32

odd(i) = splitmix64(i + 1) | 1. Every step on a word is a bijection, so a change inside one word always
changes the digest; changes in several words, swaps and shifts collide with a chance of about 2^-64 (it is
no cryptographic hash: it finds races, not attackers). splitmix64: Steele, Lea, Flood, OOPSLA 2014.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch

MIX = 0x9E3779B97F4A7C15
FINISH = 0xBF58476D1CE4E5B9
MASK = (1 << 64) - 1
_BLOCK_WORDS = 1 << 15
_U32 = np.uint64(32)

Digests = npt.NDArray[np.uint64]


@functools.lru_cache(maxsize=64)
def _multipliers(words: int) -> Digests:
    """odd(i) for i in 0..words-1."""
    x = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(MIX)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


@functools.lru_cache(maxsize=64)
def multipliers(words: int, device: torch.device) -> torch.Tensor:
    """odd(i) for i in 0..words-1, the bits in int64, on `device`."""
    return torch.from_numpy(_multipliers(words).view(np.int64)).to(device)


def digest_numpy(pages: npt.NDArray[np.uint8]) -> Digests:
    """uint8 [n, page_bytes] -> uint64 [n]. Raises ValueError unless page_bytes is a multiple of 8."""
    check_pages(pages.ndim, pages.shape[-1])
    words = np.ascontiguousarray(pages).view(np.uint64)
    odd = _multipliers(words.shape[1])
    sums = np.empty(words.shape[0], dtype=np.uint64)
    step = max(1, _BLOCK_WORDS // words.shape[1])
    for at in range(0, words.shape[0], step):
        block = words[at : at + step]
        x = block ^ (block >> _U32)
        x *= odd
        x ^= x >> _U32
        x *= np.uint64(MIX)
        x ^= x >> _U32
        sums[at : at + step] = x.sum(axis=1, dtype=np.uint64)
    return _finish(sums, pages.shape[1])


def digest_torch(pages: torch.Tensor) -> Digests:
    """uint8 [n, page_bytes] -> uint64 [n] (NumPy). Raises ValueError unless page_bytes is a multiple of 8."""
    check_pages(pages.dim(), pages.shape[-1])
    words = pages.contiguous().view(torch.int64)
    odd = multipliers(words.shape[1], words.device)
    mix = MIX - (1 << 64)
    sums = torch.empty(words.shape[0], dtype=torch.int64, device=words.device)
    step = max(1, _BLOCK_WORDS // words.shape[1])
    for at in range(0, words.shape[0], step):
        block = words[at : at + step]
        shifted = block >> 32
        x = block ^ shifted.bitwise_and_(0xFFFFFFFF)
        x *= odd
        torch.bitwise_right_shift(x, 32, out=shifted)
        x ^= shifted.bitwise_and_(0xFFFFFFFF)
        x *= mix
        torch.bitwise_right_shift(x, 32, out=shifted)
        x ^= shifted.bitwise_and_(0xFFFFFFFF)
        torch.sum(x, dim=1, out=sums[at : at + step])
    return _finish(sums.cpu().numpy().view(np.uint64), pages.shape[1])


def fold(digests: npt.ArrayLike) -> Digests:
    """Fold digests in logical page order: uint64 [pages, ...] -> uint64 [...]; no pages fold to 0."""
    values = np.asarray(digests, dtype=np.uint64)
    folded = np.zeros(values.shape[1:], dtype=np.uint64)
    with np.errstate(over="ignore"):
        for value in values:
            folded = _avalanche((folded + np.uint64(1)) * np.uint64(MIX) ^ value)
    return folded


def _finish(sums: Digests, page_bytes: int) -> Digests:
    return _avalanche(sums ^ np.uint64(page_bytes * MIX & MASK))


def _avalanche(x: Digests) -> Digests:
    with np.errstate(over="ignore"):  # modulo 2^64 is meant; NumPy warns of it for scalars only
        x = (x ^ (x >> _U32)) * np.uint64(FINISH)
    return np.asarray(x ^ (x >> _U32), dtype=np.uint64)


def check_pages(dims: int, page_bytes: int) -> None:
    """Raises ValueError unless pages are [n, page_bytes] of a positive multiple of 8."""
    if dims != 2 or page_bytes % 8 or page_bytes == 0:
        raise ValueError(f"pages of {page_bytes} B in {dims} dimensions: [n, a multiple of 8] expected")
