import pytest
import torch

from dsv4ctl.kernels.topk import topk, topk_reference


@pytest.mark.parametrize("n", [1, 31, 32, 33, 100, 1000])
def test_selection_equals_the_reference_with_ties_zeros_and_masks(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    plain = torch.randn(64, n, generator=generator)
    ties = torch.randint(-2, 3, (64, n), generator=generator).to(torch.float32)
    signed_zeros = torch.where(plain < 0, -0.0, 0.0)
    masked = plain.masked_fill(torch.rand(64, n, generator=generator) < 0.7, float("-inf"))
    for logits in (plain, ties, signed_zeros, masked):
        assert torch.equal(topk(logits, 32), topk_reference(logits, 32))


def test_the_lowest_index_wins_ties() -> None:
    assert topk(torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.5]]), 3).tolist() == [[0, 1, 2]]
    assert topk(torch.tensor([[-0.0, 0.0, 0.0, -1.0]]), 2).tolist() == [[0, 1]]
