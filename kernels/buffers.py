"""Digests of pages that lie in several buffers (one a layer, allocated apart), in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from dsv4ctl.kernels import digest


class PageBuffers:
    """Buffers [pages, page_bytes], contiguous, of one page size, on one device. `pointers`: where each begins."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.layers = [buffer.view(torch.uint8) for buffer in buffers]
        sizes = {layer.shape[1] for layer in self.layers}
        if len(sizes) != 1:
            raise ValueError(f"pages of {sorted(sizes)} B: buffers of one page size expected")
        self.page_bytes = sizes.pop()
        digest.check_pages(2, self.page_bytes)
        self.device = self.layers[0].device
        #: int64 [buffers].
        self.addresses = np.array([layer.data_ptr() for layer in self.layers], dtype=np.int64)
        self.pointers = torch.from_numpy(self.addresses).to(self.device)
        self._first = np.array([[(address, self.page_bytes // 8)] for address in self.addresses], dtype=np.int64)
        self._step = np.array([self.page_bytes, 0], dtype=np.int64)

    def rows(self, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        """Where these pages are in each buffer: (address, 64-bit words), int64 [buffers * n, 2]."""
        numbers = np.asarray(pages, dtype=np.int64)[:, None]
        return (self._first + numbers * self._step).reshape(-1, 2)


#: Buffers, and the pages that are meant in each of them. The page size may be another in every part.
Parts = Sequence[tuple[PageBuffers, Sequence[int]]]
#: Buffers of several page sizes, pages int64 [n] of theirs on the device, and where each digest has its place: int64
#: [buffers, pool pages], contiguous.
Places = Sequence[tuple[Sequence[PageBuffers], torch.Tensor, torch.Tensor]]


def digest_buffers_torch(buffers: PageBuffers, pages: torch.Tensor) -> torch.Tensor:
    """Digests of `pages` int [n]: int64 [buffers, n], the bits of `digest.digest_torch`."""
    rows = [digest.digest_torch(layer[pages.long()]) for layer in buffers.layers]
    return torch.stack([torch.from_numpy(row.view("int64")) for row in rows]).to(buffers.device)


def digest_parts_torch(parts: Parts) -> torch.Tensor:
    """Digests of at least one part, [buffers, pages] of each one after another: int64, flat."""
    found = [digest_buffers_torch(buffers, torch.tensor(pages, dtype=torch.int64)) for buffers, pages in parts]
    return torch.cat([each.reshape(-1) for each in found])


def digest_into_torch(places: Places) -> None:
    """Puts digests of pages where they have their place: `out[:, pages]` of each."""
    for pools, pages, out in places:
        out[:, pages] = torch.cat([digest_buffers_torch(buffers, pages) for buffers in pools])
