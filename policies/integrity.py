"""Integrity: whether a room's landed pages are compared with their digests, and what waits for the verdict."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from enum import Enum
from typing import Protocol


class OnMismatch(Enum):
    """What becomes of a request whose pages landed with the wrong digest. Evidence is kept either way."""

    RE_PREFILL = "re_prefill"  #: once, in a new room, without the cached prefix
    ERROR = "error"  #: an error event to the client


class Verdict(Enum):
    """What waits until a room's landed pages were found to be those that were sealed."""

    NONE = "none"  #: nothing: they are not compared
    BEFORE_READ = "before_read"  #: every read but the `checksum` consumer's own
    BEFORE_OUTPUT = "before_output"  #: every token to the client


class Integrity(Protocol):
    def compares_digests(self) -> bool:
        """Whether any room has a verdict. An engine that cannot tell rooms apart checks all, before the first read."""
        ...

    def verdict(self, room: int) -> Verdict:
        """From the room's number alone, so that both sides and all ranks agree."""
        ...


class Read:
    """The verdict stands before the first read."""

    def compares_digests(self) -> bool:
        return True

    def verdict(self, room: int) -> Verdict:
        return Verdict.BEFORE_READ


class Emit:
    """Decoding begins at once; its output is held until the verdict."""

    def compares_digests(self) -> bool:
        return True

    def verdict(self, room: int) -> Verdict:
        return Verdict.BEFORE_OUTPUT


class Sample:
    """As `read`, for this share of the rooms."""

    def __init__(self, share: float) -> None:
        self._bound = share * 2**64

    @staticmethod
    def parameter(text: str) -> float:
        """The share, above 0 and at most 1. Raises ValueError."""
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if not 0 < share <= 1:
            raise ValueError(f"expected a share of the rooms above 0 and at most 1, as in sample:0.1, found {text!r}")
        return share

    def compares_digests(self) -> bool:
        return True

    def verdict(self, room: int) -> Verdict:
        hashed = hashlib.blake2b(room.to_bytes(8, "little"), digest_size=8).digest()
        return Verdict.BEFORE_READ if int.from_bytes(hashed, "little") < self._bound else Verdict.NONE


class Off:
    """No digest is compared."""

    def compares_digests(self) -> bool:
        return False

    def verdict(self, room: int) -> Verdict:
        return Verdict.NONE


def on_mismatch(*, bytes_to_client: int, attempts: int) -> OnMismatch:
    """`bytes_to_client`: body bytes already sent; `attempts`: rooms this request has had, 1 for the first."""
    if bytes_to_client == 0 and attempts == 1:
        return OnMismatch.RE_PREFILL
    return OnMismatch.ERROR


Factory = Callable[[], Integrity]
POLICIES: dict[str, Callable[..., Integrity]] = {"read": Read, "emit": Emit, "sample": Sample, "off": Off}
