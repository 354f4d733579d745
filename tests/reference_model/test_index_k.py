import pytest
import torch

from dsv4ctl.kernels import index_k


def keys(count: int) -> torch.Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(5))


def test_the_rotation_is_orthogonal() -> None:
    rotation = index_k.hadamard(torch.device("cpu"))
    assert torch.allclose(rotation @ rotation, torch.eye(128), atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 2**-8), ("fp8", 2**-4)])
def test_stored_keys_are_read_back_in_logical_order(dtype: str, tolerance: float) -> None:
    pages = torch.full((4, index_k.PAGE_BYTES[dtype]), 255, dtype=torch.uint8)
    stored = keys(70)
    index_k.store_keys(pages, dtype, 3, 0, stored[:64])
    index_k.store_keys(pages, dtype, 1, 0, stored[64:65])
    index_k.store_keys(pages, dtype, 1, 1, stored[65:])
    read = index_k.read_keys(pages, dtype, torch.tensor([3, 1]), 70)
    assert torch.allclose(read, stored, rtol=tolerance, atol=tolerance * 0.05)
    assert bool((pages[[0, 2]] == 255).all())


def test_fp8_scales_lie_behind_the_keys() -> None:
    pages = torch.zeros(1, 8448, dtype=torch.uint8)
    stored = keys(2)
    index_k.store_keys(pages, "fp8", 0, 5, stored)
    scales = pages[0, 8192:].view(torch.float32)
    assert torch.allclose(scales[5:7], stored.abs().amax(1) / 448)
    assert not scales[:5].any()
    assert not pages[0, : 5 * 128].any()


def test_logits_are_the_weighted_sum_of_positive_dots() -> None:
    query, weights = keys(12).view(6, 2, 128), keys(6)[:, :2]
    expected = (torch.einsum("thd,nd->thn", query, keys(9)).relu() * weights[:, :, None]).sum(1)
    assert torch.allclose(index_k.index_logits(query, weights, keys(9)), expected, atol=1e-4)
