"""Readiness words: what a loader releases and a kernel acquires before it touches a page, one word a page group.

words int64 [groups] (one layer's), in device memory: the generation of the pages that have landed in the group.
expected int64, beside the page table and refreshed with it before each launch or replay of a captured graph: the
generation the reader may read; 0 asks for nothing. Equal words grant; anything else waits until `deadline_us`,
then the flag of the sequence, failed int32 [sequences], is set to 1 + the logical page (the largest one missing)
and the kernel writes no result made of that page. A flag stays set until the host clears it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tickets:
    """What a kernel acquires: words [groups], expected (shape of the page list or table), failed [sequences]."""

    words: torch.Tensor
    expected: torch.Tensor
    failed: torch.Tensor
    deadline_us: int
    group_pages: int = 1

    def __post_init__(self) -> None:
        for name, tensor, dtype in (
            ("words", self.words, torch.int64),
            ("expected", self.expected, torch.int64),
            ("failed", self.failed, torch.int32),
        ):
            if tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(f"{name}: {tensor.dtype}, contiguous: {tensor.is_contiguous()}; {dtype}, contiguous")
        if self.group_pages < 1 or self.deadline_us < 1:
            raise ValueError("group_pages and deadline_us: positive")


def missing_reference(tickets: Tickets, pages: torch.Tensor) -> torch.Tensor:
    """Which of `pages` (shape of `expected`) are not granted now: bool, the same shape."""
    seen = tickets.words[(pages // tickets.group_pages).long()]
    return (tickets.expected != 0) & (seen != tickets.expected)


def release_reference(words: torch.Tensor, groups: torch.Tensor, generations: torch.Tensor) -> None:
    """Set words at `groups` to `generations`."""
    words[groups.long()] = generations
