"""What a launch by its handle needs. The device runs what it has when it is waited for, and not before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from dsv4ctl.kernels import launch_triton
from dsv4ctl.kernels.buffers import Firsts, PageBuffers, SpaceBuffers, Table
from dsv4ctl.kernels.digest import digest_numpy
from dsv4ctl.kernels.digest_rows_triton import PartsTriton, SealTriton
from dsv4ctl.kernels.launch_triton import Kernel, Rows
from dsv4ctl.kernels.moves_triton import ReaderTriton

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "numbers", "pinned"), [("cuda", 8192, False), ("cuda", 8193, True), ("cpu", 9000, False)]
)
def test_more_numbers_than_the_driver_stages_are_copied_from_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, device: str, numbers: int, pinned: bool
) -> None:
    made = mock.Mock()
    monkeypatch.setattr(torch, "tensor", made)
    launch_triton._on_device(range(numbers), torch.device(device))
    made.assert_called_once_with(range(numbers), dtype=torch.int64, pin_memory=pinned)
    made.return_value.to.assert_called_once_with(torch.device(device), non_blocking=True)


def test_a_kernel_is_compiled_once_for_each_device_and_launched_by_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **more: said.append((grid, *arguments, more))

    class Source:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def compile_and_start(*arguments: Any, **more: Any) -> Compiled:
                said.append(("compiled", grid, *arguments, more))
                return Compiled()

            return compile_and_start

    def entered(stream: Any) -> Any:
        said.append(("entered", stream))
        return nullcontext()

    def at(address: int) -> Any:
        return SimpleNamespace(data_ptr=lambda: address)

    monkeypatch.setattr(torch.cuda, "stream", entered)
    kernel = Kernel(Source(), 4096, True, warps=16)
    mine = SimpleNamespace(cuda_stream="mine")
    first, second, third = at(1), at(2), at(3)
    kernel((1, 2, 3), "a", mine, first, second)
    kernel((4, 5, 6), "a", mine, first, second)
    kernel((7, 1, 1), "b", None, third)
    assert said == [
        ("entered", mine),
        ("compiled", (1, 2, 3), first, second, 4096, True, {"num_warps": 16}),
        ((4, 5, 6), 1, 2, 4096, True, {"stream": "mine"}),
        ("entered", None),
        ("compiled", (7, 1, 1), third, 4096, True, {"num_warps": 16}),
    ]


def test_without_a_stream_of_its_own_a_launch_is_on_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = iter(["first", "second"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: next(streams))
    here, there = Rows(CPU), Rows(CPU, mock.sentinel.own)
    here._gpu = there._gpu = True
    for current in ("first", "second"):
        here.put([1])
        there.put([1])
        assert here.stream == current
        assert there.stream is mock.sentinel.own


class Device:
    """In place of a stream, and of the events of slots."""

    def __init__(self, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[Callable[[], Any]] = []  #: what it has before the next record
        self.waited: list[Event] = []
        self.start = Kernel.__call__
        self.slots = list(rows._slots)
        rows._own = rows.stream = self
        for slot in self.slots:
            slot.there = Event(self, slot)
        self.entered = False
        copied = launch_triton._on_device

        @contextmanager
        def enter(stream: Device | None) -> Iterator[None]:
            self.entered = stream is self
            yield
            self.entered = False

        def on_device(numbers: list[int], device: torch.device) -> torch.Tensor:
            assert self.entered
            return copied(numbers, device)

        def begin(kernel: Kernel, grid: Any, device: torch.device, stream: Device, *tensors: torch.Tensor) -> None:
            assert stream is self
            self.begin(kernel, grid, device, *tensors)

        monkeypatch.setattr(torch.cuda, "stream", enter)
        monkeypatch.setattr(launch_triton, "_on_device", on_device)
        monkeypatch.setattr(Kernel, "__call__", begin)

    def begin(self, kernel: Kernel, grid: Any, device: torch.device, *tensors: torch.Tensor) -> None:
        *others, rows = tensors
        kept, where = weakref.ref(rows if rows._base is None else rows._base), rows.storage_offset()

        def run() -> None:
            rows = kept()
            assert rows is not None
            self.start(kernel, grid, device, None, *others, rows[where:])

        self.begun.append(run)


class Event:
    def __init__(self, device: Device, slot: Any) -> None:
        self.device, self.slot = device, slot
        self.late: list[Callable[[], Any]] = []  #: what the device has before it
        self.kept: list[Any] = []

    def record(self, stream: Device) -> None:
        assert stream is self.device
        self.late, stream.begun = self.late + stream.begun, []
        self.kept = [weakref.ref(one) for one in _memory_of(self.slot.kept)]

    def query(self) -> bool:
        return not self.late

    def synchronize(self) -> None:
        self.device.waited.append(self)
        assert all(one() is not None for one in self.kept)  # wanted or not
        while self.late:
            self.late.pop(0)()


def _memory_of(kept: Any) -> Iterator[Any]:
    if isinstance(kept, np.ndarray | torch.Tensor):
        yield kept
    elif isinstance(kept, Table):
        yield kept.numbers
    elif isinstance(kept, tuple | list):
        for one in kept:
            yield from _memory_of(one)


def four_pages() -> SpaceBuffers:
    return SpaceBuffers([[PageBuffers([torch.arange(4 * 8, dtype=torch.uint8).view(4, 8)])]])


def digests() -> list[int]:
    return [int(one) for one in digest_numpy(four_pages().pools[0][0].layers[0].numpy())]


@pytest.mark.parametrize("pages", [1, 16 * 11, 16 * 11 + 1])  # of those with more than 256 numbers, these are copied
def test_what_a_launch_reads_and_writes_stays_until_it_is_over(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    digest_parts = PartsTriton(four_pages(), None)
    digest_parts([(0, [1])])  # has its piece of memory
    device = Device(digest_parts._rows, monkeypatch)
    parts = [[(0, [at % 4] * pages)] for at in range(2 * len(device.slots))]
    found = [digest_parts(part) for part in parts[: len(device.slots)]]
    assert not device.waited
    found += [digest_parts(part) for part in parts[len(device.slots) :]]
    assert device.waited == [slot.there for slot in device.slots]
    assert [event for _, event in found] == [slot.there for slot in device.slots] * 2
    for slot in device.slots:
        slot.there.synchronize()
    expected = digests()
    assert [one.tolist() for one, _ in found] == [[expected[page] for page in part] for [(_, part)] in parts]
    for _ in range(2 * len(device.slots)):
        digest_parts([(0, [1] * pages)])  # nobody keeps them


@pytest.mark.parametrize("pages", [1, 25, 26])
@pytest.mark.parametrize("what", ["pages", "tokens"])
def test_what_is_read_stays_until_it_was(pages: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ReaderTriton(CPU)
    device = Device(reader._rows, monkeypatch)

    def read(at: int) -> Any:
        numbers, chosen = torch.arange(at, at + 4), [at % 4] * pages
        if what == "tokens":
            return reader.tokens([Firsts(numbers, chosen)])
        return reader.pages([(Table(numbers), Firsts(torch.tensor(chosen), range(pages)), 1)])

    found = [read(at) for at in range(2 * len(device.slots))]
    assert device.waited == [slot.there for slot in device.slots]
    for slot in device.slots:
        slot.there.synchronize()
    assert [one.tolist() for one, _ in found] == [[at + at % 4] * pages for at in range(len(found))]
    for at in range(2 * len(device.slots)):
        read(at)  # nobody keeps it


@pytest.mark.parametrize("pages", [1, 14, 30])
def test_tokens_of_a_seal_stay_until_they_were_read(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seal = SealTriton(four_pages())
    device = Device(seal._rows, monkeypatch)
    made, expected = [], np.array(digests(), dtype=np.uint64).view(np.int64).tolist()
    for at in range(2 * len(device.slots)):
        sealed, kept = torch.full((1, 4), -at), torch.zeros(1, pages, dtype=torch.int64)
        tokens = [torch.tensor([at % 4] * pages) for _ in range(2)]
        table, firsts = Table(sealed), [Firsts(one, range(pages)) for one in tokens]
        seal([(table, firsts[0], Table(kept), range(pages), 1)], [(0, firsts[1], 1, table)])
        made.append((sealed, kept, [weakref.ref(one) for one in tokens]))
        del tokens, firsts
    assert device.waited == [slot.there for slot in device.slots]
    for slot in device.slots:
        slot.there.synchronize()
    for at, (sealed, kept, tokens) in enumerate(made):
        assert kept.tolist() == [[-at] * pages]
        assert sealed.tolist() == [[expected[page] if page == at % 4 else -at for page in range(4)]]
        assert all(one() is not None for one in tokens) == (at >= len(device.slots))
