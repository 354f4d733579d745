"""Digests of what landed, page by page, to be compared with those that were sealed."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from dsv4ctl.controlplane.tickets.types import Extent
from dsv4ctl.engine_adapters.reference.digests import PageDigests, digest_pages
from dsv4ctl.engine_adapters.reference.geometry import PoolSpec
from dsv4ctl.engine_adapters.reference.peer_wire import Destination
from dsv4ctl.engine_adapters.reference.pools import DevicePools
from dsv4ctl.kernels.digest import Digests, fold

LandedDigests = dict[str, Digests]
"""Pool -> uint64 [pages, pool_layers], in logical page order."""


def digest_landed(pools: DevicePools, destination: Destination, *, tail: bool) -> LandedDigests:
    """The prompt's tail page and state (`tail`), or the full pages before it; of the window's pool, its pages.

    Of the tail only the rows that the prompt has written count, as where it was sealed. Decode writes on in the tail
    and in the state, and never in a page before them.
    """
    found: LandedDigests = {}
    for spec in pools.specs.values():
        pages = [page for logical, page in logical_pages(spec, destination) if _is_tail(logical, destination) is tail]
        if pages:
            rows = spec.valid_rows(len(destination.full) - 1, destination.prompt_tokens) if tail else None
            layers = [digest_pages(pools, spec.name, layer, pages, rows) for layer in spec.model_layers]
            found[spec.name] = np.stack(layers, axis=1)
    return found


def joined(before: LandedDigests, tail: LandedDigests) -> LandedDigests:
    """Every pool has pages in the tail."""
    return {pool: np.concatenate([before[pool], last]) if pool in before else last for pool, last in tail.items()}


def folded(landed: LandedDigests) -> PageDigests:
    """Per (pool, layer), as a manifest has them."""
    return PageDigests({pool: fold(pages) for pool, pages in landed.items()})


def split(extents: tuple[Extent, ...], destination: Destination) -> tuple[list[Extent], list[Extent]]:
    """The load's extents over the pages before the tail, and over the tail and the state."""
    last = len(destination.full) - 1
    tails = {"full": {destination.full[last]}, "swa": {destination.swa[last]}, "state": {destination.state}}
    before: list[Extent] = []
    tail: list[Extent] = []
    for extent in extents:
        for part, wanted in ((before, False), (tail, True)):
            held = [
                (page, generation)
                for page, generation in zip(extent.pages, extent.generations, strict=True)
                if (page in tails[extent.space]) is wanted
            ]
            if held:
                pages, generations = zip(*held, strict=True)
                part.append(replace(extent, pages=pages, generations=generations))
    return before, tail


def logical_pages(spec: PoolSpec, destination: Destination) -> list[tuple[int, int]]:
    """(logical, physical) pages of a pool in logical order."""
    match spec.space:
        case "full":
            return list(enumerate(destination.full))
        case "swa":
            return sorted(destination.swa.items())
        case "state":
            return [(len(destination.full) - 1, destination.state)]


def _is_tail(logical: int, destination: Destination) -> bool:
    return logical == len(destination.full) - 1
