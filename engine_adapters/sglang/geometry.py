"""A rank's pools as the ledger and the control plane name them, read off SGLang's DeepSeek-V4 pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dsv4ctl.controlplane.link.wire import Geometry, PoolGeometry
from dsv4ctl.controlplane.tickets.types import HOST, SpaceSpec

#: Bytes of one index key -> what a configuration calls it.
_INDEX_K = {256: "bf16", 132: "fp8", 68: "fp4"}
#: SGLang's name of a component of a transfer's state -> the space whose pages its indices are.
_SPACES = {"swa": "swa", "c128_state": "state"}

#: pool -> (layers, one buffer [pages, page_bytes] a layer)
Group = dict[str, tuple[tuple[int, ...], list[torch.Tensor]]]


def state_pages(types: Sequence[Any], indices: Sequence[Any] | None) -> dict[str, tuple[int, ...]]:
    """By space, the pages of a transfer's state: SGLang's component types, and the indices of each beside them."""
    found: dict[str, tuple[int, ...]] = {}
    for kind, pages in zip(types, indices or (), strict=False):
        space = _SPACES.get(str(getattr(kind, "value", kind)))
        if space is not None and pages is not None:
            found.setdefault(space, tuple(map(int, pages)))
    return found


def _buffers(pool: Any) -> Any:
    return () if pool is None else pool.kv_buffer


def _index_buffers(pool: Any) -> Any:
    if pool is None:
        return ()
    contiguous = getattr(pool, "contiguous_page_row_buffers", None)
    return pool.index_k_with_scale_buffer if contiguous is None else contiguous()


def _paged(buffers: Any, rows: int) -> list[torch.Tensor]:
    """Buffers [rows, width], of `rows` a page, as views [pages, page_bytes]."""
    if rows == 1:
        return list(buffers)
    whole = [buffer[: buffer.shape[0] // rows * rows] for buffer in buffers]
    return [buffer.view(buffer.shape[0] // rows, -1).view(torch.uint8) for buffer in whole]


def _states(pools: Iterable[Any]) -> list[torch.Tensor]:
    """The states of some layers, a ring a page."""
    return [view for pool in pools for view in _paged([pool.kv_score_buffer.kv_score], int(pool.ring_size))]


class Pools:
    """The buffers of one rank's device pool, by space: `full` is shared and sent by prefix; pages of `swa` hold the
    window and the states at its end; a page of `state` is a request's own."""

    def __init__(self, kvcache: Any) -> None:
        self.page_tokens = int(kvcache.page_size)
        self.window_page_tokens = int(kvcache.swa_page_size)
        self.to_window = kvcache.translate_loc_from_full_to_swa
        ratios = kvcache.compression_ratios[kvcache.start_layer : kvcache.end_layer]
        self.layers = len(ratios)
        first = kvcache.start_layer
        self._layers_of = {
            ratio: tuple(first + i for i, value in enumerate(ratios) if value == ratio) for ratio in (4, 128)
        }
        self._layers_of[0] = tuple(range(first, first + self.layers))
        states = [pool for pool in kvcache.compress_state_pools if pool is not None]
        index_states = [pool for pool in kvcache.indexer_compress_state_pools if pool is not None]
        window = kvcache.swa_kv_pool
        #: By space, in the order in which buffers are sent.
        self.groups: dict[str, Group] = {
            "full": self._present(
                ("c4_kv", 4, _buffers(kvcache.c4_kv_pool)),
                ("index_k", 4, _index_buffers(kvcache.c4_indexer_kv_pool)),
                ("c128_kv", 128, _buffers(kvcache.c128_kv_pool)),
            ),
            "swa": self._present(
                ("swa_kv", 0, _paged(window.kv_buffer, self.window_page_tokens // int(window.page_size))),
                ("c4_state", 4, _states(pool for pool in states if pool.ratio == 4)),
                ("index_state", 4, _states(index_states)),
            ),
            "state": self._present(("c128_state", 128, _states(pool for pool in states if pool.ratio == 128))),
        }
        self.full = self.groups["full"]
        self.device: torch.device = window.kv_buffer[0].device
        self._page_bytes = {
            (space, name): sum(int(buffer[0].nbytes) for buffer in buffers)
            for space, group in self.groups.items()
            for name, (_, buffers) in group.items()
        }

    def _present(self, *pools: tuple[str, int, Any]) -> Group:
        return {name: (self._layers_of[ratio], list(buffers)) for name, ratio, buffers in pools if len(buffers)}

    def pages(self, space: str) -> int:
        return min(int(buffer.shape[0]) for _, buffers in self.groups[space].values() for buffer in buffers)

    def bytes_of(self, pages: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """What these pages of each space hold, in bytes by pool."""
        return {name: len(pages.get(space, ())) * size for (space, name), size in self._page_bytes.items()}

    def spaces(self, host_pages: dict[str, int]) -> dict[str, SpaceSpec]:
        """The ledger's spaces; `host_pages` by device space, empty without HiCache."""
        spaces = {space: SpaceSpec(self.pages(space), tuple(self.groups[space])) for space in ("full", "swa")}
        return spaces | {
            HOST + space: SpaceSpec(count, tuple(self.groups[space])) for space, count in host_pages.items()
        }

    def geometry(self, model: str, context_tokens: int, pages: dict[str, int]) -> Geometry:
        described = [
            PoolGeometry(name, *self._purpose(space, name), int(buffers[0][0].nbytes), layers)
            for space, group in self.groups.items()
            for name, (layers, buffers) in group.items()
        ]
        return Geometry(
            page_tokens=self.page_tokens,
            layers=self.layers,
            index_k_dtype=self.index_k_dtype,
            context_tokens=context_tokens,
            pools=tuple(described),
            pages=pages,
            model=model,
        )

    def _purpose(self, space: str, name: str) -> tuple[str, str]:
        """Space and span, as the control plane names them."""
        if name == "swa_kv":
            return "swa", "window"
        return ("full", "full") if space == "full" else ("state", "point")

    @property
    def index_k_dtype(self) -> str:
        if "index_k" not in self.full:
            return "none"
        key_bytes = int(self.full["index_k"][1][0][0].nbytes) * 4 // self.page_tokens
        return _INDEX_K.get(key_bytes, f"{key_bytes} B a key")
