"""Device tickets of the CUDA path: index keys are read on the device before the host knows that they landed.

One word a (index-K layer, page): 1 + the generation of the page whose keys of that layer are in place. The loader
releases it behind the copy, the logits kernel acquires it before it touches the page (docs/kernels.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dsv4ctl.controlplane.tickets.types import Extent
from dsv4ctl.engine_adapters.reference.pools import DevicePools
from dsv4ctl.kernels import ops
from dsv4ctl.kernels.tickets import Tickets

#: Microseconds that a kernel waits for a page on its way: many times what a layer's copy takes. Then the host waits.
_DEADLINE_US = 50_000


@dataclass(frozen=True)
class Landing:
    """What one chunk's index keys must be: `words` int64 [index-K layers, pages], `expected` int64 [1, logical pages]
    (0: nothing to wait for), `failed` int32 [1]."""

    words: torch.Tensor
    expected: torch.Tensor
    failed: torch.Tensor
    count: Callable[[str, int], None]

    def of(self, local_layer: int) -> Tickets:
        self.count("device_waits", 1)
        return Tickets(self.words[local_layer], self.expected, self.failed, _DEADLINE_US)

    def late(self) -> bool:
        """A page had not landed by the kernel's deadline: what it made of the page is void. Waits for the kernel."""
        late = bool(self.failed.item())
        self.failed.zero_()
        self.count("device_waits_late", late)
        return late


class ReadinessWords:
    """All words of a rank. `count`: `device_waits`, and of those `device_waits_late`."""

    def __init__(self, pools: DevicePools, count: Callable[[str, int], None]) -> None:
        self._count = count
        self._spec = pools.specs["index_k"]
        layers, pages = len(self._spec.model_layers), pools.pages[self._spec.space]
        self._words = torch.zeros(layers, pages, dtype=torch.int64, device=pools.device)

    def release(self, layer: int, loaded: Extent) -> None:
        """Behind the current stream's copies: index keys of `layer` in these pages are in place."""
        if loaded.space != self._spec.space or layer not in self._spec.model_layers:
            return
        device = self._words.device
        pages = torch.tensor(loaded.pages, dtype=torch.int32, device=device)
        values = torch.tensor(loaded.generations, dtype=torch.int64, device=device) + 1
        ops.release_words(self._words[self._spec.local_layer(layer)], pages, values)

    def landing(self, pages: Sequence[int], loading: Mapping[int, int]) -> Landing | None:
        """What a reader of `pages`, in logical order, waits for; `loading`: generation by page. None: for nothing."""
        if not any(page in loading for page in pages):
            return None
        expected = [[1 + loading[page] if page in loading else 0 for page in pages]]
        device = self._words.device
        return Landing(
            self._words,
            torch.tensor(expected, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            self._count,
        )
