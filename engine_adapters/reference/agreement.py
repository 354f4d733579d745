"""What the ranks of an engine agree on, and how: every rank enters every call, in the same order (S4).

Allocations, evictions, admissions and aborts use only values that went through here; what one rank alone knows
(landed, quiet, a failed digest, a time-out) goes in as a number and comes out as the least over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import distributed


class PartedError(RuntimeError):
    """The ranks are not in the same collective; who waits for the others would do so for ever."""


class Agreement(Protocol):
    rank: int
    ranks: int

    def tell(self, message: bytes) -> bytes:
        """Rank 0's message, on every rank; the others' argument is ignored."""

    def least(self, values: Sequence[int]) -> list[int]:
        """Element by element the least over all ranks, which give equally many."""

    def gather(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of all ranks in the order of the ranks; every rank gives equally many of one shape."""


class Alone:
    """One rank agrees with itself."""

    rank = 0
    ranks = 1

    def tell(self, message: bytes) -> bytes:
        return message

    def least(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def gather(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return parts


class Gloo:
    """Ranks on one host over torch.distributed; they meet in a file named after the engine's launch.

    A rank that does not arrive within `timeout` seconds fails the call on all others (PartedError): the engine ends.
    """

    def __init__(self, meeting: Path, rank: int, ranks: int, timeout: float) -> None:
        self.rank = rank
        self.ranks = ranks
        store = distributed.FileStore(str(meeting), ranks)  # type: ignore[attr-defined] # not in its __all__
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
        )

    def tell(self, message: bytes) -> bytes:
        length = torch.tensor([len(message)])
        with _together():
            distributed.broadcast(length, 0)
        size = int(length.item())
        if not size:
            return b""
        data = torch.frombuffer(bytearray(message.ljust(size, b"\0")[:size]), dtype=torch.uint8)
        with _together():
            distributed.broadcast(data, 0)
        return bytes(data.numpy().tobytes())

    def least(self, values: Sequence[int]) -> list[int]:
        agreed = torch.tensor(list(values), dtype=torch.int64)
        with _together():
            distributed.all_reduce(agreed, op=distributed.ReduceOp.MIN)
        return [int(value) for value in agreed.tolist()]

    def gather(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        mine = torch.stack(parts).cpu()
        everyone = [torch.empty_like(mine) for _ in range(self.ranks)]
        with _together():
            distributed.all_gather(everyone, mine)
        return [part.to(parts[0].device) for rank in everyone for part in rank.unbind()]


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what torch raises for gloo: a time-out, a closed connection, another size
        raise PartedError(f"the ranks did not meet: {error}") from error
