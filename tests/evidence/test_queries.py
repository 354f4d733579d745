"""What a rank is asked over the link, whatever engine it is of."""

from __future__ import annotations

import os

import pytest

from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.controlplane.tickets.types import Consumer
from dsv4ctl.controlplane.trace.format import Page, Rank
from dsv4ctl.engine_adapters.queries import answer, identity
from small_gate import SmallGate


def who(gate: SmallGate) -> Rank:
    return identity("decode0", 3, Role.DECODE, "D-3", gate)


def test_stacks_evidence_and_the_trace_from_a_number_on() -> None:
    gate = SmallGate()
    gate.load(1)
    assert "test_stacks_evidence" in answer("stacks", gate, lambda: who(gate))["MainThread"]
    assert answer("evidence", gate, lambda: who(gate))["trace"]
    assert answer("evidence 7.1", gate, lambda: who(gate)) == {"tickets": [], "trace": []}
    assert answer("evidence 7.1", gate, lambda: who(gate), lambda room, gate: {"of": room}) == {"of": "7.1"}
    whole, rest = answer("trace", gate, lambda: who(gate)), answer("trace 1", gate, lambda: who(gate))
    assert isinstance(whole, Page)
    assert (whole.next, rest.next) == (len(gate.trace.events()), whole.next)
    assert len(rest.events) < len(whole.events)


def test_a_rank_says_who_it_is() -> None:
    gate = SmallGate()
    found = who(gate)
    assert (found.name, found.role, found.incarnation) == ("decode0/3", "decode", "D-3")
    assert (found.pid, found.layers) == (os.getpid(), gate.layers)
    assert found.consumers == {consumer.value: where for consumer, where in gate.consumers.items()}
    assert Consumer.INDEXER.value in found.consumers
    assert who(gate).monotonic_ns >= found.monotonic_ns


@pytest.mark.parametrize("what", ["", "nonsense", "trace x", "trace -1", "stacks 7.1", "flush"])
def test_anything_else_is_refused_with_what_there_is(what: str) -> None:
    gate = SmallGate()
    with pytest.raises(ValueError, match=r"unknown query '.*': tickets, rooms, stacks, evidence \[ROOM\] or trace"):
        answer(what, gate, lambda: who(gate))
