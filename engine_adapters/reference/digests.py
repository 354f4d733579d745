"""Page digests: what a sealed page's bytes were, for every pool and layer, independent of where it lies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dsv4ctl.engine_adapters.reference.pools import DevicePools, HostPools, zero_invalid
from dsv4ctl.engine_adapters.reference.sequence import PageTable
from dsv4ctl.kernels import ops
from dsv4ctl.kernels.digest import Digests, fold


@dataclass(frozen=True)
class PageDigests:
    """Digests of one logical page: pool -> uint64 [pool_layers]. State pools: the rings at the page's end.

    A pool may be absent (a window page that had left the window).
    """

    values: Mapping[str, Digests] = field(default_factory=dict)

    def to_builtins(self) -> dict[str, list[int]]:
        return {pool: [int(value) for value in values] for pool, values in self.values.items()}

    @classmethod
    def from_builtins(cls, values: Mapping[str, Sequence[int]]) -> PageDigests:
        return cls({pool: np.array(layers, dtype=np.uint64) for pool, layers in values.items()})

    def differences(self, other: PageDigests) -> list[tuple[str, int]]:
        """(pool, pool-local layer) of every digest that both have and that differs."""
        return [
            (pool, int(local))
            for pool, values in self.values.items()
            if pool in other.values
            for local in np.nonzero(values != other.values[pool])[0]
        ]


def digest_pages(
    pools: DevicePools | HostPools, pool: str, layer: int, pages: Sequence[int], valid_rows: int | None = None
) -> Digests:
    """Digests uint64 [len(pages)] of pages of one (pool, model layer), in that order.

    `valid_rows`: only the first rows of each page count, the other bytes as zero (default: all rows).
    """
    spec, source = pools.specs[pool], pools.layer_bytes(pool, layer)
    chosen = (
        source[pages[0]][None]
        if len(pages) == 1
        else source[torch.tensor(pages, dtype=torch.int64, device=source.device)]
    )
    if valid_rows is not None and valid_rows != spec.rows:
        chosen = zero_invalid(spec, chosen.clone(), valid_rows)
    return ops.digest_pages(chosen)


def digest_page(
    pools: DevicePools, logical: int, tokens: int, table: PageTable, state: int | None = None
) -> PageDigests:
    """Digests of logical page `logical` of a sequence of `tokens` tokens, over its valid rows.

    The rings are digested when the sequence ends in this page, at its length: from `state` (a snapshot;
    default: the private slot). A window page absent from the table is left out.
    """
    end = (logical + 1) * pools.geometry.page_tokens
    values: dict[str, Digests] = {}
    for spec in pools.specs.values():
        if spec.space == "full":
            page: int | None = table.full[logical]
        elif spec.space == "swa":
            page = table.swa.get(logical)
        else:
            page = (table.state if state is None else state) if tokens <= end else None
        if page is None:
            continue
        rows = spec.valid_rows(logical, tokens)
        values[spec.name] = np.concatenate(
            [digest_pages(pools, spec.name, layer, [page], rows) for layer in spec.model_layers]
        )
    return PageDigests(values)


def fold_pages(pages: Iterable[PageDigests]) -> PageDigests:
    """Fold pages in logical order, per (pool, layer), over the pages that have the pool."""
    by_pool: dict[str, list[Digests]] = {}
    for page in pages:
        for pool, values in page.values.items():
            by_pool.setdefault(pool, []).append(values)
    return PageDigests({pool: fold(values) for pool, values in by_pool.items()})
