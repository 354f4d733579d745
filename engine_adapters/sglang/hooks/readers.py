"""Readers inside the process: every accessor of the pool waits here for the layer that it reads."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers import cache_controller

from dsv4ctl.controlplane.tickets.types import Guard, LoadKind
from dsv4ctl.engine_adapters.sglang import rank

_GUARDS = (Guard.ATTENTION, Guard.INDEXER, Guard.COMPRESSOR)


def before_replay(here: rank.Rank) -> None:
    """A captured prefill runs no accessor when it is replayed: its stream waits for whole loads before it begins."""
    if not here.copies.loads or not here.gate.guarded(*_GUARDS):
        return
    config = getattr(here.scheduler.server_args, "cuda_graph_config", None)
    if config is None or str(getattr(config.prefill.backend, "value", config.prefill.backend)) != "disabled":
        stream = cache_controller.device_module.current_stream()
        for event in here.copies.waits(LoadKind.HICACHE):
            stream.wait_event(event)


def wait_layer_transfer(stock: Any, pool: Any, layer_id: int) -> Any:
    """The stream of a batch that carries a load waits for that load (stock), any other for every load under way.

    A pool without a counter (a draft's) waits for whole loads.
    """
    here = rank.here()
    if here is None or not here.copies.loads:
        return stock(pool, layer_id)
    if not here.gate.guarded(*_GUARDS):
        return None
    counter = pool.layer_transfer_counter
    if counter is not None and counter.consumer_index >= 0:
        return stock(pool, layer_id)
    stream = cache_controller.device_module.current_stream()
    for copy in here.copies.loads:
        if copy.events:
            stream.wait_event(copy.events[-1 if counter is None else layer_id - pool.start_layer])
    return None
