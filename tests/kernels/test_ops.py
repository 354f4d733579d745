import subprocess
import sys

import numpy as np
import torch

from dsv4ctl.kernels import digest, index_k, ops, topk


def test_the_cpu_takes_the_references_bits() -> None:
    values = torch.randn(2, 100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ops.topk_indices(values, 8), topk.topk_reference(values, 8))
    pages = torch.randint(0, 256, (3, 256), dtype=torch.uint8)
    assert np.array_equal(ops.digest_pages(pages), digest.digest_torch(pages))
    stored, expected = (torch.zeros(2, 16384, dtype=torch.uint8) for _ in range(2))
    slots, keys = torch.tensor([3, 70]), torch.randn(2, 128)
    ops.store_slots(stored, slots, keys)
    index_k.store_slots_reference(expected, slots, keys)
    assert torch.equal(stored, expected)


def test_copies_on_the_cpu() -> None:
    host = torch.randint(0, 256, (2, 3, 16), dtype=torch.uint8)
    device = torch.zeros(3, 4, 16, dtype=torch.uint8)
    ops.load_pages(host, device, [1], [2], 0, 3)
    assert torch.equal(device[:, 2], host[1])
    ops.backup_pages(host, device, [0], [2], 0, 3)
    assert torch.equal(host[0], host[1])


def test_the_cpu_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import dsv4ctl.kernels.ops"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
