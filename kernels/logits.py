"""Paged index logits: logits[t, j] = sum_h weights[t, h] * relu(q[t, h] . k[j]) (DeepSeek-V3.2's indexer), plain torch.

q [T, 64, 128] bf16 or e4m3; weights fp32 [T, 64] (a scale of q is folded in); pages uint8 [pages, page_bytes] in
the bf16 or fp8 layout of `index_k`; table int32 [sequences, max_pages]: page of logical page j // 64; lengths
int32 [T]: keys query t may see. Blocks of queries that share a sequence: `QueryBlocks`.
Out: fp32 [T, >= max keys]; columns from lengths[t] on are not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4ctl.kernels import index_k
from dsv4ctl.kernels.tickets import Tickets, missing_reference

HEADS = 64


@dataclass(frozen=True)
class QueryBlocks:
    """Up to `rows` consecutive queries of one sequence, whose lengths ascend: int32 [blocks] each.

    regular: every sequence has exactly `rows` queries, so block i is sequence i and begins at query i * rows.
    """

    first: torch.Tensor
    count: torch.Tensor
    sequence: torch.Tensor
    rows: int
    regular: bool = False


def query_blocks(queries: Sequence[int], rows: int, device: torch.device | str = "cpu") -> QueryBlocks:
    """Blocks over `queries[s]` consecutive queries of each sequence s; `rows` a power of two."""
    if rows < 1 or rows & (rows - 1):
        raise ValueError(f"rows {rows}: a power of two")
    first, count, sequence, start = [], [], [], 0
    for index, number in enumerate(queries):
        for at in range(0, number, rows):
            first.append(start + at)
            count.append(min(rows, number - at))
            sequence.append(index)
        start += number
    columns = torch.tensor([first, count, sequence], dtype=torch.int32, device=device)
    return QueryBlocks(columns[0], columns[1], columns[2], rows, all(number == rows for number in queries))


def causal_lengths(queries: Sequence[int], tokens: Sequence[int], ratio: int) -> torch.Tensor:
    """Keys visible to each of the last `queries[s]` of `tokens[s]` tokens: int32 [T], position + 1 // ratio."""
    rows = [(torch.arange(end - number, end) + 1) // ratio for number, end in zip(queries, tokens, strict=True)]
    return torch.cat(rows).to(torch.int32)


def paged_logits_reference(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    blocks: QueryBlocks,
    out: torch.Tensor,
    tickets: Tickets | None = None,
) -> None:
    """The formula in fp32 on the stored bits. A page not granted gives NaN and sets the flag: nothing is waited for."""
    dtype = index_k.layout_of(pages.shape[1])
    for first, count, sequence in zip(
        blocks.first.tolist(), blocks.count.tolist(), blocks.sequence.tolist(), strict=True
    ):
        rows = slice(first, first + count)
        longest = int(lengths[rows].max())
        chosen = table[sequence, : -(-longest // index_k.KEYS)].long()
        keys = index_k.read_keys(pages, dtype, chosen, longest)
        values = index_k.index_logits(q[rows].float(), weights[rows], keys)
        if tickets is not None:
            late = missing_reference(tickets, table)[sequence, : chosen.shape[0]]
            if bool(late.any()):
                tickets.failed[sequence] = 1 + int(late.nonzero().max())
                values[:, late.repeat_interleave(index_k.KEYS)[:longest]] = float("nan")
        for row in range(count):
            length = int(lengths[first + row])
            out[first + row, :length] = values[row, :length]
