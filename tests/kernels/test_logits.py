import pytest
import torch

from dsv4ctl.kernels import index_k
from dsv4ctl.kernels.logits import causal_lengths, paged_logits_reference, query_blocks
from dsv4ctl.kernels.logits_triton import Shape, paged_logits_triton
from dsv4ctl.kernels.tickets import Tickets

SMALL = Shape(block=64, steps=2, warps=4, stages=2, registers=128)
TABLE = torch.tensor([[3, 1, 0, 2], [4, 5, 6, 7]], dtype=torch.int32)
LENGTHS = torch.tensor([70, 71, 130, 1, 2, 190, 200], dtype=torch.int32)
UNTOUCHED = 7.0


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def pool(dtype: str) -> torch.Tensor:
    pages = torch.zeros(8, index_k.PAGE_BYTES[dtype], dtype=torch.uint8)
    index_k.store_slots_reference(pages, torch.arange(512), normal(512, 128))
    return pages


def empty() -> torch.Tensor:
    return torch.full((7, 256), UNTOUCHED)


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("query", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_ragged_logits_equal_the_reference_and_tails_stay_as_they_were(
    dtype: str, query: torch.dtype, prefill: bool
) -> None:
    q, weights, pages = normal(7, 64, 128).to(query), normal(7, 64), pool(dtype)
    expected, out, blocks = empty(), empty(), query_blocks([3, 4], 4)
    paged_logits_reference(q, weights, pages, TABLE, LENGTHS, blocks, expected)
    paged_logits_triton(q, weights, pages, TABLE, LENGTHS, blocks, out, prefill=prefill, shape=SMALL)
    assert torch.allclose(out, expected, rtol=1e-4, atol=1e-3)
    visible = torch.arange(256)[None] < LENGTHS[:, None]
    assert bool((out[~visible] == UNTOUCHED).all())
    assert bool((out[visible] != UNTOUCHED).all())


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_no_page_after_the_last_is_looked_up(dtype: str, block: int) -> None:
    table = torch.cat([TABLE, torch.full((2, 4), 1 << 30, dtype=torch.int32)], dim=1)  # reading such a page would crash
    q, weights, pages = normal(2, 64, 128).to(torch.bfloat16), normal(2, 64), pool(dtype)
    lengths, blocks = torch.tensor([256, 190], dtype=torch.int32), query_blocks([1, 1], 1)
    expected, out = torch.zeros(2, 256), torch.zeros(2, 256)
    paged_logits_reference(q, weights, pages, table, lengths, blocks, expected)
    shape = Shape(block=block, steps=2, warps=4, stages=2, registers=128)
    paged_logits_triton(q, weights, pages, table, lengths, blocks, out, shape=shape)
    assert torch.allclose(out, expected, rtol=1e-4, atol=1e-3)


def test_the_reference_is_the_formula() -> None:
    q, weights, pages = normal(7, 64, 128).to(torch.bfloat16), normal(7, 64), pool("bf16")
    out = empty()
    paged_logits_reference(q, weights, pages, TABLE, LENGTHS, query_blocks([3, 4], 4), out)
    keys = index_k.read_keys(pages, "bf16", TABLE[1].long(), 256).double()
    by_hand = (weights[6].double()[:, None] * (q[6].double() @ keys.T).relu()).sum(0)
    assert torch.allclose(out[6, :200].double(), by_hand[:200], rtol=1e-5, atol=1e-4)


def test_query_blocks_never_mix_sequences() -> None:
    blocks = query_blocks([5, 0, 2], 4)
    assert (blocks.first.tolist(), blocks.count.tolist()) == ([0, 4, 5], [4, 1, 2])
    assert blocks.sequence.tolist() == [0, 0, 2]
    with pytest.raises(ValueError, match="power of two"):
        query_blocks([1], 3)


def test_causal_lengths_count_whole_compressed_blocks() -> None:
    assert causal_lengths([3, 1], [9, 4], 4).tolist() == [1, 2, 2, 1]


@pytest.mark.parametrize("prefill", [False, True])
def test_a_page_of_another_generation_gives_nan_and_a_flag_for_its_sequence_alone(prefill: bool) -> None:
    q, weights, pages, blocks = (
        normal(7, 64, 128).to(torch.bfloat16),
        normal(7, 64),
        pool("bf16"),
        query_blocks([3, 4], 4),
    )
    plain, gated = empty(), empty()
    paged_logits_triton(q, weights, pages, TABLE, LENGTHS, blocks, plain, prefill=prefill, shape=SMALL)
    words = torch.full((8,), 5, dtype=torch.int64)
    words[6] = 4
    expected = torch.full((2, 4), 5, dtype=torch.int64)
    expected[0, 1] = 0
    tickets = Tickets(words, expected, torch.zeros(2, dtype=torch.int32), deadline_us=3)
    paged_logits_triton(q, weights, pages, TABLE, LENGTHS, blocks, gated, tickets, prefill=prefill, shape=SMALL)
    assert tickets.failed.tolist() == [0, 3]
    assert torch.equal(gated[:3], plain[:3])
    assert bool(gated[6, 128:200].isnan().all())
    assert not bool(gated[6, 200:].isnan().any())
    if not prefill:  # the first run of sequence 1 met no late page
        assert torch.equal(gated[6, :128], plain[6, :128])


def test_everything_landed_gives_the_bits_of_the_ungated_launch() -> None:
    q, weights, pages, blocks = (
        normal(7, 64, 128).to(torch.bfloat16),
        normal(7, 64),
        pool("fp8"),
        query_blocks([3, 4], 4),
    )
    plain, gated = empty(), empty()
    paged_logits_triton(q, weights, pages, TABLE, LENGTHS, blocks, plain, shape=SMALL)
    tickets = Tickets(
        torch.full((4,), 9, dtype=torch.int64),
        torch.full((2, 4), 9, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int32),
        deadline_us=3,
        group_pages=2,
    )
    paged_logits_triton(q, weights, pages, TABLE, LENGTHS, blocks, gated, tickets, shape=SMALL)
    assert torch.equal(gated, plain)
    assert tickets.failed.tolist() == [0, 0]
