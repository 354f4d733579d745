"""Sizing against the figures of the incident, and against the page sizes measured there."""

from __future__ import annotations

import pytest

from dsv4ctl.policies.sizing import (
    ModelShape,
    bytes_per_full_token,
    index_key_bytes,
    kv_entry_bytes,
    shape_of,
)

FLASH = {0: 2, 4: 21, 128: 20}


def flash(**changes: object) -> ModelShape:
    return ModelShape(layers=FLASH, **changes)


@pytest.mark.parametrize(
    ("index_k_dtype", "accounting", "total"),
    [
        ("fp8", "per-token", 15_897.45),
        ("bf16", "per-token", 16_548.45),
        ("fp8", "per-request", 7_705.45),
        ("bf16", "per-request", 8_356.45),
    ],
)
def test_the_incident_s_totals_exactly(index_k_dtype: str, accounting: str, total: float) -> None:
    sizing = bytes_per_full_token(flash(index_k_dtype=index_k_dtype), c128_state=accounting)
    assert sizing.total == total


def test_the_incident_s_figures_by_pool() -> None:
    assert bytes_per_full_token(flash()).by_pool == {
        "swa_kv": 2511.2,
        "c4_kv": 3066.0,
        "c128_kv": 91.25,
        "index_k": 693.0,
        "c4_state": 1075.2,
        "index_state": 268.8,
        "c128_state": 8192.0,
    }


def test_per_request_accounting_moves_the_c128_ring_to_the_request() -> None:
    sizing = bytes_per_full_token(flash(), c128_state="per-request")
    assert "c128_state" not in sizing.by_pool
    assert sizing.per_request == {"c128_state": 128 * 4096 * 20}


@pytest.mark.parametrize(("dtype", "page_bytes"), [("fp8", 8_448), ("bf16", 16_384)])
def test_a_page_of_64_index_keys(dtype: str, page_bytes: int) -> None:
    assert 64 * index_key_bytes(flash(index_k_dtype=dtype)) == page_bytes


@pytest.mark.parametrize(("dtype", "entry_bytes"), [("fp8", 584), ("bf16", 1024)])
def test_kv_entry(dtype: str, entry_bytes: int) -> None:
    assert kv_entry_bytes(flash(kv_dtype=dtype)) == entry_bytes


def test_states_follow_their_dtype() -> None:
    full, half = (bytes_per_full_token(flash(state_dtype=dtype)).by_pool for dtype in ("fp32", "bf16"))
    for pool in ("c4_state", "index_state", "c128_state"):
        assert full[pool] == 2 * half[pool]


def test_shape_from_a_model_config_leaves_the_draft_layer_out() -> None:
    config = {
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 4],
        "num_hidden_layers": 43,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "sliding_window": 128,
    }
    assert shape_of(config, index_k_dtype="bf16") == flash(index_k_dtype="bf16")


def test_config_without_ratios_is_refused() -> None:
    with pytest.raises(ValueError, match="without compress_ratios"):
        shape_of({"num_hidden_layers": 2, "head_dim": 512})


def test_unknown_ratio_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[8\]: 0, 4 and 128 expected"):
        ModelShape(layers={8: 1})
