"""Exact top-k of index logits: the k largest of each row, the lowest index winning ties."""

from __future__ import annotations

import numpy as np
import torch


def topk_reference(logits: torch.Tensor, k: int) -> torch.Tensor:
    """fp32 [rows, n] -> int64 [rows, min(k, n)], indices ascending. Plain torch: a stable sort."""
    order = torch.sort(logits + 0.0, dim=-1, descending=True, stable=True).indices
    return order[:, : min(k, logits.shape[1])].sort(dim=-1).values


def topk(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The same bits as `topk_reference`, without sorting; on the CPU, or where k >= n. NaN is not expected.

    A logit and its index become one int64 key (order-preserving bits of the float above, the complement of
    the index below; little-endian), so all keys differ and any selection algorithm returns the same set.
    """
    rows, n = logits.shape
    if k >= n:
        return torch.arange(n, device=logits.device).expand(rows, n)
    bits = (logits + 0.0).view(torch.int32)
    keys = np.empty((rows, n), dtype=np.int64)
    halves = torch.from_numpy(keys).view(torch.int32).view(rows, n, 2)
    halves[:, :, 0] = torch.arange(n - 1, -1, -1, device=logits.device)
    torch.bitwise_xor(bits, (bits >> 31).bitwise_and_(0x7FFFFFFF), out=halves[:, :, 1])
    keys.partition(n - k, axis=-1)
    chosen = (n - 1) - (keys[:, n - k :] & 0xFFFFFFFF)
    chosen.sort(axis=-1)
    return torch.from_numpy(np.ascontiguousarray(chosen))


def topk_slots_reference(
    logits: torch.Tensor, lengths: torch.Tensor, k: int, table: torch.Tensor, sequence: torch.Tensor, page_keys: int
) -> torch.Tensor:
    """Slots of the k largest of each row's first lengths[t] logits: int32 [T, k], in ascending logical order, then -1.

    logits fp32 [T, n]; lengths, sequence int [T]; table int32 [sequences, max_pages]; the slot of index j is
    table[sequence[t], j // page_keys] * page_keys + j % page_keys. The lowest index wins a tie, -0.0 equals 0.0, and
    NaN is never selected, even when fewer than k others are there. Plain torch: a stable sort.
    """
    out = torch.full((logits.shape[0], k), -1, dtype=torch.int32, device=logits.device)
    for row in range(logits.shape[0]):
        values = logits[row, : int(lengths[row])]
        valid = (~values.isnan()).nonzero()[:, 0]
        order = torch.sort(values[valid] + 0.0, descending=True, stable=True).indices[:k]
        chosen = valid[order].sort().values
        pages = table[int(sequence[row]), chosen // page_keys].long()
        out[row, : chosen.shape[0]] = (pages * page_keys + chosen % page_keys).to(torch.int32)
    return out
