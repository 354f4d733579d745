import pytest
import torch

from dsv4ctl.kernels import index_k
from dsv4ctl.kernels.index_k_triton import norm_rope_hadamard_store_triton, store_slots_triton

SLOTS = torch.tensor([5, 6, 7, 64, -1, 130, *range(20, 34)], dtype=torch.int32)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def filled(dtype: str) -> torch.Tensor:
    return torch.full((3, index_k.PAGE_BYTES[dtype]), 255, dtype=torch.uint8)


def stored(pages: torch.Tensor) -> torch.Tensor:
    """The keys at SLOTS, fp32."""
    keys = index_k.read_keys(pages, index_k.layout_of(pages.shape[1]), torch.arange(3), 192)
    return keys[SLOTS[SLOTS >= 0].long()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bf16_store_has_the_bits_of_torch_and_touches_nothing_else(dtype: torch.dtype) -> None:
    expected, pages = filled("bf16"), filled("bf16")
    keys = normal(20, 128).to(dtype)
    keys[0, :2] = torch.tensor([float("inf"), -0.0])
    index_k.store_slots_reference(expected, SLOTS, keys)
    store_slots_triton(pages, SLOTS, keys)
    assert torch.equal(pages, expected)


def test_an_fp8_store_has_the_bits_of_torch() -> None:
    expected, pages = filled("fp8"), filled("fp8")
    keys = normal(20, 128) * normal(20, 128).pow(3)
    keys[0] = 0.0
    keys[1, ::2] = -1e-30
    index_k.store_slots_reference(expected, SLOTS, keys)
    store_slots_triton(pages, SLOTS, keys)
    assert torch.equal(pages, expected)


@pytest.mark.parametrize(("dtype", "step"), [("bf16", 2**-8), ("fp8", 2**-3)])
def test_the_fused_store_norms_rotates_and_stores_as_the_reference(dtype: str, step: float) -> None:
    expected, pages = filled(dtype), filled(dtype)
    rows, norm, positions = normal(20, 128), normal(128) + 1, torch.arange(0, 40, 2, dtype=torch.int32)
    angles = normal(64, 32)
    cos_sin = torch.stack([angles.cos(), angles.sin()], dim=-1).view(64, 64)
    keys = index_k.norm_rope_hadamard(rows, norm, cos_sin, positions, 1e-6)
    index_k.store_slots_reference(expected, SLOTS, keys)
    norm_rope_hadamard_store_triton(pages, SLOTS, rows, norm, cos_sin, positions, 1e-6)
    assert torch.allclose(stored(pages), stored(expected), rtol=step, atol=1e-3)


def test_rope_turns_pairs_of_the_last_64_dims_and_keeps_their_length() -> None:
    rows, ones = normal(3, 128), torch.ones(128)
    quarter = torch.tensor([0.0, 1.0]).repeat(32)[None]
    straight = index_k.norm_rope_hadamard(rows, ones, torch.tensor([1.0, 0.0]).repeat(32)[None], torch.zeros(3), 0.0)
    turned = index_k.norm_rope_hadamard(rows, ones, quarter, torch.zeros(3), 0.0)
    before, after = straight @ index_k.hadamard(straight.device), turned @ index_k.hadamard(turned.device)
    assert torch.allclose(after[:, :64], before[:, :64], atol=1e-5)
    assert torch.allclose(after[:, 64::2], -before[:, 65::2], atol=1e-5)
    assert torch.allclose(after[:, 65::2], before[:, 64::2], atol=1e-5)
