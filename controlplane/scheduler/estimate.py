"""What a room will move, before it moves: page-rounded bytes from the prompt's length and the pools' geometry."""

from __future__ import annotations

from typing import Literal, cast

from dsv4ctl.controlplane.link.wire import Geometry
from dsv4ctl.controlplane.tickets.types import HOST
from dsv4ctl.policies.admission import PoolCost, room_bytes

#: DeepSeek-V4's sliding window: what a `window` pool must cover.
WINDOW_TOKENS = 128
Span = Literal["full", "window", "point", "none"]


def transfer_bytes(geometry: Geometry, tokens: int) -> int:
    """Bytes of the device pools that go from prefill to decode for a prompt of `tokens` tokens."""
    costs = [
        PoolCost(cast(Span, pool.span), pool.page_bytes * len(pool.layers))
        for pool in geometry.pools
        if not pool.space.startswith(HOST)
    ]
    return room_bytes(max(tokens, 1), costs, page_tokens=geometry.page_tokens, window_tokens=WINDOW_TOKENS)
