"""Launches whose programs are all on the GPU at once.

A grid that waits for a loader must not queue: programs that are not resident yet fill every multiprocessor as soon as
one ends, the reserved ones too, and a loader kernel never gets its turn. How many fit is asked of the driver, once for
each compiled variant.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from dsv4ctl.kernels.device import multiprocessors

_INTERPRETED = 4
_resident: dict[tuple[object, ...], int] = {}


def resident_grid(kernel: Any, device: torch.device, reserved_sms: int, *arguments: Any, **options: Any) -> None:
    """Launch `kernel` with as many programs as are resident on all but `reserved_sms` multiprocessors."""
    free = max(1, multiprocessors(device) - reserved_sms)
    if device.type != "cuda":
        options.pop("maxnreg", None)
        kernel[(_INTERPRETED,)](*arguments, **options)
        return
    key = (kernel, device, *(getattr(one, "dtype", type(one)) for one in arguments), *options.items())
    if key not in _resident:
        _resident[key] = _programs(kernel.warmup(*arguments, grid=(1,), **options), options["num_warps"] * 32)
    kernel[(free * _resident[key],)](*arguments, **options)


def _programs(compiled: Any, threads: int) -> int:
    """Programs of a compiled kernel that fit one multiprocessor."""
    compiled._init_handles()
    number = ctypes.c_int()
    code = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(number),
        ctypes.c_void_p(compiled.function),
        ctypes.c_int(threads),
        ctypes.c_size_t(compiled.metadata.shared),
    )
    if code != 0 or number.value < 1:
        raise RuntimeError(f"no occupancy for a kernel of {threads} threads: CUDA error {code}, {number.value}")
    return number.value


@functools.lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
