"""Every tensor of the model lies where its pools lie: with another default device, nothing strays to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dsv4ctl.engine_adapters.reference import sequence
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.oracle import Oracle
from dsv4ctl.kernels import index_k


@pytest.fixture
def nothing_cached() -> Iterator[None]:
    """What is made once and kept must be made here."""
    kept = (index_k.hadamard, sequence._window_bias, sequence._hidden_blocks)
    for made in kept:
        made.cache_clear()
    yield
    for made in kept:
        made.cache_clear()


@pytest.mark.usefixtures("nothing_cached")
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_no_tensor_is_made_on_the_default_device(dtype: str) -> None:
    geometry = Geometry(index_k_dtype=dtype)
    ids = [65 + at % 26 for at in range(300)]
    with torch.device("meta"):  # has shapes and no bytes: whatever is made there cannot be computed with
        strayed = Oracle(geometry, 1).generate(ids, 3)
    expected = Oracle(geometry, 1).generate(ids, 3)
    assert strayed.tokens == expected.tokens
    assert [page.to_builtins() for page in strayed.pages] == [page.to_builtins() for page in expected.pages]
