"""A small gate, and loads on it, for tests of the fronts of the ledger."""

from __future__ import annotations

import itertools

from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.ticket import Load
from dsv4ctl.controlplane.tickets.types import Consumer, LoadKind, SpaceSpec
from dsv4ctl.controlplane.trace.ring import Ring

LAYERS = 3


class SmallGate(Gate):
    """Three layers, eight pages; only `attention`, `indexer` and `sender` are registered."""

    def __init__(self) -> None:
        super().__init__({"full": SpaceSpec(8, ("c4_kv", "index_k"))}, LAYERS, Ring(itertools.count().__next__))
        for consumer in (Consumer.ATTENTION, Consumer.INDEXER, Consumer.SENDER):
            self.register(consumer, "here")

    def load(self, landed: int = 0) -> Load:
        """A load of one page, `landed` layers of which are in place."""
        taken = self.allocate({"full": 1})
        assert taken is not None
        load = self.open_load(LoadKind.HICACHE, [self.extent("full", taken["full"])])
        self.layer_landed(load, landed)
        return load

    def traced(self) -> list[str]:
        return [event.kind for event in self.trace.events()]
