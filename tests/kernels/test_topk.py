import pytest
import torch

from dsv4ctl.kernels.topk import topk, topk_slots_reference
from dsv4ctl.kernels.topk_triton import topk_slots_triton, topk_triton

N = 10_000
TABLE = torch.randperm(400, generator=torch.Generator().manual_seed(1)).to(torch.int32).view(2, 200)


def rows() -> dict[str, torch.Tensor]:
    """Rows that take each path: few logits, a good sample, ties, a sample that misleads, NaN, infinities."""
    generator = torch.Generator().manual_seed(4)
    normal = torch.randn(N, generator=generator)
    spikes = torch.zeros(N)
    spikes[1::3] = 1.0  # the sample's stride misses some, and a third of the row ties
    lucky = normal.clamp(max=0.0)
    lucky[(torch.arange(400) * 5 * N) // 2048] = 7.0  # only logits that are sampled reach what the sample suggests
    few = torch.full((N,), float("nan"))
    few[::97] = normal[::97]
    return {
        "normal": normal,
        "all equal": torch.full((N,), 2.5),
        "ties": torch.randint(-2, 3, (N,), generator=generator).float(),
        "signed zeros": torch.where(normal < 0, -0.0, 0.0),
        "some ties": normal.mul(64).round() / 64,
        "spikes": spikes,
        "a lucky sample": lucky,
        "fewer than k": few,
        "infinities": torch.where(normal > 1, float("inf"), torch.where(normal < 0, float("-inf"), normal)),
        "ascending": torch.arange(N).float(),
        "clustered": torch.cat([normal[:-600], normal[-600:] + 50]),
        "NaN among them": torch.where(normal > 1.5, float("nan"), normal),
    }


@pytest.mark.parametrize("k", [1, 512])
def test_the_slots_are_torchs_on_every_kind_of_row(k: int) -> None:
    logits = torch.stack(list(rows().values()))
    count = logits.shape[0]
    lengths = torch.full((count,), N, dtype=torch.int32)
    sequence = (torch.arange(count) % 2).to(torch.int32)
    expected = topk_slots_reference(logits, lengths, k, TABLE, sequence, 64)
    assert torch.equal(topk_slots_triton(logits, lengths, k, TABLE, sequence, 64), expected)


@pytest.mark.parametrize("k", [1024, 2048])
def test_larger_k(k: int) -> None:
    logits = torch.stack([rows()["normal"], rows()["ties"]])
    lengths = torch.tensor([N, 9000], dtype=torch.int32)
    sequence = torch.tensor([1, 0], dtype=torch.int32)
    expected = topk_slots_reference(logits, lengths, k, TABLE, sequence, 64)
    assert torch.equal(topk_slots_triton(logits, lengths, k, TABLE, sequence, 64), expected)


def test_ragged_rows_are_cut_at_their_length_and_padded_with_minus_one() -> None:
    logits = rows()["normal"].expand(4, N).contiguous()
    lengths = torch.tensor([0, 5, 600, 4097], dtype=torch.int32)
    sequence = torch.zeros(4, dtype=torch.int32)
    expected = topk_slots_reference(logits, lengths, 512, TABLE, sequence, 64)
    out = topk_slots_triton(logits, lengths, 512, TABLE, sequence, 64)
    assert torch.equal(out, expected)
    assert out[1, 5:].eq(-1).all()


def test_rows_listed_by_several_programs_each() -> None:
    columns = 40_000
    generator = torch.Generator().manual_seed(5)
    normal, sparse = torch.randn(columns, generator=generator), torch.full((columns,), -9.0)
    sparse[-3000:] = normal[-3000:]  # all candidates are in the last program's part
    logits = torch.stack([normal, sparse])
    table = torch.randperm(625, generator=generator).to(torch.int32)[None]
    lengths = torch.tensor([columns - 7, columns], dtype=torch.int32)
    sequence = torch.zeros(2, dtype=torch.int32)
    expected = topk_slots_reference(logits, lengths, 512, table, sequence, 64)
    assert torch.equal(topk_slots_triton(logits, lengths, 512, table, sequence, 64), expected)


def test_the_reference_never_selects_nan_and_breaks_ties_low() -> None:
    nan = float("nan")
    logits = torch.tensor([[1.0, nan, 2.0, 1.0, 1.0]])
    lengths, sequence = torch.tensor([5]), torch.tensor([0])
    table = torch.tensor([[9]], dtype=torch.int32)
    assert topk_slots_reference(logits, lengths, 3, table, sequence, 64).tolist() == [[576, 578, 579]]
    assert topk_slots_reference(logits, lengths, 5, table, sequence, 64).tolist() == [[576, 578, 579, 580, -1]]


def test_plain_indices_equal_the_cpus() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(9))
    assert torch.equal(topk_triton(logits, 32), topk(logits, 32))


def test_k_is_bounded() -> None:
    with pytest.raises(ValueError, match=r"k 4096: 1\.\.2048"):
        topk_slots_triton(torch.zeros(1, 8), torch.tensor([8]), 4096, TABLE, torch.tensor([0]), 64)
