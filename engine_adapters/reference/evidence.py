"""The digests of something that went wrong, beside what any rank can say of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.engine_adapters.evidence import tickets_and_events
from dsv4ctl.engine_adapters.reference.digests import PageDigests
from dsv4ctl.engine_adapters.reference.geometry import PoolSpec
from dsv4ctl.kernels.digest import Digests, fold

#: Mismatches, and rooms whose sealed digests are remembered after their end.
MISMATCHES, ROOMS = 16, 64


class Witness:
    """Filled by the threads that compare and send; read by whoever asks."""

    def __init__(self) -> None:
        self._mismatches: deque[dict[str, Any]] = deque(maxlen=MISMATCHES)
        self._sealed: deque[tuple[RoomKey, Mapping[int, PageDigests]]] = deque(maxlen=ROOMS)

    def mismatch(self, where: str, found: dict[str, Any]) -> None:
        """`where`: the room, or the load."""
        self._mismatches.append({"where": where, **found})

    def sealed(self, key: RoomKey, digests: Mapping[int, PageDigests]) -> None:
        """A room was sent: the digests of its pages, by logical page, as they were sealed."""
        self._sealed.append((key, digests))

    def tell(self, room: str, gate: Gate) -> dict[str, Any]:
        """Everything about `room` (as `7.1`; empty: about all), as plain data."""
        return {
            "mismatches": [one for one in self._mismatches.copy() if room in ("", one["where"]) or "load" in one],
            "sealed": {
                str(key): {str(logical): _hex(page.values) for logical, page in pages.items()}
                for key, pages in self._sealed.copy()
                if str(key) == room
            },
            **tickets_and_events(room, gate),
        }


def landed_mismatch(
    landed: Mapping[str, Digests], writer: str, expected: PageDigests, differing: list[tuple[str, int]],
    specs: Mapping[str, PoolSpec],
) -> dict[str, Any]:  # fmt: skip
    """Of each (pool, layer) that differs: its folded digest as sealed and as found, and what was found by page.

    The pages' digests as they were sealed are with the writer (`sealed`).
    """
    return {
        "writer": writer,
        "differing": [
            {
                "pool": pool,
                "layer": specs[pool].model_layers[local],
                "expected": f"{int(expected.values[pool][local]):016x}",
                "found": f"{int(fold(landed[pool])[local]):016x}",
                "found_by_page": [f"{int(page[local]):016x}" for page in landed[pool]],
            }
            for pool, local in differing
        ],
    }


def load_mismatch(pool: str, layer: int, pages: list[int], sealed: Digests, found: Digests) -> dict[str, Any]:
    """Of a load from the host: the logical pages whose bytes are not those that were sealed."""
    wrong = np.nonzero(sealed != found)[0]
    return {
        "load": True,
        "pool": pool,
        "layer": layer,
        "pages": [
            {"page": pages[at], "expected": f"{int(sealed[at]):016x}", "found": f"{int(found[at]):016x}"}
            for at in wrong
        ],
    }


def _hex(values: Mapping[str, Digests]) -> dict[str, list[str]]:
    return {pool: [f"{int(value):016x}" for value in layers] for pool, layers in values.items()}
