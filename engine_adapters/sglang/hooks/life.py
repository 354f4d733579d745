"""A scheduler's life: attached, connected, and its forwards."""

from __future__ import annotations

import gc
from typing import Any

from sglang.srt.runtime_context import get_parallel

from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.engine_adapters.sglang import rank
from dsv4ctl.engine_adapters.sglang.digests import PageDigests
from dsv4ctl.engine_adapters.sglang.hooks.readers import before_replay
from dsv4ctl.engine_adapters.sglang.install import refuse


def attach(stock: Any, scheduler: Any) -> Any:
    if not scheduler.spec_algorithm.is_none():
        refuse("speculative decoding is not guarded: a draft's pages are not restored with a prefix")
    parallel = get_parallel()
    here = rank.attach(scheduler, int(parallel.tp_rank), int(parallel.tp_size))
    if here.role is Role.DECODE and getattr(scheduler.tree_cache, "cache_controller", None) is not None:
        refuse("a decode engine with a cache on its host is not guarded: what it loads, nobody waits for")
    return stock(scheduler)


def connect(stock: Any, scheduler: Any) -> Any:
    here = rank.here()
    if here is not None:
        # What was built until now stays: a collection that looks through it stops the scheduler for half a second.
        # (SGLang undoes it if it captures graphs again, after new weights.)
        gc.collect()
        gc.freeze()
        here.connect()
    return stock(scheduler)


def run_batch(stock: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    here = rank.here()
    if here is not None and batch.forward_mode.is_extend():
        for request in batch.reqs:
            here.rooms.forward_begin(request.bootstrap_room)
    return stock(scheduler, batch, *args, **kwargs)


def forward(stock: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """On the stream of the forward: what it computed is sealed behind it."""
    here = rank.here()
    if here is None or batch is None:
        return stock(worker, batch, *args, **kwargs)
    if batch.forward_mode.is_extend():
        before_replay(here)
    answer = stock(worker, batch, *args, **kwargs)
    if here.digests is not None and worker is here.scheduler.tp_worker:
        _seal(here.digests, batch, here.page_tokens)
    return answer


def _seal(digests: PageDigests, batch: Any, page_tokens: int) -> None:
    if batch.forward_mode.is_extend():
        digests.seal(batch.out_cache_loc, batch.prefix_lens, batch.extend_lens, batch.req_pool_indices)
    elif batch.forward_mode.is_decode():
        # Pages that a decoded token filled are cached, and backed up, as those of a prompt are.
        lengths = batch.seq_lens_cpu.tolist()
        filled = [at for at, length in enumerate(lengths) if length % page_tokens == 0]
        if filled:
            digests.seal(batch.out_cache_loc[filled], [lengths[at] - 1 for at in filled], [1] * len(filled), None)


def batch_result(stock: Any, scheduler: Any, batch: Any, result: Any) -> Any:
    answer = stock(scheduler, batch, result)
    here = rank.here()
    if here is not None:
        for request in batch.reqs:
            here.rooms.forward_end(request.bootstrap_room)
    return answer
