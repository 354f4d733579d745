"""What a device says some time later."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsv4ctl.kernels.buffers import Event
from dsv4ctl.kernels.digest import Digests


class Fetched:
    """Values on their way to the host. For any thread."""

    def __init__(self, values: Digests, there: Event | None) -> None:
        self._values = values
        self._there = there

    def ready(self) -> bool:
        there = self._there
        if there is not None and there.query():
            self._there = there = None
        return there is None

    def get(self) -> Digests:
        there = self._there
        if there is not None:
            there.synchronize()
        return self._values

    def split(self, sizes: Sequence[int]) -> list[Fetched]:
        if len(sizes) == 1:
            return [self]
        ends = np.cumsum(sizes)[:-1]
        return [Fetched(values, self._there) for values in np.split(self._values, ends)]
