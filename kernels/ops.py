"""The one place that chooses: Triton for tensors on a GPU, plain torch on a CPU. Same contract on both.

Shapes, dtypes and units: the reference beside each kernel. Triton is imported with the first call on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4ctl.kernels import buffers, copies, digest, index_k, logits, queries, tickets, topk
from dsv4ctl.kernels.device import on_gpu


def store_slots(pages: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """`index_k.store_slots_reference`."""
    if on_gpu(pages):
        from dsv4ctl.kernels.index_k_triton import store_slots_triton

        store_slots_triton(pages, slots, keys)
    else:
        index_k.store_slots_reference(pages, slots, keys)


def norm_rope_hadamard_store(
    pages: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    norm: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    epsilon: float,
) -> None:
    """`index_k.norm_rope_hadamard`, then the store at `slots`."""
    if on_gpu(pages):
        from dsv4ctl.kernels.index_k_triton import norm_rope_hadamard_store_triton

        norm_rope_hadamard_store_triton(pages, slots, rows, norm, cos_sin, positions, epsilon)
    else:
        keys = index_k.norm_rope_hadamard(rows, norm, cos_sin, positions, epsilon)
        index_k.store_slots_reference(pages, slots, keys)


def index_queries(
    q: torch.Tensor, weights: torch.Tensor, weight_scale: float, cos_sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`queries.index_queries_reference`."""
    if on_gpu(q):
        from dsv4ctl.kernels.queries_triton import index_queries_triton

        return index_queries_triton(q, weights, weight_scale, cos_sin, positions)
    return queries.index_queries_reference(q, weights, weight_scale, cos_sin, positions)


def paged_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    blocks: logits.QueryBlocks,
    out: torch.Tensor,
    acquired: tickets.Tickets | None = None,
    *,
    prefill: bool = False,
    reserved_sms: int = 0,
) -> None:
    """`logits.paged_logits_reference`. prefill: many query blocks; reserved_sms: left to a loader while this waits."""
    if on_gpu(q):
        from dsv4ctl.kernels.logits_triton import paged_logits_triton

        paged_logits_triton(
            q, weights, pages, table, lengths, blocks, out, acquired, prefill=prefill, reserved_sms=reserved_sms
        )
    else:
        logits.paged_logits_reference(q, weights, pages, table, lengths, blocks, out, acquired)


def release_words(words: torch.Tensor, groups: torch.Tensor, generations: torch.Tensor) -> None:
    """`tickets.release_reference`, behind all earlier work of the current stream."""
    if on_gpu(words):
        from dsv4ctl.kernels.tickets_triton import release

        release(words, groups, generations)
    else:
        tickets.release_reference(words, groups, generations)


def topk_indices(values: torch.Tensor, k: int) -> torch.Tensor:
    """`topk.topk`: fp32 [rows, n], no NaN -> int64 [rows, min(k, n)], indices ascending."""
    if on_gpu(values) and k < values.shape[1]:
        from dsv4ctl.kernels.topk_triton import topk_triton

        return topk_triton(values, k)
    return topk.topk(values, k)


def topk_slots(
    values: torch.Tensor, lengths: torch.Tensor, k: int, table: torch.Tensor, sequence: torch.Tensor
) -> torch.Tensor:
    """`topk.topk_slots_reference` for index-K pages: int32 [T, k]."""
    if on_gpu(values):
        from dsv4ctl.kernels.topk_triton import topk_slots_triton

        return topk_slots_triton(values, lengths, k, table, sequence, index_k.KEYS)
    return topk.topk_slots_reference(values, lengths, k, table, sequence, index_k.KEYS)


def digest_pages(pages: torch.Tensor) -> digest.Digests:
    """Digests of uint8 [n, page_bytes]: uint64 [n] (NumPy; waits for a GPU)."""
    if on_gpu(pages):
        from dsv4ctl.kernels.digest_triton import digest_pages_triton

        chosen = torch.arange(pages.shape[0], dtype=torch.int32, device=pages.device)
        return digest_pages_triton(pages[None], chosen)[0].cpu().numpy().view("uint64")
    return digest.digest_numpy(pages.numpy())


def sealer(spaces: buffers.SpaceBuffers, stream: torch.cuda.Stream | None = None) -> buffers.Sealer:
    """What seals pages, and digests them: on a GPU in the order of `stream`, None for the one that is current. Compiles
    there. Not to be called by two threads at once.

    What a call is told, and what it returns, lives until the device has read and written it, wanted or not; but for
    what digests are taken of, from and to.
    """
    if spaces.device.type == "cuda":
        from dsv4ctl.kernels.digest_rows_triton import SealerTriton

        return SealerTriton(spaces, stream)
    return buffers.SealerTorch(spaces)


def reader(device: torch.device) -> buffers.Reader:
    """What reads tokens of `device`: on a GPU on the stream that is current. Compiles there. Not to be called by two
    threads at once.

    What a call reads, and what it returns, lives until its event, wanted or not.
    """
    if device.type == "cuda":
        from dsv4ctl.kernels.moves_triton import ReaderTriton

        return ReaderTriton(device)
    return buffers.ReaderTorch()


def load_pages(
    host: torch.Tensor,
    device: torch.Tensor,
    host_pages: Sequence[int],
    device_pages: Sequence[int],
    first: int,
    end: int,
) -> None:
    """`copies.load_reference`, on the current stream, by the variant the policy chooses."""
    _copy(host, device, host_pages, device_pages, first, end, load=True)


def backup_pages(
    host: torch.Tensor,
    device: torch.Tensor,
    host_pages: Sequence[int],
    device_pages: Sequence[int],
    first: int,
    end: int,
) -> None:
    """`copies.backup_reference`, on the current stream, by the variant the policy chooses."""
    _copy(host, device, host_pages, device_pages, first, end, load=False)


def _copy(
    host: torch.Tensor,
    device: torch.Tensor,
    host_pages: Sequence[int],
    device_pages: Sequence[int],
    first: int,
    end: int,
    load: bool,
) -> None:
    if on_gpu(device) and copies.choose_variant(host.shape[2]) == "engine":
        from dsv4ctl.kernels import copy_engine

        engine = copy_engine.load_engine if load else copy_engine.backup_engine
        engine(host, device, host_pages, device_pages, first, end)
        return
    from_pages, to_pages = (
        torch.tensor(pages, dtype=torch.int32, device=device.device) for pages in (host_pages, device_pages)
    )
    if on_gpu(device):
        from dsv4ctl.kernels import copies_triton

        kernel = copies_triton.load_triton if load else copies_triton.backup_triton
        kernel(host, device, from_pages, to_pages, first, end)
    else:
        reference = copies.load_reference if load else copies.backup_reference
        reference(host, device, from_pages, to_pages, first, end)
