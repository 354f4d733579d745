import pytest
import torch

from dsv4ctl.kernels.copies import backup_reference, choose_variant, load_reference
from dsv4ctl.kernels.copies_triton import backup_triton, load_triton

HOST_PAGES = torch.tensor([5, 0, 3], dtype=torch.int32)
DEVICE_PAGES = torch.tensor([1, 6, 2], dtype=torch.int32)


def pools(page_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Host [6, 3, page_bytes], device [3, 7, page_bytes]."""
    generator = torch.Generator().manual_seed(page_bytes)
    host = torch.randint(0, 256, (6, 3, page_bytes), dtype=torch.uint8, generator=generator)
    device = torch.randint(0, 256, (3, 7, page_bytes), dtype=torch.uint8, generator=generator)
    return host, device


@pytest.mark.parametrize("page_bytes", [16, 8448, 16384, 20000])
@pytest.mark.parametrize(("first", "end"), [(1, 2), (0, 3)])
def test_only_the_listed_pages_and_layers_change(page_bytes: int, first: int, end: int) -> None:
    for reference, kernel in ((load_reference, load_triton), (backup_reference, backup_triton)):
        expected, moved = pools(page_bytes), pools(page_bytes)
        reference(*expected, HOST_PAGES, DEVICE_PAGES, first, end)
        kernel(*moved, HOST_PAGES, DEVICE_PAGES, first, end)
        assert torch.equal(moved[0], expected[0])
        assert torch.equal(moved[1], expected[1])
        assert not torch.equal(moved[0], pools(page_bytes)[0]) or not torch.equal(moved[1], pools(page_bytes)[1])


def test_a_load_releases_the_words_of_its_pages_and_layers_alone() -> None:
    host, device = pools(256)
    words = torch.zeros(3, 7, dtype=torch.int64)
    generations = torch.tensor([11, 12, 13], dtype=torch.int64)
    load_triton(host, device, HOST_PAGES, DEVICE_PAGES, 1, 3, release=(words, DEVICE_PAGES, generations))
    expected = torch.zeros(3, 7, dtype=torch.int64)
    expected[1:, DEVICE_PAGES.long()] = generations
    assert torch.equal(words, expected)


def test_pools_that_do_not_fit_are_refused() -> None:
    host, device = pools(256)
    with pytest.raises(ValueError, match=r"layers 2\.\.3"):
        load_triton(host, device, HOST_PAGES, DEVICE_PAGES, 2, 4)
    with pytest.raises(ValueError, match="3 host pages for 2"):
        load_triton(host, device, HOST_PAGES, DEVICE_PAGES[:2], 0, 1)
    with pytest.raises(ValueError, match="device pool"):
        load_triton(host, device[:2], HOST_PAGES, DEVICE_PAGES, 0, 1)


def test_a_busy_gpu_is_loaded_by_its_copy_engine() -> None:
    assert choose_variant(16384, sms_are_free=False) == "engine"
