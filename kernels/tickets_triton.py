# mypy: allow-untyped-defs, allow-incomplete-defs
"""Acquire and release of readiness words on the device.

The acquire is an atomic read (add of 0) at system scope: whoever sees the generation a loader released sees the
page's bytes too, be it a copy engine's, another kernel's or the host's. One thread does it for all that hold the word:
what each thread saw for itself (by a load) could part the threads of a program. The wait comes before a loop over
pages, never inside it: a software-pipelined loop issues its loads an iteration early, ahead of a wait in its body.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from dsv4ctl.kernels.tickets import Tickets


@triton.jit
def acquire_pages(words_ptr, group_pages, failed_ptr, deadline, pages, expected, report, mask, gpu: tl.constexpr):
    """Wait until every page's word equals its expected generation; 1 if all do, else 0 and the fail flag is set.

    `pages` int32, `expected` int64 (0: no wait), `mask` [n]; `report` int32 [n], positive: what the flag is set to.
    Ends a poll after `deadline` us (polls where there is no clock), or when the flag is set by anyone.
    """
    waits = mask & (expected != 0)
    words = words_ptr + pages // group_pages
    none = tl.zeros_like(expected)
    late = waits & (tl.atomic_add(words, none, mask=waits, sem="acquire", scope="sys") != expected)
    worst = tl.max(tl.where(late, report, 0), axis=0)
    if worst > 0:
        began = tl.full([], 0, tl.int64)
        limit = began + deadline
        if gpu:
            began = globaltimer()
            limit = tl.full([], 1000, tl.int64) * deadline
        now = began
        failed = tl.atomic_add(failed_ptr, 0, sem="relaxed", scope="gpu")
        while (worst > 0) & (failed == 0):
            late = late & (tl.atomic_add(words, none, mask=late, sem="acquire", scope="sys") != expected)
            worst = tl.max(tl.where(late, report, 0), axis=0)
            if gpu:
                now = globaltimer()
            else:
                now += 1
            # Each thread has a clock of its own, and all must leave together: one sets the flag, all read it.
            over = tl.where(now - began >= limit, worst, 0)
            failed = tl.atomic_max(failed_ptr, over, sem="relaxed", scope="gpu")
    return (worst == 0).to(tl.int32)


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
