"""HiCache loads: opened where their pages become visible, launched behind what they overwrite and what they read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.managers import cache_controller

from dsv4ctl.controlplane.tickets.types import Guard, LoadKind
from dsv4ctl.engine_adapters.sglang import rank
from dsv4ctl.engine_adapters.sglang.loads import Copy, Pages


def indices_of(operation: Any) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
    """Token indices of one of SGLang's cache operations, device and host, by space.

    The pools of states go with the window's indices.
    """
    parts = [("full", operation)]
    parts += [
        ("swa", transfer)
        for transfer in operation.pool_transfers or ()
        if str(getattr(transfer.name, "value", transfer.name)) == "swa" and transfer.indices_from_pool is None
    ]
    return {
        space: (part.device_indices, part.host_indices)
        for space, part in parts
        if part.device_indices is not None and part.host_indices is not None and len(part.device_indices)
    }


def copy_of(here: rank.Rank, kind: LoadKind, operation: Any) -> Copy:
    tokens = {"full": here.pools.page_tokens, "swa": here.pools.window_page_tokens}
    return Copy(kind, Pages(indices_of(operation), tokens, here.reader), operation=operation)


def stream_of(controller: Any, kind: LoadKind) -> Any:
    """The stream of a controller's copies of this kind."""
    engine = getattr(controller, "l2_transfer_engine", None)
    if kind is LoadKind.HICACHE:
        return controller.load_stream if engine is None else engine.host_to_device_stream
    return controller.write_stream if engine is None else engine.device_to_host_stream


@contextmanager
def behind_forward(here: rank.Rank) -> Iterator[None]:
    """Digests are noted on the forward's stream, which seals them: no other is behind the one that runs."""
    if not here.scheduler.enable_overlap:
        yield
        return
    stream = here.scheduler.forward_stream
    stream.wait_stream(cache_controller.device_module.current_stream())
    with cache_controller.device_module.stream(stream):
        yield


def load_back(stock: Any, tree: Any, *args: Any, **kwargs: Any) -> Any:
    here, controller = rank.here(), tree.cache_controller
    if here is None or controller is None:
        return stock(tree, *args, **kwargs)
    here.copies.settle()
    before = len(controller.load_queue)
    loaded = stock(tree, *args, **kwargs)
    here.copies.promised([copy_of(here, LoadKind.HICACHE, op) for op in controller.load_queue[before:]])
    return loaded


def start_loading(stock: Any, controller: Any) -> Any:
    here = rank.here()
    if here is None or not controller.load_queue:
        return stock(controller)
    copies = here.copies.unlaunched()
    known = {id(copy.operation) for copy in copies}
    others = [op for op in controller.load_queue if id(op) not in known]
    if others:
        promised = [copy_of(here, LoadKind.HICACHE, op) for op in others]
        here.copies.promised(promised)
        copies += promised
    noted = None
    queued = {id(op) for op in controller.load_queue}
    if here.digests is not None:
        with behind_forward(here):
            noted = here.digests.loaded([copy.pages for copy in copies if id(copy.operation) in queued])
    # A reclaimed page may still be written by the forward that runs.
    stream = stream_of(controller, LoadKind.HICACHE)
    stream.wait_stream(here.scheduler.forward_stream)
    if here.gate.guarded(Guard.LOAD):
        for event in here.copies.waits(LoadKind.BACKUP):
            stream.wait_event(event)
    producer = stock(controller)
    check = None
    if here.digests is not None and noted is not None:
        with cache_controller.device_module.stream(stream):
            check = here.digests.compare(noted)
            # Until this event SGLang keeps the pages locked: nobody else may write them before they were compared.
            controller.ack_load_queue[-1].finish_event.record()
    here.copies.launched(copies, controller.layer_done_counter.events[producer].load_events, check)
    return producer


def update_producer(stock: Any, counter: Any) -> Any:
    """The events of the load before the last two are recorded anew: it has to be over."""
    here = rank.here()
    if here is not None:
        finish = counter.events[(counter.producer_index + 1) % counter.num_counters].finish_event
        if not finish.query():
            finish.synchronize()
            here.counters["load_waits"] += 1
        here.copies.settle()
    return stock(counter)
