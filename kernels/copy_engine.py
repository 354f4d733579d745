"""What the CUDA driver does without a multiprocessor: copies of listed pages, and words written in stream order.

One layer is a batch of copies, a page each; several layers are one strided copy a page, since a host page holds its
layers side by side. ctypes on libcuda; a batch needs a driver of CUDA 12.8 or newer, and a stream that is not the
legacy default.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from dsv4ctl.kernels.copies import check_pools

_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the address says where it is
_MOST_PITCH = (1 << 31) - 1


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class _Strided(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_type", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target_device", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class DriverError(RuntimeError):
    """A call into the CUDA driver that did not return CUDA_SUCCESS."""


@functools.lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _called(name: str, *arguments: object) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code != 0:
        raise DriverError(f"{name} returned {code}")


def write_words(words: torch.Tensor, groups: Sequence[int], generations: Sequence[int]) -> None:
    """Set words int64 [n] in the order of the current stream, behind all earlier work in it (cuStreamWriteValue64)."""
    stream = ctypes.c_void_p(torch.cuda.current_stream(words.device).cuda_stream)
    for group, generation in zip(groups, generations, strict=True):
        address = ctypes.c_uint64(words.data_ptr() + 8 * group)
        _called("cuStreamWriteValue64_v2", stream, address, ctypes.c_uint64(generation), ctypes.c_uint(0))


def _copy_batch(targets: npt.NDArray[np.uint64], sources: npt.NDArray[np.uint64], size: int) -> None:
    """Copies of `size` bytes between addresses, pairwise."""
    count = targets.shape[0]
    if count == 0:
        return
    sizes = np.full(count, size, dtype=np.uint64)
    attributes = _Attributes(order=_STREAM_ORDER)
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    _called(
        "cuMemcpyBatchAsync", *(ctypes.c_void_p(values.ctypes.data) for values in (targets, sources, sizes)),
        ctypes.c_size_t(count), ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1),
        ctypes.byref(failed), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )  # fmt: skip


def _copy_strided(
    targets: npt.NDArray[np.uint64],
    sources: npt.NDArray[np.uint64],
    size: int,
    target_pitch: int,
    source_pitch: int,
    layers: int,
) -> None:
    """Copies of `layers` pieces of `size` bytes, each pitch apart, from and to the addresses of the first pieces."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    copy = _Strided(
        source_type=_UNIFIED, source_pitch=source_pitch, target_type=_UNIFIED, target_pitch=target_pitch, width=size,
        height=layers,
    )  # fmt: skip
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        copy.source_device, copy.target_device = source, target
        _called("cuMemcpy2DAsync_v2", ctypes.byref(copy), stream)


def _copy(
    host: torch.Tensor,
    device: torch.Tensor,
    host_pages: Sequence[int],
    device_pages: Sequence[int],
    layers: tuple[int, int],
    load: bool,
) -> None:
    first, end = layers
    check_pools(host, device, torch.empty(len(host_pages)), torch.empty(len(device_pages)), first, end)
    on_host = np.asarray(host_pages, dtype=np.uint64) * np.uint64(host.stride(0)) + np.uint64(host.data_ptr())
    on_device = np.asarray(device_pages, dtype=np.uint64) * np.uint64(device.stride(1)) + np.uint64(device.data_ptr())
    size, pitches = host.shape[2], (host.stride(1), device.stride(0))
    if end - first > 1 and max(pitches) <= _MOST_PITCH:
        on_host, on_device = on_host + np.uint64(first * pitches[0]), on_device + np.uint64(first * pitches[1])
        if load:
            _copy_strided(on_device, on_host, size, pitches[1], pitches[0], end - first)
        else:
            _copy_strided(on_host, on_device, size, pitches[0], pitches[1], end - first)
        return
    for layer in range(first, end):
        mirror, pages = on_host + np.uint64(layer * pitches[0]), on_device + np.uint64(layer * pitches[1])
        _copy_batch(*((pages, mirror) if load else (mirror, pages)), size)


def load_engine(
    host: torch.Tensor,
    device: torch.Tensor,
    host_pages: Sequence[int],
    device_pages: Sequence[int],
    first: int,
    end: int,
) -> None:
    """As `copies.load_reference`, on the current stream, by copy engines; page lists on the host."""
    _copy(host, device, host_pages, device_pages, (first, end), load=True)


def backup_engine(
    host: torch.Tensor,
    device: torch.Tensor,
    host_pages: Sequence[int],
    device_pages: Sequence[int],
    first: int,
    end: int,
) -> None:
    """As `copies.backup_reference`, on the current stream, by copy engines; page lists on the host."""
    _copy(host, device, host_pages, device_pages, (first, end), load=False)
