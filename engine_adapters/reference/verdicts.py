"""The integrity policy of a room, as it was opened with it."""

from __future__ import annotations

import functools

from dsv4ctl.controlplane.link.wire import OpenRoom
from dsv4ctl.policies.integrity import Integrity, Verdict
from dsv4ctl.policies.registry import load


def verdict(opening: OpenRoom) -> Verdict:
    return _integrity(opening.integrity).verdict(opening.key.room)


@functools.cache
def _integrity(name: str) -> Integrity:
    """Each policy is looked up once: finding entry points is a walk over every installed package."""
    return load("integrity", name)()
