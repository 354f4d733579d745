# mypy: allow-untyped-defs, allow-incomplete-defs
"""Paged index logits in Triton: keys as the tall operand, so that the sum over heads stays inside a thread's row.

A launch is a fixed grid (it can be captured once and replayed at any length): decode shares the key blocks of all
sequences evenly, from lengths read on the device; prefill deals out (run of keys, query block) pairs. `reserved_sms`
leaves multiprocessors free for a loader that needs them while the grid waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsv4ctl.kernels import index_k
from dsv4ctl.kernels.device import on_gpu
from dsv4ctl.kernels.logits import HEADS, QueryBlocks
from dsv4ctl.kernels.resident import resident_grid
from dsv4ctl.kernels.tickets import Tickets
from dsv4ctl.kernels.tickets_triton import acquire_pages, ticket_arguments


@dataclass(frozen=True)
class Shape:
    """Launch shape: keys a step, most steps a work item, warps, pipeline stages, most registers a thread."""

    block: int
    steps: int
    warps: int
    stages: int
    registers: int


#: Differ from launch to launch: a variant for each of their values' properties would be compiled while a batch waits.
VARYING = ("table_stride", "query_blocks", "columns")
UNALIGNED = ("first_ptr", "count_ptr", "sequence_ptr", "words_ptr")
ROUNDS = tl.constexpr(20)  #: prefill items a program, so that what a load brings last is shared by many
LEAST_RUN = tl.constexpr(8)  #: steps of a prefill item, so that its queries are worth reading
LEAST_WIDTH = 64  #: query blocks up to here are one variant of `_decode`


@triton.jit
def _block(query_block, first_ptr, count_ptr, sequence_ptr, rows: tl.constexpr, regular: tl.constexpr):
    """(first query, number of queries, sequence) of a query block; no loads where every sequence has `rows`."""
    if regular:
        return query_block * rows, rows, query_block
    return tl.load(first_ptr + query_block), tl.load(count_ptr + query_block), tl.load(sequence_ptr + query_block)


@triton.jit
def _page(table, logical, last, lane, page_keys: tl.constexpr, block: tl.constexpr):
    """The page of each key of a step that begins with logical page `logical`; no page after `last` is looked up.

    Scalar lookups: as a tensor they would take a stage of the pipeline, and halve the keys in flight.
    """
    page = tl.load(table + tl.minimum(logical, last)).to(tl.int64)
    if block > page_keys:
        second = tl.load(table + tl.minimum(logical + 1, last)).to(tl.int64)
        page = tl.where(lane < page_keys, page, second)
    return page


@triton.jit
def _run(
    q_ptr, weights_ptr, keys_ptr, scales_ptr, table_ptr, lengths_ptr, first_ptr, count_ptr, sequence_ptr, out_ptr,
    words_ptr, expected_ptr, failed_ptr, group_pages, deadline, table_stride, out_stride, query_block, start, end,
    rows: tl.constexpr, heads: tl.constexpr, dim: tl.constexpr, page_keys: tl.constexpr, page_stride: tl.constexpr,
    scale_stride: tl.constexpr, block: tl.constexpr, run_pages: tl.constexpr, fp8: tl.constexpr,
    regular: tl.constexpr, tickets: tl.constexpr, gpu: tl.constexpr,
):  # fmt: skip
    """Logits of one query block over keys start..end-1, at most run_pages pages, start at a page's first key."""
    first, count, sequence = _block(query_block, first_ptr, count_ptr, sequence_ptr, rows, regular)
    table = table_ptr + sequence.to(tl.int64) * table_stride
    row = tl.arange(0, rows)
    lengths = tl.load(lengths_ptr + first + row, mask=row < count, other=0)
    column = tl.arange(0, rows * heads)
    query = tl.minimum(column // heads, count - 1) + first
    d = tl.arange(0, dim)
    q = tl.load(q_ptr + (query.to(tl.int64) * heads + column % heads)[None, :] * dim + d[:, None])
    weights = tl.load(weights_ptr + query.to(tl.int64) * heads + column % heads)
    outs = out_ptr + (first + row).to(tl.int64) * out_stride
    stop = end
    if tickets:
        logical = start // page_keys + tl.arange(0, run_pages)
        wanted = logical * page_keys < end
        pages = tl.load(table + logical, mask=wanted, other=0)
        expected = tl.load(expected_ptr + sequence.to(tl.int64) * table_stride + logical, mask=wanted, other=0)
        ready = acquire_pages(
            words_ptr, group_pages, failed_ptr + sequence, deadline, pages, expected, logical + 1, wanted, gpu
        )
        stop = tl.where(ready == 1, end, start)
    if not gpu:
        q = q.to(tl.float32)  # Triton's interpreter multiplies bf16 as if it were an integer
    elif q.dtype != keys_ptr.dtype.element_ty:
        q = q.to(tl.bfloat16)
    lane = tl.arange(0, block)
    line = lane % page_keys
    last_page = (end - 1) // page_keys
    scale = tl.zeros((block,), tl.float32)
    if fp8:
        page = _page(table, start // page_keys, last_page, lane, page_keys, block)
        scale = tl.load(scales_ptr + page * scale_stride + page_keys * dim // 4 + line)
    for at in range(start, stop, block):
        page = _page(table, at // page_keys, last_page, lane, page_keys, block)
        k = tl.load(keys_ptr + (page * page_stride + line * dim)[:, None] + d[None, :])
        if k.dtype != q.dtype:
            k = k.to(q.dtype)
        dots = tl.maximum(tl.dot(k, q, out_dtype=tl.float32), 0.0) * weights[None, :]
        sums = tl.sum(tl.reshape(dots, (block, rows, heads)), axis=2)
        if fp8:
            sums *= scale[:, None]
        key = at + lane
        tl.store(outs[None, :] + key[:, None], sums, mask=key[:, None] < lengths[None, :])
        if fp8:  # a step ahead, as the keys are
            page = _page(table, (at + block) // page_keys, last_page, lane, page_keys, block)
            scale = tl.load(scales_ptr + page * scale_stride + page_keys * dim // 4 + line)
    if tickets:
        nothing = tl.full((block, rows), float("nan"), tl.float32)
        for at in range(stop, end, block):
            key = at + lane
            tl.store(outs[None, :] + key[:, None], nothing, mask=key[:, None] < lengths[None, :])


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def _decode(
    q_ptr, weights_ptr, keys_ptr, scales_ptr, table_ptr, lengths_ptr, first_ptr, count_ptr, sequence_ptr, out_ptr,
    words_ptr, group_pages, expected_ptr, failed_ptr, deadline, table_stride, out_stride, query_blocks, columns,
    width: tl.constexpr, steps: tl.constexpr, rows: tl.constexpr, heads: tl.constexpr, dim: tl.constexpr,
    page_keys: tl.constexpr, page_stride: tl.constexpr, scale_stride: tl.constexpr, block: tl.constexpr,
    run_pages: tl.constexpr, fp8: tl.constexpr, regular: tl.constexpr, tickets: tl.constexpr, gpu: tl.constexpr,
):  # fmt: skip
    """Work items (query block, run of steps) in a fixed order, dealt round to the programs."""
    index = tl.arange(0, width)
    mask = index < query_blocks
    if regular:
        last = (index + 1) * rows - 1
    else:
        last = tl.load(first_ptr + index, mask=mask, other=0) + tl.load(count_ptr + index, mask=mask, other=1) - 1
    keys = tl.load(lengths_ptr + last, mask=mask, other=0)
    blocks = tl.cdiv(keys, block)
    share = tl.cdiv(tl.sum(blocks, axis=0), tl.num_programs(0))
    per_item = tl.maximum(tl.minimum(share, steps), 1)
    items = tl.cdiv(blocks, per_item)
    ends = tl.cumsum(items, axis=0)
    total = tl.sum(items, axis=0)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        query_block = tl.sum((ends <= item).to(tl.int32), axis=0)
        before = tl.sum(tl.where(index < query_block, items, 0), axis=0)
        length = tl.sum(tl.where(index == query_block, keys, 0), axis=0)
        start = (item - before) * per_item * block
        end = tl.minimum(start + per_item * block, length)
        _run(
            q_ptr, weights_ptr, keys_ptr, scales_ptr, table_ptr, lengths_ptr, first_ptr, count_ptr, sequence_ptr,
            out_ptr, words_ptr, expected_ptr, failed_ptr, group_pages, deadline, table_stride, out_stride, query_block,
            start, end, rows, heads, dim, page_keys, page_stride, scale_stride, block, run_pages, fp8, regular, tickets,
            gpu,
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def _prefill(
    q_ptr, weights_ptr, keys_ptr, scales_ptr, table_ptr, lengths_ptr, first_ptr, count_ptr, sequence_ptr, out_ptr,
    words_ptr, group_pages, expected_ptr, failed_ptr, deadline, table_stride, out_stride, query_blocks, columns,
    width: tl.constexpr, steps: tl.constexpr, rows: tl.constexpr, heads: tl.constexpr, dim: tl.constexpr,
    page_keys: tl.constexpr, page_stride: tl.constexpr, scale_stride: tl.constexpr, block: tl.constexpr,
    run_pages: tl.constexpr, fp8: tl.constexpr, regular: tl.constexpr, tickets: tl.constexpr, gpu: tl.constexpr,
):  # fmt: skip
    """Work items (run of LEAST_RUN to `steps` steps, query block), in the order in which a load brings the pages."""
    total = tl.cdiv(columns, block)
    share = tl.cdiv(total * query_blocks, tl.num_programs(0) * ROUNDS)
    run = tl.minimum(tl.maximum(share, LEAST_RUN), steps)
    runs = tl.cdiv(total, run)
    for item in range(tl.program_id(0), runs * query_blocks, tl.num_programs(0)):
        query_block = item % query_blocks
        first, count, _ = _block(query_block, first_ptr, count_ptr, sequence_ptr, rows, regular)
        length = tl.load(lengths_ptr + first + count - 1)
        start = item // query_blocks * (run * block)
        end = tl.minimum(start + run * block, length)
        if start < length:
            _run(
                q_ptr, weights_ptr, keys_ptr, scales_ptr, table_ptr, lengths_ptr, first_ptr, count_ptr, sequence_ptr,
                out_ptr, words_ptr, expected_ptr, failed_ptr, group_pages, deadline, table_stride, out_stride,
                query_block, start, end, rows, heads, dim, page_keys, page_stride, scale_stride, block, run_pages, fp8,
                regular, tickets, gpu,
            )  # fmt: skip


# By (fp8 keys, queries a block), measured best on an H200 (docs/kernels.md).
SHAPES = {
    (False, 1): Shape(block=64, steps=64, warps=4, stages=2, registers=128),
    (False, 2): Shape(block=128, steps=32, warps=8, stages=3, registers=128),
    (False, 4): Shape(block=64, steps=64, warps=8, stages=3, registers=128),
    (True, 1): Shape(block=128, steps=32, warps=4, stages=2, registers=128),
    (True, 2): Shape(block=64, steps=64, warps=4, stages=2, registers=128),
    (True, 4): Shape(block=64, steps=64, warps=8, stages=3, registers=128),
}


def paged_logits_triton(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    blocks: QueryBlocks,
    out: torch.Tensor,
    tickets: Tickets | None = None,
    *,
    prefill: bool = False,
    reserved_sms: int = 0,
    shape: Shape | None = None,
) -> None:
    """As `paged_logits_reference`; with tickets, the wait is bounded and a page that never lands gives NaN."""
    fp8 = index_k.layout_of(pages.shape[1]) == "fp8"
    shape = shape or SHAPES[fp8, min(blocks.rows, 4)]
    if shape.block not in (index_k.KEYS, 2 * index_k.KEYS):
        raise ValueError(f"a step of {shape.block} keys: one or two pages expected")
    keys = pages.view(torch.float8_e4m3fn if fp8 else torch.bfloat16)
    scales = pages.view(torch.float32) if fp8 else weights
    number = blocks.first.shape[0]
    resident_grid(
        _prefill if prefill else _decode, q.device, reserved_sms,
        q, weights, keys, scales, table, lengths, blocks.first, blocks.count, blocks.sequence, out,
        *ticket_arguments(tickets, lengths), table.stride(0), out.stride(0), number, out.shape[1],
        width=1 if prefill else max(LEAST_WIDTH, triton.next_power_of_2(number)), steps=shape.steps, rows=blocks.rows,
        heads=HEADS, dim=index_k.DIM, page_keys=index_k.KEYS, page_stride=keys.shape[1],
        scale_stride=pages.shape[1] // 4, block=shape.block, run_pages=shape.steps * shape.block // index_k.KEYS,
        fp8=fp8, regular=blocks.regular, tickets=tickets is not None, gpu=on_gpu(q), num_warps=shape.warps,
        num_stages=shape.stages, maxnreg=shape.registers,
    )  # fmt: skip
