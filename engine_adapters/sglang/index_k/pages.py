"""What SGLang's accessor of index-K pages gives out in place of its buffer: the pages, with the only two views left.

SGLang's indexer spells the fp8 row out (`.view(pages, 64, 1, 132)`), which bf16 pages can't follow. The functions it
then calls are hooked too and take the pages whole; any other use of the buffer is an error, not a wrong number.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from dsv4ctl.kernels import index_k

FP8_ROW = index_k.DIM + 4  #: bytes of an fp8 key and its scale, SGLang's literal


class IndexKeys:
    """bf16 index-K pages of one layer, uint8 [pages, 16384], as the caller of the accessor may use them."""

    def __init__(self, pages: torch.Tensor) -> None:
        """Raises ValueError for pages of another size."""
        if pages.shape[1] != index_k.PAGE_BYTES["bf16"]:
            raise ValueError(
                f"index-K pages of {pages.shape[1]} B where index_k_dtype is bf16: "
                f"{index_k.PAGE_BYTES['bf16']} B expected (is the fp4 indexer on?)"
            )
        self.pages = pages
        self.shape = pages.shape

    def dim(self) -> int:
        return 2

    def view(self, *shape: int, dtype: torch.dtype | None = None) -> IndexKeys | torch.Tensor:
        """The bytes, for the store; itself, for the indexer. Raises TypeError for any other view."""
        if dtype is torch.uint8 and not shape:
            return self.pages
        if dtype is None and shape == (self.shape[0], index_k.KEYS, 1, FP8_ROW):
            return self
        raise TypeError(f"view {shape} {dtype or ''} of bf16 index-K pages: no code of SGLang reads them as keys")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{name!r} of bf16 index-K pages: this path of SGLang reads fp8 keys; with index_k_dtype bf16 only the "
            "paged indexer and the fused compressor store reach them"
        )


def pages_of(cache: object) -> torch.Tensor:
    """The pages that a hooked reader was called with. Raises TypeError for anything but `IndexKeys`."""
    if not isinstance(cache, IndexKeys):
        raise TypeError(f"index keys as {type(cache).__name__}: the pool's accessor is not hooked")
    return cache.pages
