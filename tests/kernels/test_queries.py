import pytest
import torch

from dsv4ctl.kernels import ops
from dsv4ctl.kernels.queries import index_queries_reference
from dsv4ctl.kernels.queries_triton import index_queries_triton


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_queries_are_rotated_and_rounded_as_in_torch(tokens: int) -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(tokens, 64, 128, generator=generator).to(torch.bfloat16)
    weights = torch.randn(tokens, 96, generator=generator).to(torch.bfloat16)[:, :64]
    angles = torch.randn(50, 32, generator=generator)
    cos_sin = torch.stack([angles.cos(), angles.sin()], dim=-1).view(50, 64)
    positions = torch.arange(7, 7 + tokens)
    expected, expected_weights = index_queries_reference(q, weights, 0.25, cos_sin, positions)
    got, got_weights = index_queries_triton(q, weights, 0.25, cos_sin, positions)
    assert got.dtype is torch.bfloat16
    assert torch.allclose(got.float(), expected.float(), rtol=2**-7, atol=1e-3)
    assert torch.equal(got_weights, expected_weights)
    assert torch.equal(ops.index_queries(q, weights, 0.25, cos_sin, positions)[0], expected)
