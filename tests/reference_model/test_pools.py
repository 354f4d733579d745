import pytest
import torch

from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.pools import (
    DevicePools,
    HostPools,
    backup_pages,
    load_pages,
    page_bytes_by_space,
    valid_mask,
    zero_invalid,
)

PAGES = {"full": 3, "swa": 4, "state": 2}


def fill(pools: DevicePools) -> None:
    generator = torch.Generator().manual_seed(7)
    for pool in pools.specs:
        pools.bytes_of(pool).random_(0, 256, generator=generator)


def test_regions_name_the_bytes_of_every_page() -> None:
    pools = DevicePools(Geometry(), PAGES)
    for region in pools.regions():
        tensor = pools.bytes_of(region.pool)
        assert region.base % 64 == 0
        assert (region.layers, region.pages, region.page_bytes) == tuple(tensor.shape)
        last = tensor[region.layers - 1, region.pages - 1]
        assert region.address(region.layers - 1, region.pages - 1) == last.data_ptr()
        with pytest.raises(IndexError, match=f"pool {region.pool}: no page"):
            region.address(0, region.pages)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_pages_come_back_from_the_host_as_they_went(dtype: str) -> None:
    geometry = Geometry(index_k_dtype=dtype)
    source, host, target = DevicePools(geometry, PAGES), HostPools(geometry, PAGES), DevicePools(geometry, PAGES)
    fill(source)
    for spec in source.specs.values():
        for layer in spec.model_layers:
            moved = backup_pages(source, host, spec.name, layer, [0, 1], [1, 0])
            assert moved == 2 * spec.page_bytes
            load_pages(host, target, spec.name, layer, [1, 0], [1, 0])
        expected = source.bytes_of(spec.name)[:, [1, 0]]
        assert torch.equal(target.bytes_of(spec.name)[:, :2], expected.flip(1)[:, [1, 0]])
    assert host.bytes_of("index_k").shape[:2] == (3, len(source.specs["index_k"].model_layers))


def test_a_copy_touches_its_layer_and_pages_only() -> None:
    geometry = Geometry()
    device, host = DevicePools(geometry, PAGES), HostPools(geometry, PAGES)
    fill(device)
    backup_pages(device, host, "index_k", 2, [2], [0])
    written = host.bytes_of("index_k")
    local = device.specs["index_k"].local_layer(2)
    assert torch.equal(written[0, local], device.bytes_of("index_k")[local, 2])
    written[0, local] = 0
    assert not any(host.bytes_of(pool).any() for pool in host.specs)


def test_a_state_snapshot_is_the_whole_slot() -> None:
    pools = DevicePools(Geometry(), PAGES)
    fill(pools)
    pools.copy_state(0, 1)
    for spec in pools.specs.values():
        pages = pools.bytes_of(spec.name)
        assert torch.equal(pages[:, 0], pages[:, 1]) == (spec.space == "state")


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_invalid_rows_are_zeroed_in_every_segment(dtype: str) -> None:
    for spec in DevicePools(Geometry(index_k_dtype=dtype), PAGES).specs.values():
        rows = spec.rows // 2
        page = zero_invalid(spec, torch.full((2, spec.page_bytes), 255, dtype=torch.uint8), rows)
        mask = valid_mask(spec, rows)
        assert torch.equal(page[1] == 255, mask)
        assert int(mask.sum()) == rows * sum(part.row_bytes for part in spec.segments)


def test_page_bytes_by_space_add_up() -> None:
    geometry = Geometry()
    whole = page_bytes_by_space(geometry)
    by_layer = [page_bytes_by_space(geometry, layer) for layer in range(geometry.layers)]
    assert whole == {space: sum(layer[space] for layer in by_layer) for space in whole}
    assert whole["full"] == 3 * (16384 + 8192) + 256


def test_missing_and_unknown_spaces_are_refused() -> None:
    with pytest.raises(ValueError, match="one or more in each of full, swa, state"):
        DevicePools(Geometry(), {"full": 1, "swa": 1})
    with pytest.raises(ValueError, match="unknown space"):
        HostPools(Geometry(), {**PAGES, "disk": 1})
