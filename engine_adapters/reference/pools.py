"""Device and host pools: one uint8 tensor a pool, typed views of it, and the copies between the two.

Pages are numbered per *space* (`full`, `swa`, `state`): a page number names the same page in every pool
of its space. Nothing here knows who may read or write a page; that is the ledger's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from dsv4ctl.engine_adapters.reference.geometry import (
    PAGE_ALIGNMENT,
    SPACES,
    Geometry,
    PoolSpec,
    Space,
    pool_specs,
)


class Region(msgspec.Struct, frozen=True):
    """One pool's memory, for registration with a transfer library (addresses and strides in bytes).

    Page `p` of pool-local layer `l` starts at base + l * layer_stride + p * page_stride.
    """

    pool: str
    space: Space
    base: int
    nbytes: int
    layers: int
    pages: int
    page_bytes: int
    layer_stride: int
    page_stride: int

    def address(self, local_layer: int, page: int) -> int:
        if not (0 <= local_layer < self.layers and 0 <= page < self.pages):
            raise IndexError(f"pool {self.pool}: no page {page} in layer {local_layer}")
        return self.base + local_layer * self.layer_stride + page * self.page_stride


def resolved(device: str | torch.device) -> torch.device:
    """The device as its tensors name it: "cuda" is the current GPU, whose number `torch.cuda.set_device` needs."""
    return torch.empty(0, device=device).device


class DevicePools:
    """Layer-first pools: per pool one contiguous uint8 tensor [pool_layers, pages, page_bytes], zeroed.

    `pages` gives the number of pages of each space. Raises ValueError on a missing or empty space.
    """

    def __init__(self, geometry: Geometry, pages: Mapping[str, int], device: str | torch.device = "cpu") -> None:
        self.geometry = geometry
        self.device = resolved(device)
        self.specs = pool_specs(geometry)
        self.pages = _checked_pages(pages)
        self._bytes = {
            spec.name: _aligned_zeros((len(spec.model_layers), self.pages[spec.space], spec.page_bytes), self.device)
            for spec in self.specs.values()
        }
        self._rows = {
            (spec.name, layer): _typed_rows(spec, self._bytes[spec.name][local])
            for spec in self.specs.values()
            for local, layer in enumerate(spec.model_layers)
        }

    def bytes_of(self, pool: str) -> torch.Tensor:
        """The pool's uint8 tensor [pool_layers, pages, page_bytes] (the memory itself, not a copy)."""
        return self._bytes[pool]

    def layer_bytes(self, pool: str, layer: int) -> torch.Tensor:
        """uint8 [pages, page_bytes] of one model layer. Raises KeyError for a layer the pool lacks."""
        return self._bytes[pool][self.specs[pool].local_layer(layer)]

    def rows(self, pool: str, layer: int) -> torch.Tensor:
        """Typed view [pages * rows, width]: bf16 (kv, bf16 index keys), fp32 (states).

        fp8 index keys have no single typed view; kernels/index_k.py reads and writes their pages.
        Raises KeyError for a pool or layer that has none.
        """
        view = self._rows[(pool, layer)]
        if view is None:
            raise KeyError(f"pool {pool} has no flat typed view (fp8 keys and scales lie apart)")
        return view

    def regions(self) -> list[Region]:
        """Every pool's memory, in the order of the specs."""
        return [_region(spec, self._bytes[spec.name]) for spec in self.specs.values()]

    def copy_state(self, source: int, target: int) -> None:
        """Copy one `state` page (all its pools and layers): take or restore a snapshot."""
        for spec in self.specs.values():
            if spec.space == "state":
                self._bytes[spec.name][:, target].copy_(self._bytes[spec.name][:, source])


class HostPools:
    """Page-first pools: per pool one contiguous uint8 tensor [pages, pool_layers, page_bytes], zeroed.

    `pinned`: in memory that a GPU reads and writes.
    """

    def __init__(self, geometry: Geometry, pages: Mapping[str, int], *, pinned: bool = False) -> None:
        self.geometry = geometry
        self.specs = pool_specs(geometry)
        self.pages = _checked_pages(pages)
        self._bytes = {
            spec.name: _aligned_zeros(
                (self.pages[spec.space], len(spec.model_layers), spec.page_bytes), torch.device("cpu"), pinned
            )
            for spec in self.specs.values()
        }

    def bytes_of(self, pool: str) -> torch.Tensor:
        """The pool's uint8 tensor [pages, pool_layers, page_bytes] (the memory itself, not a copy)."""
        return self._bytes[pool]

    def layer_bytes(self, pool: str, layer: int) -> torch.Tensor:
        """uint8 [pages, page_bytes], strided, of one model layer. KeyError for a layer the pool lacks."""
        return self._bytes[pool][:, self.specs[pool].local_layer(layer)]


