"""A rank's pools as the ledger and the control plane name them, read off SGLang's DeepSeek-V4 pool."""

from __future__ import annotations

from typing import Any

from dsv4ctl.controlplane.link.wire import Geometry, PoolGeometry
from dsv4ctl.controlplane.tickets.types import HOST, SpaceSpec

#: Bytes of one index key -> what a configuration calls it.
_INDEX_K = {256: "bf16", 132: "fp8", 68: "fp4"}


def _buffers(pool: Any) -> Any:
    return () if pool is None else pool.kv_buffer


def _index_buffers(pool: Any) -> Any:
    if pool is None:
        return ()
    contiguous = getattr(pool, "contiguous_page_row_buffers", None)
    return pool.index_k_with_scale_buffer if contiguous is None else contiguous()


class Pools:
    """The buffers of one rank's device pool. `full` are the pools that a prefix is shared and sent by."""

    def __init__(self, kvcache: Any) -> None:
        self.page_tokens = int(kvcache.page_size)
        self.window_page_tokens = int(kvcache.swa_page_size)
        ratios = kvcache.compression_ratios[kvcache.start_layer : kvcache.end_layer]
        self.layers = len(ratios)
        first = kvcache.start_layer
        self._layers_of = {
            ratio: tuple(first + i for i, value in enumerate(ratios) if value == ratio) for ratio in (4, 128)
        }
        self._layers_of[0] = tuple(range(first, first + self.layers))
        #: pool -> (layers, one buffer [pages, page_bytes] a layer), in the order in which they are sent
        self.full = self._present(
            ("c4_kv", 4, _buffers(kvcache.c4_kv_pool)),
            ("index_k", 4, _index_buffers(kvcache.c4_indexer_kv_pool)),
            ("c128_kv", 128, _buffers(kvcache.c128_kv_pool)),
        )
        self.window = self._present(("swa_kv", 0, kvcache.swa_kv_pool.kv_buffer))
        self._states = {
            name: pools
            for name, pools in (
                ("c4_state", [p for p in kvcache.compress_state_pools if p is not None and p.ratio == 4]),
                ("index_state", [p for p in kvcache.indexer_compress_state_pools if p is not None]),
                ("c128_state", [p for p in kvcache.compress_state_pools if p is not None and p.ratio == 128]),
            )
            if pools
        }

    def _present(self, *pools: tuple[str, int, Any]) -> dict[str, tuple[tuple[int, ...], list[Any]]]:
        return {name: (self._layers_of[ratio], list(buffers)) for name, ratio, buffers in pools if len(buffers)}

    def pages(self, pools: dict[str, tuple[tuple[int, ...], list[Any]]]) -> int:
        return min(int(buffer.shape[0]) for _, buffers in pools.values() for buffer in buffers)

    def spaces(self, host_pages: dict[str, int]) -> dict[str, SpaceSpec]:
        """The ledger's spaces; `host_pages` by device space, empty without HiCache."""
        window = (*self.window, *(name for name in ("c4_state", "index_state") if name in self._states))
        device = {"full": tuple(self.full), "swa": window}
        sizes = {"full": self.pages(self.full), "swa": self.pages(self.window)}
        spaces = {space: SpaceSpec(sizes[space], pools) for space, pools in device.items()}
        return spaces | {HOST + space: SpaceSpec(count, device[space]) for space, count in host_pages.items()}

    def geometry(self, model: str, context_tokens: int, pages: dict[str, int]) -> Geometry:
        described = [
            PoolGeometry(name, space, span, int(buffers[0][0].nbytes), layers)
            for space, span, pools in (("full", "full", self.full), ("swa", "window", self.window))
            for name, (layers, buffers) in pools.items()
        ]
        for name, pools in self._states.items():
            rows = pools[0].kv_score_buffer.kv_score
            layers = self._layers_of[128 if name == "c128_state" else 4]
            described.append(
                PoolGeometry(name, "state", "point", int(rows[0].nbytes) * int(pools[0].ring_size), layers)
            )
        return Geometry(
            page_tokens=self.page_tokens,
            layers=self.layers,
            index_k_dtype=self.index_k_dtype,
            context_tokens=context_tokens,
            pools=tuple(described),
            pages=pages,
            model=model,
        )

    @property
    def index_k_dtype(self) -> str:
        if "index_k" not in self.full:
            return "none"
        key_bytes = int(self.full["index_k"][1][0][0].nbytes) * 4 // self.page_tokens
        return _INDEX_K.get(key_bytes, f"{key_bytes} B a key")
