"""How HiCache's bytes move: by the CPU over a paced link, or by a GPU on streams of their own.

On the CPU `h2d_gbps` paces the host-to-device copies like a link: each group of pages lands at the end of the
time that its bytes take. That is the one emulation; the bytes and the order in which they land are real.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from dsv4ctl.controlplane.tickets.types import Extent
from dsv4ctl.engine_adapters.reference.geometry import Geometry, pool_specs
from dsv4ctl.engine_adapters.reference.pools import DevicePools, HostPools, backup_pages, load_pages
from dsv4ctl.engine_adapters.reference.readiness import ReadinessWords
from dsv4ctl.kernels import ops

#: Prefix pages whose load of one layer takes as long as computing one layer of a chunk (`paced_gbps`).
LOAD_PAGES = 8
#: Pages copied between two waits of the paced link.
_GROUP_PAGES = 4


class Copies(Protocol):
    """Copies of the pages of one (pool, model layer), in pairs. What a thread posted is in place after its `wait`."""

    def stream(self) -> AbstractContextManager[object]:
        """Entered once by every thread that copies."""

    def load(self, pool: str, layer: int, host: Sequence[int], device: Sequence[int]) -> None: ...

    def save(self, pool: str, layer: int, device: Sequence[int], host: Sequence[int]) -> None: ...

    def release(self, layer: int, loaded: Extent) -> None:
        """Behind what was posted: kernels that wait for these pages of the layer may read them."""

    def wait(self) -> None: ...


class _Link:
    """A paced link: `carry` returns when the bytes would have arrived. `gbps` 0: at once."""

    def __init__(self, gbps: float) -> None:
        self._seconds_per_byte = 1 / (gbps * 1e9) if gbps else 0.0
        self._free_at = 0.0

    def carry(self, nbytes: int) -> None:
        if not self._seconds_per_byte:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + nbytes * self._seconds_per_byte
        time.sleep(self._free_at - now)


def paced_gbps(geometry: Geometry, layer_seconds: Sequence[float]) -> float:
    """Link speed at which one layer of `LOAD_PAGES` prefix pages takes as long to copy as a layer takes to compute.

    That is the ratio of a real deployment: DeepSeek-V4-Flash, an 80K-token prefix = 312 pages of 53,824 B a ratio-4
    layer (c4 37,440 + index-K 16,384, bf16) over 53 GB/s measured host-to-device is 0.32 ms, twice that with the
    host's bandwidth shared; a layer of a 256-token chunk is about 0.4 ms (155 GFLOP at 400 TFLOP/s). Our prompts
    are shorter, so that `LOAD_PAGES` pages stand for those 312.
    """
    page = sum(s.page_bytes * len(s.model_layers) for s in pool_specs(geometry).values() if s.space == "full")
    return LOAD_PAGES * page / sum(layer_seconds) / 1e9


class PacedCopies:
    """The CPU copies; a load takes the time that its bytes take on a link of `gbps`. Nothing waits on the device."""

    def __init__(self, device: DevicePools, host: HostPools, gbps: float) -> None:
        self._device, self._host = device, host
        self._link = _Link(gbps)

    def stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def load(self, pool: str, layer: int, host: Sequence[int], device: Sequence[int]) -> None:
        for at in range(0, len(device), _GROUP_PAGES):
            group = slice(at, at + _GROUP_PAGES)
            self._link.carry(len(host[group]) * self._device.specs[pool].page_bytes)
            load_pages(self._host, self._device, pool, layer, host[group], device[group])

    def save(self, pool: str, layer: int, device: Sequence[int], host: Sequence[int]) -> None:
        backup_pages(self._device, self._host, pool, layer, device, host)

    def release(self, layer: int, loaded: Extent) -> None:
        """Nobody waits on the device: the ticket is the only way in."""

    def wait(self) -> None:
        """What was posted was done."""


class StreamCopies:
    """A GPU copies, on one stream a thread; `words` are released in stream order behind the index keys."""

    def __init__(self, device: DevicePools, host: HostPools, words: ReadinessWords) -> None:
        self._device, self._host, self._words = device, host, words

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.Stream(self._device.device))

    def load(self, pool: str, layer: int, host: Sequence[int], device: Sequence[int]) -> None:
        local = self._device.specs[pool].local_layer(layer)
        ops.load_pages(self._host.bytes_of(pool), self._device.bytes_of(pool), host, device, local, local + 1)

    def save(self, pool: str, layer: int, device: Sequence[int], host: Sequence[int]) -> None:
        local = self._device.specs[pool].local_layer(layer)
        ops.backup_pages(self._host.bytes_of(pool), self._device.bytes_of(pool), host, device, local, local + 1)

    def release(self, layer: int, loaded: Extent) -> None:
        self._words.release(layer, loaded)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device.device).synchronize()
