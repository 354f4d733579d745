# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launches of Triton kernels by their handles, of rows of numbers that say what to do, and what such a launch needs."""

from __future__ import annotations

import struct
from collections import deque

import numpy as np
import torch

_NEAR = 256  # numbers that a kernel reads where they are written: beyond, each of its programs would wait longer
_STAGED = 8192  # numbers, 64 KiB: what the driver copies aside at once
_MEMORY = 65_536  # numbers that are handed out of one piece: to ask for pinned memory takes longer than to use it


class Kernel:
    """A kernel of addresses alone, of memory that is aligned as PyTorch aligns it: compiled once for each device.

    It is launched by its handle, on a stream that need not be entered: that takes half the time of Triton's own way.
    What the device can read is enough: pinned memory of the host too.
    """

    def __init__(self, kernel, *constants, warps):
        self._kernel = kernel
        self._constants = constants
        self._warps = warps
        self._compiled = {}

    def __call__(self, grid, device, stream, *tensors):
        """On a stream of the device; None on a CPU."""
        compiled = self._compiled.get(device)
        if compiled is None:  # on a CPU always
            with torch.cuda.stream(stream):
                self._compiled[device] = self._kernel[grid](*tensors, *self._constants, num_warps=self._warps)
        else:
            addresses = [tensor.data_ptr() for tensor in tensors]
            compiled[grid](*addresses, *self._constants, stream=stream.cuda_stream)


class _Slot:
    """What the device reads until `over`, None on a CPU."""

    def __init__(self, gpu):
        self.near = torch.zeros(_NEAR, dtype=torch.int64, pin_memory=gpu)
        self.bytes = self.near.numpy().data.cast("B")
        self.kept = ()
        self.over = torch.cuda.Event() if gpu else None
        self.uses = 0


class _Begun:
    """A `buffers.Event`: one use of a slot, whose event is recorded anew by the next, once this one is over."""

    def __init__(self, slot):
        self._slot = slot
        self._use = slot.uses

    def query(self):
        return self._slot.uses != self._use or self._slot.over.query()

    def synchronize(self):
        if not self.query():
            self._slot.over.synchronize()


class Rows:
    """What launches have to do, on `own`, a stream, or on the current one. Not to be used by two threads at once.

    Few numbers are read where they are written, in pinned memory. No call waits for the device.
    """

    def __init__(self, device, own=None):
        self._device = device
        self._own = own
        self._gpu = device.type == "cuda"
        self._slots = deque[_Slot]()
        self._stream = own

    def put(self, numbers, *kept):
        """The stream to launch on, and where kernels find these numbers: they and `kept` stay until `begun` is over."""
        if self._own is None and self._gpu:
            self._stream = torch.cuda.current_stream(self._device.index)
        if self._slots and self._is_over(self._slots[0]):
            self._slots.rotate(-1)
        else:
            self._slots.append(_Slot(self._gpu))
        slot = self._slots[-1]
        slot.uses += 1
        if len(numbers) <= _NEAR:
            struct.pack_into(f"={len(numbers)}q", slot.bytes, 0, *numbers)
            slot.kept = kept
            return self._stream, slot.near
        with torch.cuda.stream(self._stream):
            copied = _on_device(numbers, self._device)
        slot.kept = (copied, *kept)
        return self._stream, copied

    def begun(self):
        """The event after which all is done that was launched since `put`, None if it is already."""
        slot = self._slots[-1]
        if slot.over is None:
            return None
        slot.over.record(self._stream)
        return _Begun(slot)

    @staticmethod
    def _is_over(slot):
        return slot.over is None or slot.over.query()


class Memory:
    """Numbers on the host, pinned for a GPU."""

    def __init__(self, gpu):
        self._gpu = gpu
        self._piece, self._address, self._used = np.empty(0, dtype=np.uint64), 0, 0

    def take(self, size):
        """Memory for so many, uint64, each 0 so far, and its address."""
        if self._used + size > len(self._piece):
            piece = torch.empty(max(size, _MEMORY), dtype=torch.int64, pin_memory=self._gpu)
            # A slice of this takes a tenth of the time of one of that, and keeps it alive.
            self._piece, self._address, self._used = piece.numpy().view(np.uint64), piece.data_ptr(), 0
        begin, self._used = self._used, self._used + size
        taken = self._piece[begin : self._used]
        taken.fill(0)
        return taken, self._address + 8 * begin


def _on_device(numbers, device):
    """CUDA has read or staged pageable memory when the call returns, so it may go. But for more it may wait for the
    stream: pinned memory is kept by its allocator until it was read."""
    pinned = device.type == "cuda" and len(numbers) > _STAGED
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=True)
