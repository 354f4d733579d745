"""Compile before you wait: what a rank launches on a GPU is compiled and loaded before it serves (docs/kernels.md)."""

from __future__ import annotations

from dsv4ctl.controlplane.tickets.types import Extent
from dsv4ctl.engine_adapters.reference.copies import StreamCopies
from dsv4ctl.engine_adapters.reference.digests import digest_page, digest_pages
from dsv4ctl.engine_adapters.reference.model import Model
from dsv4ctl.engine_adapters.reference.pools import DevicePools, HostPools
from dsv4ctl.engine_adapters.reference.readiness import ReadinessWords
from dsv4ctl.engine_adapters.reference.sequence import PageTable, make_chunk, open_gate

_PAGES = {"full": 2, "swa": 2, "state": 2}


def warm_up(model: Model) -> dict[str, int]:
    """A page of a prompt to the host and back, read again behind its readiness words, and one token of an answer.

    In pools of its own, on the calling thread's stream; every rank calls it at the same place. Returns what the
    readiness words counted.
    """
    counted: dict[str, int] = {}
    geometry = model.geometry
    pools = DevicePools(geometry, _PAGES, model.device)
    host = HostPools(geometry, _PAGES, pinned=model.device.type == "cuda")
    words = ReadinessWords(pools, lambda name, number: counted.update({name: counted.get(name, 0) + number}))
    copies = StreamCopies(pools, host, words)
    table, ids = PageTable(full=[0], swa={0: 0}, state=0), [65] * geometry.page_tokens
    model.forward(make_chunk(pools, ids, 0, table), open_gate)
    digest_page(pools, 0, geometry.page_tokens, table)
    for spec in pools.specs.values():
        loaded = Extent(spec.space, (0,), (0,), frozenset({spec.name}))
        for layer in spec.model_layers:
            copies.save(spec.name, layer, (0, 1), (0, 1))
            copies.load(spec.name, layer, (0, 1), (0, 1))
            copies.release(layer, loaded)
            digest_pages(pools, spec.name, layer, (0, 1))
    landing = words.landing((0,), {0: 0})
    model.forward(make_chunk(pools, ids, 0, table, landing=landing), open_gate)
    model.next_token(model.forward(make_chunk(pools, ids[:1], len(ids) - 1, table), open_gate))
    return counted
