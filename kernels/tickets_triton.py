# mypy: allow-untyped-defs, allow-incomplete-defs
"""Acquire and release of readiness words on the device.

The acquire is a load at system scope (Triton has none, hence the assembly): whoever sees the generation a loader
released sees the page's bytes too, be it a copy engine's, another kernel's or the host's. The wait comes before a loop
over pages, never inside it: a software-pipelined loop issues its loads an iteration early, ahead of a wait in its body.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from dsv4ctl.kernels.tickets import Tickets


@triton.jit
def _seen(words, mask, gpu: tl.constexpr):
    """The words where `mask`, acquired at system scope; Triton's interpreter knows atomics only."""
    if gpu:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @!p mov.b64 $0, 0; @p ld.acquire.sys.global.b64 $0, [$1]; }",
            "=l,l,r", [words.to(tl.int64), mask.to(tl.int32)], dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
    return tl.atomic_add(words, tl.zeros_like(mask).to(tl.int64), mask=mask, sem="acquire", scope="sys")


@triton.jit
def acquire_pages(words_ptr, group_pages, failed_ptr, deadline, pages, expected, report, mask, gpu: tl.constexpr):
    """Wait until every page's word equals its expected generation; 1 if all do, else 0 and the fail flag is set.

    `pages` int32, `expected` int64 (0: no wait), `mask` [n]; `report` int32 [n], positive: what the flag is set to.
    Ends `deadline` us after it began (polls where there is no clock), or when the flag is set by anyone.
    """
    waits = mask & (expected != 0)
    words = words_ptr + pages // group_pages
    late = waits & (_seen(words, waits, gpu) != expected)
    missing = tl.sum(late.to(tl.int32), axis=0)
    if missing > 0:
        began = tl.full([], 0, tl.int64)
        limit = began + deadline
        if gpu:
            began = globaltimer()
            limit = tl.full([], 1000, tl.int64) * deadline
        now = began
        failed = tl.atomic_add(failed_ptr, 0, sem="relaxed", scope="gpu")
        while (missing > 0) & (failed == 0) & (now - began < limit):
            late = late & (_seen(words, late, gpu) != expected)
            missing = tl.sum(late.to(tl.int32), axis=0)
            failed = tl.atomic_add(failed_ptr, 0, sem="relaxed", scope="gpu")
            if gpu:
                now = globaltimer()
            else:
                now += 1
        if missing > 0:
            tl.atomic_max(failed_ptr, tl.max(tl.where(late, report, 0), axis=0), sem="relaxed", scope="gpu")
    return (missing == 0).to(tl.int32)


# Any number of words, in any layer's row, by one compiled kernel: readers wait for it.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["words_ptr"])
def _release(words_ptr, groups_ptr, generations_ptr, count, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    mask = at < count
    group = tl.load(groups_ptr + at, mask=mask, other=0)
    generation = tl.load(generations_ptr + at, mask=mask, other=0)
    tl.atomic_xchg(words_ptr + group, generation, mask=mask, sem="release", scope="sys")


def release(words: torch.Tensor, groups: torch.Tensor, generations: torch.Tensor) -> None:
    """Set words int64 [n] at int32 `groups` to int64 `generations`, behind all earlier work of the current stream."""
    count = groups.shape[0]
    _release[(triton.cdiv(count, 128),)](words, groups, generations, count, block=128, num_warps=4)


def ticket_arguments(tickets: Tickets | None, absent: torch.Tensor) -> tuple[object, ...]:
    """(words, group pages, expected, failed, deadline) of a launch; `absent` stands for tensors that are not read."""
    if tickets is None:
        return absent, 1, absent, absent, 0
    return tickets.words, tickets.group_pages, tickets.expected, tickets.failed, tickets.deadline_us
