"""Whether a rank's Hello is believed: a pure decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from dsv4ctl.controlplane.link.wire import WIRE_VERSION, Hello, Role


class Expected(NamedTuple):
    """Whom the supervisor started under an incarnation."""

    engine: str
    role: Role
    rank: int
    ranks: int


class _Opening(msgspec.Struct, tag="Hello"):
    """The one field of a Hello that every wire version keeps."""

    wire: int


def decode_hello(body: bytes) -> Hello:
    """The Hello in `body` (one msgpack frame), its wire version read before anything else is believed.

    Raises ValueError with both versions if they differ, or with what is malformed.
    """
    try:
        wire = msgspec.msgpack.decode(body, type=_Opening).wire
    except msgspec.DecodeError as error:
        raise ValueError(f"the first frame of a rank is Hello: {error}") from error
    if wire != WIRE_VERSION:
        raise ValueError(f"wire version {wire} on the rank, {WIRE_VERSION} on the control plane")
    try:
        return msgspec.msgpack.decode(body, type=Hello)
    except msgspec.DecodeError as error:
        raise ValueError(f"malformed Hello: {error}") from error


def refusal(hello: Hello, expected: Mapping[str, Expected], connected: Iterable[Hello]) -> str | None:
    """Why this rank is not let in, or None. `connected` are the Hellos of the ranks already let in."""
    started = expected.get(hello.incarnation)
    if started is None:
        return f"incarnation {hello.incarnation} is unknown: it was not started here, or it was fenced"
    claimed = Expected(hello.engine, hello.role, hello.rank, hello.ranks)
    if claimed != started:
        return f"incarnation {hello.incarnation} was started as {started}, it says it is {claimed}"
    for peer in connected:
        if peer.incarnation == hello.incarnation:
            return f"incarnation {hello.incarnation} is connected already"
        if _must_agree(hello, peer):
            difference = hello.geometry.mismatch(peer.geometry)
            if difference is not None:
                return f"geometry of {hello.engine} against {peer.engine}: {difference}"
    return None


def _must_agree(one: Hello, other: Hello) -> bool:
    """Ranks of one engine agree, and so do engines between which bytes move."""
    if one.engine == other.engine:
        return True
    return Role.SINGLE not in (one.role, other.role) and one.role is not other.role
