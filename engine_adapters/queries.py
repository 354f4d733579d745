"""What any rank can be asked beside its agent's own tickets and rooms: stacks, evidence, its trace."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.trace.format import Rank, page
from dsv4ctl.engine_adapters.evidence import stacks, tickets_and_events


def identity(engine: str, number: int, role: Role, incarnation: str, gate: Gate) -> Rank:
    """Who answers: rank `number` of `engine`, in this process and at this moment."""
    return Rank(
        engine=engine,
        rank=number,
        role=role.value,
        incarnation=incarnation,
        pid=os.getpid(),
        layers=gate.layers,
        monotonic_ns=time.monotonic_ns(),
        wall_ns=time.time_ns(),
        consumers={consumer.value: where for consumer, where in gate.consumers.items()},
    )


def answer(
    what: str, gate: Gate, who: Callable[[], Rank], evidence: Callable[[str, Gate], Any] = tickets_and_events
) -> Any:
    """As plain data. Raises ValueError for what is no such question."""
    word, _, which = what.partition(" ")
    if what == "stacks":
        return stacks()
    if word == "trace" and (which or "0").isdecimal():
        return page(gate.trace, who(), int(which or 0))
    if word == "evidence":
        return evidence(which, gate)
    raise ValueError(f"unknown query {what!r}: tickets, rooms, stacks, evidence [ROOM] or trace [NUMBER] expected")
