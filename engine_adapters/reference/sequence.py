"""A sequence's page table and one chunk of its tokens: what the model computes, and where the bytes lie."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.pools import DevicePools
from dsv4ctl.engine_adapters.reference.readiness import Landing

QUERY_BLOCK = 64
"""Queries computed together: small enough that their rows stay in the processor's cache."""

Gate = Callable[[str, str, int], None]
"""gate(consumer, pool, model_layer): called right before it reads cached bytes; returns when it may."""


def open_gate(consumer: str, pool: str, layer: int) -> None:
    """The gate of a caller whose bytes have all landed."""


@dataclass
class PageTable:
    """Physical pages of one sequence.

    `full[i]`: page of logical page i in space `full` (every page up to the chunk's is needed).
    `swa`: logical page -> page in space `swa`; only pages inside the window, and the chunk's own, need exist.
    `state`: the sequence's private slot in space `state`.
    """

    full: list[int] = field(default_factory=list)
    swa: dict[int, int] = field(default_factory=dict)
    state: int = -1


@dataclass(frozen=True)
class QueryBlock:
    """Up to QUERY_BLOCK consecutive queries of a chunk (`queries`) and the window keys they share (`keys`).

    `bias` fp32 [queries, keys]: 0 where a query sees a key, else -inf.
    """

    queries: slice
    keys: slice
    bias: torch.Tensor


@dataclass(frozen=True)
class Chunk:
    """Some tokens of one sequence, inside one logical page: 1..256 from a page boundary on, or 1 anywhere.

    Built by `make_chunk`; all index tensors are int64 and point into flat pool rows (page * rows + row).
    With T tokens from `start`: window keys are the K tokens from max(0, start - window + 1) to start + T - 1;
    compressed rows (`rows_4`, `rows_128`) are those of the sequence's completed blocks; the blocks of the
    chunk's own page come last, with biases `hidden_4`, `hidden_128`. `landing`: index keys that a kernel waits for.
    """

    pools: DevicePools
    landing: Landing | None
    ids: torch.Tensor
    start: int
    positions: torch.Tensor
    state_from: int
    state_to: int
    swa_page: int
    full_page: int
    full_pages: torch.Tensor
    window_rows: torch.Tensor
    query_blocks: tuple[QueryBlock, ...]
    rows_4: torch.Tensor
    rows_128: torch.Tensor
    hidden_4: torch.Tensor
    hidden_128: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def end(self) -> int:
        """Length of the sequence once this chunk is computed."""
        return self.start + self.tokens

    @property
    def page(self) -> int:
        """Logical page the chunk lies in."""
        return self.start // self.pools.geometry.page_tokens


def chunk_spans(geometry: Geometry, start: int, length: int) -> list[tuple[int, int]]:
    """Prefill chunks (start, end) of tokens start..length-1: page-sized, the last one as long as it is.

    Raises ValueError when `start` is not a page boundary or nothing is left to compute.
    """
    page = geometry.page_tokens
    if start % page or not 0 <= start < length:
        raise ValueError(f"prefill from {start} of {length}: a multiple of {page} below the length expected")
    return [(at, min(at + page, length)) for at in range(start, length, page)]


