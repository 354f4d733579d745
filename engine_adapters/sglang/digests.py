"""Page digests of one rank: taken when a page was computed, kept with its device and its host copy, checked at the end.

`sealed[b, p]` is what buffer b of device page p has to be, `on_host` the same for host pages. Both lie on the device
and change in stream order only: no call here waits for the device. A buffer is one (pool, layer) of the pools that a
prefix is shared and sent by.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from dsv4ctl.engine_adapters.sglang.geometry import Pools
from dsv4ctl.engine_adapters.sglang.loads import Event
from dsv4ctl.kernels import ops
from dsv4ctl.kernels.buffers import PageBuffers
from dsv4ctl.kernels.digest import Digests


@dataclass(eq=False)
class Fetched:
    """Values on their way to the host: uint64 [buffers, pages]."""

    _values: torch.Tensor
    _event: Event | None
    #: What the device still reads until then. The allocator gives memory back to the stream that it came from, and
    #: knows nothing of another stream that has not read it yet.
    _read: tuple[torch.Tensor, ...]

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def get(self) -> Digests:
        if self._event is not None:
            self._event.synchronize()
        return self._values.numpy().view(np.uint64)


def fetch(values: torch.Tensor, *read: torch.Tensor) -> Fetched:
    """Starts the copy on the current stream. `read` are tensors of other streams that the values come from."""
    if values.device.type != "cuda":
        return Fetched(values, None, read)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return Fetched(host, event, read)


class PageDigests:
    def __init__(self, pools: Pools, host_pages: int) -> None:
        self._page_tokens = pools.page_tokens
        self._pools = [PageBuffers(buffers) for _, buffers in pools.full.values()]
        self.names = [(pool, layer) for pool, (layers, _) in pools.full.items() for layer in layers]
        self._device = self._pools[0].device
        shape = (len(self.names), pools.pages(pools.full))
        self.sealed = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self.on_host = torch.zeros((shape[0], host_pages), dtype=torch.int64, device=self._device)
        self._beside = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.compute(torch.zeros(1, dtype=torch.int64, device=self._device))  # compiled now, not under a request

    def pages(self, indices: torch.Tensor) -> torch.Tensor:
        """Page numbers, on the device, of token indices that begin with a page."""
        pages = indices[:: self._page_tokens] // self._page_tokens
        return pages.to(self._device, torch.int64, non_blocking=True)

    def compute(self, pages: torch.Tensor) -> torch.Tensor:
        """What the pages are now: int64 [buffers, n]."""
        return torch.cat([ops.digest_buffers(pool, pages) for pool in self._pools])

    def landed(self, page_numbers: Sequence[int]) -> Fetched:
        """Starts to compute what landed in these pages, beside every forward: the peer wrote them, no stream here."""
        with nullcontext() if self._beside is None else torch.cuda.stream(self._beside):
            pages = torch.tensor(page_numbers, dtype=torch.int64).to(self._device, non_blocking=True)
            return fetch(self.compute(pages))

    def seal(self, locations: torch.Tensor, prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        """A forward wrote `lengths[i]` tokens of request i behind `prefixes[i]`; `locations` of all, one after another.

        A page is sealed anew with every part of it.
        """
        firsts = torch.tensor(_firsts(prefixes, lengths, self._page_tokens), dtype=torch.int64)
        pages = locations[firsts.to(locations.device, non_blocking=True)] // self._page_tokens
        self.sealed[:, pages] = self.compute(pages)

    def backed_up(self, device: torch.Tensor, host: torch.Tensor) -> None:
        self.on_host[:, host] = self.sealed[:, device]

    def loaded(self, host: torch.Tensor, device: torch.Tensor) -> torch.Tensor:
        """What the pages will have to be once the load is in place: int64 [buffers, n], a copy."""
        expected = self.on_host[:, host]
        self.sealed[:, device] = expected
        return expected

    def differences(self, pages: torch.Tensor, expected: Sequence[torch.Tensor]) -> torch.Tensor:
        """How many of the pages' buffers are not as expected (parts of int64 [buffers, n], in order): int64 [1]."""
        return (self.compute(pages) != torch.cat(list(expected), dim=1)).sum().reshape(1)

    def mismatches(self, found: Digests, sealed: Digests) -> list[tuple[str, int, int]]:
        """(pool, layer, logical page) of every difference."""
        return [(*self.names[buffer], int(page)) for buffer, page in np.argwhere(found != sealed)]


def _firsts(prefixes: Sequence[int], lengths: Sequence[int], page_tokens: int) -> list[int]:
    """Of each page that got tokens, where its first new one stands among all."""
    found, at = [], 0
    for prefix, length in zip(prefixes, lengths, strict=True):
        to_boundary = -prefix % page_tokens
        if to_boundary and length:
            found.append(at)
        found += range(at + to_boundary, at + length, page_tokens)
        at += length
    return found