def load_pages(
    host: HostPools,
    device: DevicePools,
    pool: str,
    layer: int,
    host_pages: Sequence[int],
    device_pages: Sequence[int],
) -> int:
    """Copy pages of one (pool, model layer) from host to device; returns the bytes copied."""
    return _copy_pages(host.layer_bytes(pool, layer), device.layer_bytes(pool, layer), host_pages, device_pages)


def backup_pages(
    device: DevicePools,
    host: HostPools,
    pool: str,
    layer: int,
    device_pages: Sequence[int],
    host_pages: Sequence[int],
) -> int:
    """Copy pages of one (pool, model layer) from device to host; returns the bytes copied."""
    return _copy_pages(device.layer_bytes(pool, layer), host.layer_bytes(pool, layer), device_pages, host_pages)


def _copy_pages(
    source: torch.Tensor, target: torch.Tensor, source_pages: Sequence[int], target_pages: Sequence[int]
) -> int:
    if len(source_pages) != len(target_pages):
        raise ValueError(f"{len(source_pages)} source and {len(target_pages)} target pages: equal numbers expected")
    for from_page, to_page in zip(source_pages, target_pages, strict=True):
        target[to_page].copy_(source[from_page])
    return len(source_pages) * source.shape[-1]


def page_bytes_by_space(geometry: Geometry, model_layer: int | None = None) -> dict[str, int]:
    """Bytes of one page of each space, over all its pools: of one model layer, or of all of them."""
    totals: dict[str, int] = dict.fromkeys(SPACES, 0)
    for spec in pool_specs(geometry).values():
        layers = len(spec.model_layers) if model_layer is None else spec.model_layers.count(model_layer)
        totals[spec.space] += spec.page_bytes * layers
    return totals


def valid_mask(spec: PoolSpec, valid_rows: int) -> torch.Tensor:
    """bool [page_bytes]: which bytes of a page belong to its first `valid_rows` rows."""
    mask = torch.zeros(spec.page_bytes, dtype=torch.bool, device="cpu")
    for start, end in spec.valid_ranges(valid_rows):
        mask[start:end] = True
    return mask


def zero_invalid(spec: PoolSpec, page: torch.Tensor, valid_rows: int) -> torch.Tensor:
    """Zero in place, and return, uint8 [..., page_bytes] but for its first `valid_rows` rows."""
    if not 0 <= valid_rows <= spec.rows:
        raise ValueError(f"pool {spec.name}: valid_rows {valid_rows} is not in 0..{spec.rows}")
    bounds = [0, *(edge for pair in spec.valid_ranges(valid_rows) for edge in pair), spec.page_bytes]
    for start, end in zip(bounds[::2], bounds[1::2], strict=True):
        page[..., start:end] = 0
    return page


def _checked_pages(pages: Mapping[str, int]) -> dict[Space, int]:
    checked: dict[Space, int] = {}
    for space in SPACES:
        if pages.get(space, 0) < 1:
            raise ValueError(f"pages {dict(pages)}: one or more in each of {', '.join(SPACES)} expected")
        checked[space] = pages[space]
    unknown = set(pages) - set(SPACES)
    if unknown:
        raise ValueError(f"pages {dict(pages)}: unknown space {sorted(unknown)}; known: {', '.join(SPACES)}")
    return checked


def _aligned_zeros(shape: tuple[int, int, int], device: torch.device, pinned: bool = False) -> torch.Tensor:
    tensor = torch.zeros(shape, dtype=torch.uint8, device=device, pin_memory=pinned)
    if tensor.data_ptr() % PAGE_ALIGNMENT:
        raise RuntimeError(f"the allocator returned memory not aligned to {PAGE_ALIGNMENT} B")
    return tensor


def _typed_rows(spec: PoolSpec, layer: torch.Tensor) -> torch.Tensor | None:
    if len(spec.segments) > 1:
        return None
    dtype = torch.float32 if spec.ring else torch.bfloat16
    return layer.view(dtype).view(layer.shape[0] * spec.rows, -1)


def _region(spec: PoolSpec, tensor: torch.Tensor) -> Region:
    layers, pages, page_bytes = tensor.shape
    return Region(
        pool=spec.name,
        space=spec.space,
        base=tensor.data_ptr(),
        nbytes=tensor.numel(),
        layers=layers,
        pages=pages,
        page_bytes=page_bytes,
        layer_stride=pages * page_bytes,
        page_stride=page_bytes,
    )
