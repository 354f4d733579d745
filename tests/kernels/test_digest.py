import numpy as np
import pytest
import torch

from dsv4ctl.kernels import ops
from dsv4ctl.kernels.buffers import PageBuffers
from dsv4ctl.kernels.digest import digest_numpy
from dsv4ctl.kernels.digest_triton import digest_buffers_triton, digest_pages_triton
from dsv4ctl.kernels.tickets import Tickets

PAGES = torch.tensor([3, 1, 1], dtype=torch.int32)


def source(page_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (2, 5, page_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("page_bytes", [8, 256, 8448, 16384, 16392])
def test_the_kernel_gives_the_bits_of_numpy_for_listed_pages_of_each_layer(page_bytes: int) -> None:
    pages = source(page_bytes)
    digests = digest_pages_triton(pages, PAGES).numpy().view(np.uint64)
    for layer in range(2):
        assert np.array_equal(digests[layer], digest_numpy(pages[layer, PAGES.long()].numpy()))


def test_a_page_that_has_not_landed_is_not_digested_and_is_reported() -> None:
    pages = source(256)
    words = torch.tensor([0, 4, 0, 7, 0, 0, 4, 0, 6, 0], dtype=torch.int64)  # layer 1: page 3 is a generation behind
    failed = torch.zeros(3, dtype=torch.int32)
    expected = torch.tensor([7, 4, 0], dtype=torch.int64)
    tickets = Tickets(words, expected, failed, deadline_us=3)
    digests = digest_pages_triton(pages, PAGES, tickets).numpy().view(np.uint64)
    assert np.array_equal(digests[0], digest_numpy(pages[0, PAGES.long()].numpy()))
    assert np.array_equal(digests[1, 1:], digest_numpy(pages[1, PAGES[1:].long()].numpy()))
    assert digests[1, 0] == 0
    assert failed.tolist() == [1, 0, 0]


def test_pages_of_several_buffers_in_one_launch() -> None:
    layers = [torch.randint(0, 256, (6, 24), dtype=torch.uint8) for _ in range(3)]
    buffers = PageBuffers([*layers[:2], layers[2].view(torch.int8)])
    chosen = torch.tensor([5, 0, 3, 3])
    expected = np.stack([digest_numpy(layer[chosen].numpy()) for layer in layers])
    assert (digest_buffers_triton(buffers, chosen).numpy().view(np.uint64) == expected).all()
    assert (ops.digest_buffers(buffers, chosen).numpy().view(np.uint64) == expected).all()
    assert ops.digest_buffers(buffers, chosen[:0]).shape == (3, 0)


def test_buffers_of_two_page_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="one page size"):
        PageBuffers([torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 16, dtype=torch.uint8)])
