"""Page copies between a pinned host pool, page-first, and a device pool, layer-first; plain torch, and the policy.

host uint8 [host pages, layers, page_bytes]; device uint8 [layers, device pages, page_bytes]; page lists int32 [n],
pairwise: host_pages[i] <-> device_pages[i]. Only the listed pages of layers first..end-1 are read or written.
"""

from __future__ import annotations

from typing import Literal

import torch

Variant = Literal["kernel", "engine"]


def load_reference(
    host: torch.Tensor,
    device: torch.Tensor,
    host_pages: torch.Tensor,
    device_pages: torch.Tensor,
    first: int,
    end: int,
) -> None:
    """Host -> device."""
    check_pools(host, device, host_pages, device_pages, first, end)
    chosen = host[host_pages.long().cpu(), first:end].to(device.device)
    device[first:end, device_pages.long()] = chosen.transpose(0, 1)


def backup_reference(
    host: torch.Tensor,
    device: torch.Tensor,
    host_pages: torch.Tensor,
    device_pages: torch.Tensor,
    first: int,
    end: int,
) -> None:
    """Device -> host."""
    check_pools(host, device, host_pages, device_pages, first, end)
    chosen = device[first:end, device_pages.long()].to(host.device)
    host[host_pages.long().cpu(), first:end] = chosen.transpose(0, 1)


def check_pools(
    host: torch.Tensor,
    device: torch.Tensor,
    host_pages: torch.Tensor,
    device_pages: torch.Tensor,
    first: int,
    end: int,
) -> None:
    """Raises ValueError for pools or lists that do not fit each other. Page numbers are the caller's to keep in range:
    checking them would wait for the device."""
    _, layers, page_bytes = host.shape
    if device.shape[0] != layers or device.shape[2] != page_bytes:
        raise ValueError(f"host pages of {layers} layers x {page_bytes} B, device pool {tuple(device.shape)}")
    if page_bytes % 16:
        raise ValueError(f"pages of {page_bytes} B: a multiple of 16 expected")
    if not 0 <= first < end <= layers:
        raise ValueError(f"layers {first}..{end - 1}: within 0..{layers - 1} expected")
    if host_pages.shape != device_pages.shape:
        raise ValueError(f"{host_pages.shape[0]} host pages for {device_pages.shape[0]} device pages")


def choose_variant(page_bytes: int, sms_are_free: bool = True) -> Variant:
    """The faster variant as measured on an H200 (docs/kernels.md); the copy engine where a forward needs the SMs."""
    return "kernel" if sms_are_free and page_bytes < ENGINE_FROM_BYTES else "engine"


ENGINE_FROM_BYTES = 1 << 17
