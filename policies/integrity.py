"""Integrity: whether page digests are compared, and what waits for the verdict."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol


class OnMismatch(Enum):
    """What becomes of a request whose pages landed with the wrong digest. Evidence is kept either way."""

    RE_PREFILL = "re_prefill"  #: once, in a new room, without the cached prefix
    ERROR = "error"  #: an error event to the client


class Integrity(Protocol):
    def compares_digests(self) -> bool:
        """Whether what landed is checked against the digests that came with it."""
        ...

    def verdict_before_first_read(self) -> bool:
        """Whether only `checksum` may read a landed room until its verdict is in."""
        ...


class Read:
    """The verdict stands before the first read."""

    def compares_digests(self) -> bool:
        return True

    def verdict_before_first_read(self) -> bool:
        return True


class Off:
    """No digest is compared."""

    def compares_digests(self) -> bool:
        return False

    def verdict_before_first_read(self) -> bool:
        return False


def on_mismatch(*, bytes_to_client: int, attempts: int) -> OnMismatch:
    """`bytes_to_client`: body bytes already sent; `attempts`: rooms this request has had, 1 for the first."""
    if bytes_to_client == 0 and attempts == 1:
        return OnMismatch.RE_PREFILL
    return OnMismatch.ERROR


Factory = Callable[[], Integrity]
POLICIES: dict[str, Factory] = {"read": Read, "off": Off}
