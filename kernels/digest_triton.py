# mypy: allow-untyped-defs, allow-incomplete-defs
"""Page digests in Triton: the bits of `digest.digest_torch`, over page lists, one or several layers a launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsv4ctl.kernels import digest
from dsv4ctl.kernels.device import multiprocessors, on_gpu
from dsv4ctl.kernels.tickets import Tickets
from dsv4ctl.kernels.tickets_triton import acquire_pages, ticket_arguments

MIX = tl.constexpr(digest.MIX)
FINISH = tl.constexpr(digest.FINISH)


@triton.jit
def _mixed(word, odd):
    x = word ^ (word >> 32)
    x = x * odd
    x = x ^ (x >> 32)
    x = x * tl.full([], MIX, tl.uint64)
    return x ^ (x >> 32)


@triton.jit
def _finished(sums, words):
    size = (tl.full([], 8, tl.int64) * words).to(tl.uint64, bitcast=True)
    x = tl.sum(sums, axis=0) ^ (size * tl.full([], MIX, tl.uint64))
    x = (x ^ (x >> 32)) * tl.full([], FINISH, tl.uint64)
    return x ^ (x >> 32)


@triton.jit
def digest_of(address, words, odd_ptr, block: tl.constexpr):
    """Of the page at an address."""
    source = address.to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, block)
    sums = tl.zeros((block,), tl.uint64)
    for start in range(0, words, block):
        at = start + lane
        odd = tl.load(odd_ptr + at, mask=at < words, other=0).to(tl.uint64, bitcast=True)
        word = tl.load(source + at, mask=at < words, other=0).to(tl.uint64, bitcast=True)
        sums += _mixed(word, odd)
    return _finished(sums, words).to(tl.int64, bitcast=True)


@triton.jit(do_not_specialize=["count", "items"])
def _digest(
    source_ptr, odd_ptr, pages_ptr, out_ptr, words_ptr, group_pages, expected_ptr, failed_ptr, deadline, layer_words,
    layer_groups, page_words, count, items, words: tl.constexpr, block: tl.constexpr, ahead: tl.constexpr,
    tickets: tl.constexpr, gpu: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, block)
    odd = tl.load(odd_ptr + lane, mask=lane < words, other=0).to(tl.uint64, bitcast=True)
    one = tl.arange(0, 1)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        layer = (item // count).to(tl.int64)
        page = tl.load(pages_ptr + item % count)
        digest = tl.full([], 0, tl.uint64)
        ready = 1
        if tickets:
            ready = acquire_pages(
                words_ptr + layer * layer_groups, group_pages, failed_ptr + item % count, deadline, page + one,
                tl.load(expected_ptr + item % count + one), one + 1, one == 0, gpu,
            )  # fmt: skip
        if ready == 1:
            source = source_ptr + layer * layer_words + page.to(tl.int64) * page_words
            sums = tl.zeros((block,), tl.uint64)
            for start in range(0, words, block * ahead):
                for part in tl.static_range(ahead):
                    at = start + part * block + lane
                    word = tl.load(source + at, mask=at < words, other=0).to(tl.uint64, bitcast=True)
                    if words > block:
                        odd = tl.load(odd_ptr + at, mask=at < words, other=0).to(tl.uint64, bitcast=True)
                    sums += _mixed(word, odd)
            digest = _finished(sums, words)
        tl.store(out_ptr + item, digest.to(tl.int64, bitcast=True))


@dataclass(frozen=True)
class Shape:
    """Launch shape: words a step, steps whose loads are issued together, grid programs a multiprocessor, warps."""

    block: int
    ahead: int
    programs: int
    warps: int


def default_shape(words: int, items: int) -> Shape:
    """Shapes measured best on an H200 (docs/kernels.md)."""
    if words <= 2048:
        block = triton.next_power_of_2(words)
        return Shape(block, 1, 16, 2 if words == block and words > 1024 else 1)
    return Shape(256, 5, 16, 2) if items >= 1024 else Shape(2048, 1, 8, 8)


def digest_pages_triton(
    source: torch.Tensor,
    pages: torch.Tensor,
    tickets: Tickets | None = None,
    *,
    reserved_sms: int = 0,
    shape: Shape | None = None,
) -> torch.Tensor:
    """Digests of `pages` int32 [n] of uint8 [layers, pool pages, page_bytes]: int64 [layers, n], the bits of uint64.

    tickets: words [layers * groups], expected and failed of `pages`' shape; a page not granted in time has its flag
    set and 0 for a digest.
    """
    layers, _, page_bytes = source.shape
    digest.check_pages(2, page_bytes)
    words, count = page_bytes // 8, pages.shape[0]
    shape = shape or default_shape(words, layers * count)
    out = torch.empty(layers, count, dtype=torch.int64, device=source.device)
    items = layers * count
    grid = (min(items, max(1, multiprocessors(source.device) - reserved_sms) * shape.programs),)
    flat = source.view(torch.int64)
    groups = tickets.words.shape[0] // layers if tickets is not None else 0
    _digest[grid](
        flat, digest.multipliers(words, source.device), pages, out, *ticket_arguments(tickets, pages), flat.stride(0),
        groups, flat.stride(1), count, items, words=words, block=shape.block, ahead=shape.ahead,
        tickets=tickets is not None, gpu=on_gpu(source), num_warps=shape.warps,
    )  # fmt: skip
    return out
