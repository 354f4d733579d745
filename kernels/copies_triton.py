# mypy: allow-untyped-defs, allow-incomplete-defs
"""Page copies by a kernel that reads or writes pinned host memory over PCIe itself, a few programs wide.

With `release`, each page's readiness word is set to its generation as soon as the page is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4ctl.kernels.copies import check_pools

# Of a load, which runs beside a forward that needs the multiprocessors; of a backup, spread thin over all of them.
_LOAD_PROGRAMS, _LOAD_WARPS = 32, 8
_BACKUP_PROGRAMS, _BACKUP_WARPS = 128, 4


# Every number of pages and every layer by one compiled kernel: a variant would be compiled while somebody waits.
@triton.jit(do_not_specialize=["first", "count", "items"])
def _copy(
    source_ptr, target_ptr, source_pages_ptr, target_pages_ptr, words_ptr, groups_ptr, generations_ptr, group_stride,
    source_page, source_layer, target_page, target_layer, first, count, items, page_words: tl.constexpr,
    block: tl.constexpr, release: tl.constexpr,
):  # fmt: skip
    """Items in page-major order within a layer, layers ascending: int32 words of 4 B."""
    lane = tl.arange(0, block)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        layer = (first + item // count).to(tl.int64)
        index = item % count
        source = source_ptr + tl.load(source_pages_ptr + index).to(tl.int64) * source_page + layer * source_layer
        target = target_ptr + tl.load(target_pages_ptr + index).to(tl.int64) * target_page + layer * target_layer
        for start in range(0, page_words, block):
            at = start + lane
            words = tl.load(source + at, mask=at < page_words, cache_modifier=".cg")
            tl.store(target + at, words, mask=at < page_words)
        if release:
            tl.debug_barrier()
            word = words_ptr + layer * group_stride + tl.load(groups_ptr + index)
            tl.atomic_xchg(word, tl.load(generations_ptr + index), sem="release", scope="sys")


def _launch(
    source: torch.Tensor,
    target: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    strides: tuple[int, int, int, int],
    layers: tuple[int, int],
    released: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int] | None,
    programs: int,
    warps: int,
) -> None:
    count, page_words = pages[0].shape[0], source.shape[2] // 4
    items = count * (layers[1] - layers[0])
    if items == 0:
        return
    words, groups, generations, stride = released or (pages[0], pages[0], pages[0], 0)
    block = min(4096, triton.next_power_of_2(page_words))
    _copy[(min(programs, items),)](
        source.view(torch.int32), target.view(torch.int32), *pages, words, groups, generations, stride,
        *(stride // 4 for stride in strides), layers[0], count, items, page_words=page_words, block=block,
        release=released is not None, num_warps=warps,
    )  # fmt: skip


def load_triton(
    host: torch.Tensor,
    device: torch.Tensor,
    host_pages: torch.Tensor,
    device_pages: torch.Tensor,
    first: int,
    end: int,
    release: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    programs: int = _LOAD_PROGRAMS,
) -> None:
    """As `copies.load_reference`; page lists on the device. release: (words int64 [layers, groups], the group int32
    [n] and generation int64 [n] of each page; one page a group)."""
    check_pools(host, device, host_pages, device_pages, first, end)
    strides = host.stride(0), host.stride(1), device.stride(1), device.stride(0)
    released = None if release is None else (*release, release[0].stride(0))
    _launch(host, device, (host_pages, device_pages), strides, (first, end), released, programs, _LOAD_WARPS)


def backup_triton(
    host: torch.Tensor,
    device: torch.Tensor,
    host_pages: torch.Tensor,
    device_pages: torch.Tensor,
    first: int,
    end: int,
    programs: int = _BACKUP_PROGRAMS,
) -> None:
    """As `copies.backup_reference`; page lists on the device."""
    check_pools(host, device, host_pages, device_pages, first, end)
    strides = device.stride(1), device.stride(0), host.stride(0), host.stride(1)
    _launch(device, host, (device_pages, host_pages), strides, (first, end), None, programs, _BACKUP_WARPS)
