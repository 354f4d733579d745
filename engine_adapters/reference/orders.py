"""What rank 0 tells the other ranks of its engine in one round."""

from __future__ import annotations

import msgspec

from dsv4ctl.controlplane.link.wire import OpenRoom
from dsv4ctl.engine_adapters.reference.sequences import Sequence


class Submission(msgspec.Struct, frozen=True):
    """A request."""

    opening: OpenRoom
    rid: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    ignore_eos: bool
    bootstrap_host: str | None
    bootstrap_port: int | None


class Orders(msgspec.Struct, frozen=True):
    submissions: list[Submission] = []
    flush: bool = False
    paused: bool = False  #: nothing is computed, and nothing begins, in this round's step
    stop: bool = False


decoder = msgspec.msgpack.Decoder(Orders)


def encode(orders: Orders) -> bytes:
    """Nothing to tell is no bytes."""
    return b"" if orders == Orders() else msgspec.msgpack.encode(orders)


def submission(sequence: Sequence) -> Submission:
    request = sequence.request
    return Submission(
        sequence.opening,
        request.rid,
        request.input_ids,
        request.max_new_tokens,
        request.ignore_eos,
        request.bootstrap_host,
        request.bootstrap_port,
    )
