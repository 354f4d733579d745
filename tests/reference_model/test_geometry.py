import msgspec
import pytest

from dsv4ctl.engine_adapters.reference.geometry import Geometry, pool_specs


@pytest.mark.parametrize(("dtype", "page_bytes"), [("bf16", 16384), ("fp8", 8448)])
def test_an_index_k_page_has_the_bytes_deepseek_v4_has(dtype: str, page_bytes: int) -> None:
    spec = pool_specs(Geometry(index_k_dtype=dtype))["index_k"]
    assert (spec.rows, spec.page_bytes) == (64, page_bytes)


def test_every_page_is_a_multiple_of_64_bytes() -> None:
    for dtype in ("bf16", "fp8"):
        assert all(spec.page_bytes % 64 == 0 for spec in pool_specs(Geometry(index_k_dtype=dtype)).values())


def test_pools_follow_the_compress_ratios() -> None:
    specs = pool_specs(Geometry(compress_ratios=(0, 128, 4)))
    assert specs["swa_kv"].model_layers == (0, 1, 2)
    assert specs["c4_kv"].model_layers == specs["index_state"].model_layers == (2,)
    assert specs["c128_kv"].local_layer(1) == 0
    assert "c4_kv" not in pool_specs(Geometry(compress_ratios=(0, 128)))
    with pytest.raises(KeyError, match=r"c4_kv has layers \(2,\), not 1"):
        specs["c4_kv"].local_layer(1)


def test_valid_rows_of_a_tail_page_are_its_completed_rows() -> None:
    specs = pool_specs(Geometry())
    assert [specs["swa_kv"].valid_rows(page, 300) for page in (0, 1, 2)] == [256, 44, 0]
    assert [specs["c4_kv"].valid_rows(page, 303) for page in (0, 1)] == [64, 11]
    assert [specs["c128_kv"].valid_rows(page, 511) for page in (0, 1)] == [2, 1]
    assert specs["c4_state"].valid_rows(0, 3) == 3
    assert specs["c4_state"].valid_rows(1, 300) == 8
    assert specs["c128_state"].valid_rows(1, 300) == 300 % 128
    assert specs["c128_state"].valid_rows(0, 256) == 0


def test_a_geometry_survives_json() -> None:
    geometry = Geometry(compress_ratios=(0, 4), index_k_dtype="fp8")
    assert msgspec.json.decode(msgspec.json.encode(geometry), type=Geometry) == geometry


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compress_ratios": (0, 8)}, r"compress_ratios \(0, 8\): a list of 0, 4 and 128 expected"),
        ({"page_tokens": 64}, "page_tokens 64: only 256"),
        ({"rope_dim": 66}, "rope_dim 66: an even number up to kv_dim"),
        ({"context_tokens": 1000}, "context_tokens 1000: a multiple of page_tokens"),
        ({"heads": 0}, "heads 0: a number above 0"),
    ],
)
def test_an_impossible_geometry_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Geometry(**fields)