def make_chunk(
    pools: DevicePools,
    ids: Sequence[int],
    start: int,
    table: PageTable,
    state_from: int | None = None,
    landing: Landing | None = None,
) -> Chunk:
    """Tokens `ids` at positions start.. of the sequence behind `table`.

    `state_from`: `state` page the rings are read from (a snapshot at `start`; default: the private slot);
    they are always written to the private slot. The table is read here once: later changes do not reach
    the chunk. Raises ValueError for a chunk the model cannot compute or a page missing in the table.
    """
    geometry = pools.geometry
    _check_span(geometry, len(ids), start)
    end, page_tokens = start + len(ids), geometry.page_tokens
    page = start // page_tokens
    first = max(0, start - geometry.window + 1)
    if len(table.full) <= page:
        raise ValueError(f"page table has {len(table.full)} full pages; position {start} needs {page + 1}")
    missing = [at for at in range(first // page_tokens, page + 1) if at not in table.swa]
    if missing:
        raise ValueError(f"page table lacks swa pages {missing}; positions {first}..{end - 1} need them")
    if table.state < 0:
        raise ValueError("page table has no state slot")
    device = pools.device
    positions = torch.arange(start, end, device=device)
    keys = torch.arange(first, end, device=device)
    full_pages = torch.tensor(table.full[: page + 1], device=device)
    swa_pages = torch.tensor([table.swa[at] for at in range(first // page_tokens, page + 1)], device=device)
    return Chunk(
        pools=pools,
        landing=landing,
        ids=torch.tensor(ids, dtype=torch.int64, device=device),
        start=start,
        positions=positions,
        state_from=table.state if state_from is None else state_from,
        state_to=table.state,
        swa_page=table.swa[page],
        full_page=table.full[page],
        full_pages=full_pages,
        window_rows=swa_pages[keys // page_tokens - first // page_tokens] * page_tokens + keys % page_tokens,
        query_blocks=_query_blocks(start, end, geometry.window, device),
        rows_4=_block_rows(full_pages, page_tokens // 4, end // 4),
        rows_128=_block_rows(full_pages, page_tokens // 128, end // 128),
        hidden_4=_hidden_blocks(start % page_tokens, len(ids), 4, device),
        hidden_128=_hidden_blocks(start % page_tokens, len(ids), 128, device),
    )


def _query_blocks(start: int, end: int, window: int, device: torch.device) -> tuple[QueryBlock, ...]:
    first = max(0, start - window + 1)
    blocks = []
    for at in range(start, end, QUERY_BLOCK):
        stop, low = min(at + QUERY_BLOCK, end), max(0, at - window + 1)
        bias = _window_bias(stop - at, stop - low, window, device)
        blocks.append(QueryBlock(slice(at - start, stop - start), slice(low - first, stop - first), bias))
    return tuple(blocks)


@functools.lru_cache(maxsize=1024)
def _window_bias(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Bias of queries at the end of a run of keys: each sees itself and the window - 1 keys before it."""
    at = torch.arange(keys, device=device)
    distance = at[keys - queries :, None] - at[None, :]
    return torch.zeros(queries, keys, device=device).masked_fill_((distance < 0) | (distance >= window), float("-inf"))


def _block_rows(pages: torch.Tensor, per_page: int, blocks: int) -> torch.Tensor:
    """Flat pool rows of the sequence's first `blocks` compressed blocks."""
    return (pages[:, None] * per_page + torch.arange(per_page, device=pages.device)).view(-1)[:blocks]


@functools.lru_cache(maxsize=2048)
def _hidden_blocks(offset: int, tokens: int, ratio: int, device: torch.device) -> torch.Tensor:
    """Bias fp32 [tokens, blocks] for the blocks of the chunk's own page: -inf until a block is complete."""
    seen = (torch.arange(offset, offset + tokens, device=device) + 1) // ratio
    blocks = torch.arange((offset + tokens) // ratio, device=device)
    return torch.zeros(tokens, blocks.shape[0], device=device).masked_fill_(blocks >= seen[:, None], float("-inf"))


def _check_span(geometry: Geometry, tokens: int, start: int) -> None:
    offset = start % geometry.page_tokens
    if tokens < 1 or start < 0 or offset + tokens > geometry.page_tokens:
        raise ValueError(f"chunk of {tokens} tokens at {start}: 1 or more inside one page expected")
    if offset and tokens > 1:
        raise ValueError(f"chunk of {tokens} tokens at {start}: inside a page only single tokens can be computed")
    if start + tokens > geometry.context_tokens:
        raise ValueError(f"chunk ends at {start + tokens}, beyond the context of {geometry.context_tokens}")
