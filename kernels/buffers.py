"""Digests of pages that lie in several buffers of one page size (one a layer, allocated apart), in one launch."""

from __future__ import annotations

from collections.abc import Sequence

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
        addresses = [layer.data_ptr() for layer in self.layers]
        self.pointers = torch.tensor(addresses, dtype=torch.int64, device=self.device)


def digest_buffers_torch(buffers: PageBuffers, pages: torch.Tensor) -> torch.Tensor:
    """Digests of `pages` int [n]: int64 [buffers, n], the bits of `digest.digest_torch`."""
    rows = [digest.digest_torch(layer[pages.long()]) for layer in buffers.layers]
    return torch.stack([torch.from_numpy(row.view("int64")) for row in rows]).to(buffers.device)
