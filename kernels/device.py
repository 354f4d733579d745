"""What a launch asks of the device it runs on."""

from __future__ import annotations

import functools

import torch


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a kernel on this tensor runs compiled, with a clock; on a CPU Triton's interpreter runs it."""
    return tensor.device.type == "cuda"


@functools.lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 4 for a CPU, where Triton's interpreter runs program after program."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4
