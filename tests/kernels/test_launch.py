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
from dsv4ctl.kernels.digest_rows_triton import SealerTriton
from dsv4ctl.kernels.launch_triton import Kernel, Rows
from dsv4ctl.kernels.moves_triton import ReaderTriton

CPU = torch.device("cpu")
START, ON_DEVICE = Kernel.__call__, launch_triton._on_device
Slot = launch_triton._Slot


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
    monkeypatch.setattr(launch_triton, "_Slot", mock.Mock(side_effect=lambda gpu: Slot(False)))
    for current in ("first", "second"):
        assert here.put([1])[0] == current
        assert there.put([1])[0] is mock.sentinel.own


class Device:
    """In place of a stream, and of the events of slots."""

    def __init__(self, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[Callable[[], Any]] = []  #: what it has before the next record
        self.events: list[Event] = []
        self.start = START
        rows._own = rows._stream = self
        rows._slots.clear()
        self.entered = False
        copied = ON_DEVICE

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
            assert tensors[-1].storage_offset() % 2 == 0, "kernels are compiled for addresses of 16 B times n"
            self.begin(kernel, grid, device, *tensors)

        def slot(gpu: bool) -> Any:
            made = Slot(gpu)
            made.over = Event(self, made)
            self.events.append(made.over)
            return made

        monkeypatch.setattr(torch.cuda, "stream", enter)
        monkeypatch.setattr(launch_triton, "_on_device", on_device)
        monkeypatch.setattr(launch_triton, "_Slot", slot)
        monkeypatch.setattr(Kernel, "__call__", begin)

    def begin(self, kernel: Kernel, grid: Any, device: torch.device, *tensors: torch.Tensor) -> None:
        *others, rows = tensors
        kept, where = weakref.ref(rows if rows._base is None else rows._base), rows.storage_offset()

        def run() -> None:
            rows = kept()
            assert rows is not None
            self.start(kernel, grid, device, None, *others, rows[where:])

        self.begun.append(run)

    def run(self, calls: int | None = None) -> None:
        """So many calls to their end, oldest first."""
        for event in self.events[:calls]:
            event.synchronize()


class Event:
    def __init__(self, device: Device, slot: Any) -> None:
        self.device, self.slot = device, slot
        self.late: list[Callable[[], Any]] = []  #: what the device has before it
        self.kept: list[Any] = []

    def record(self, stream: Device) -> None:
        assert stream is self.device
        assert not self.late, "it was over"
        self.late, stream.begun = stream.begun, []
        self.kept = [weakref.ref(one) for one in _memory_of(self.slot.kept)]

    def query(self) -> bool:
        return not self.late

    def synchronize(self) -> None:
        assert self.kept
        assert all(one() is not None for one in self.kept)  # wanted or not
        while self.late:
            self.late.pop(0)()


def _memory_of(kept: Any) -> Iterator[Any]:
    if isinstance(kept, np.ndarray):
        yield kept if kept.base is None else kept.base
    elif isinstance(kept, torch.Tensor):
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


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few numbers are read where they are written; each call has memory of its own, which nobody else keeps."""
    monkeypatch.setattr(launch_triton, "_NEAR", 24)
    monkeypatch.setattr(launch_triton, "_MEMORY", 1)


def in_turn(device: Device, call: Callable[[int], Any]) -> list[Any]:
    """What 16 calls answer: half of them under way at once, then one beside the seven before."""
    answers = [call(at) for at in range(8)]
    assert len(device.events) == 8
    for at in range(8):
        device.events[at].synchronize()
        answers.append(call(8 + at))
    assert len(device.events) == 8, "slots are used again"
    device.run()
    return answers


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("pages", [1, 12, 18])  # of these the numbers are copied
def test_what_a_launch_reads_and_writes_stays_until_it_is_over(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sealer = SealerTriton(four_pages())
    device = Device(sealer._now, monkeypatch)
    found = in_turn(device, lambda at: sealer.digests([(0, [at % 4] * pages, 1)])[0])
    assert [one.tolist() for one in found] == [[digests()[at % 4]] * pages for at in range(16)]
    in_turn(device, lambda at: sealer.digests([(0, [1] * pages, 1)]) and None)  # nobody keeps them


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("pages", [1, 13, 14])
@pytest.mark.parametrize("what", ["pages", "tokens"])
def test_what_is_read_stays_until_it_was(pages: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, sealer = ReaderTriton(CPU), SealerTriton(four_pages())
    device = Device(reader._rows if what == "tokens" else sealer._rows, monkeypatch)

    def read(at: int) -> Any:
        numbers, chosen = torch.arange(at, at + 4), [at % 4] * pages
        if what == "tokens":
            return reader.tokens([Firsts(numbers, chosen)])[0]
        return sealer.move((), [(Table(numbers), Firsts(torch.tensor(chosen), range(pages)), 1)])[0]

    assert [one.tolist() for one in in_turn(device, read)] == [[at + at % 4] * pages for at in range(16)]
    in_turn(device, lambda at: read(at) is None)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("pages", [1, 2, 5])
def test_tokens_of_a_seal_stay_until_they_were_read(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sealer = SealerTriton(four_pages())
    device = Device(sealer._rows, monkeypatch)
    expected = np.array(digests(), dtype=np.uint64).view(np.int64).tolist()

    def sealed(at: int) -> tuple[torch.Tensor, torch.Tensor]:
        table, kept = Table(torch.full((1, 4), -at)), torch.zeros(1, pages, dtype=torch.int64)
        froms, here = (Firsts(torch.tensor([at % 4] * pages), range(pages)) for _ in range(2))
        sealer.seal([(table, froms, Table(kept), range(pages), 1)], [(0, here, 1, table)])
        return table.numbers, kept

    for at, (table, kept) in enumerate(in_turn(device, sealed)):
        assert kept.tolist() == [[-at] * pages]
        assert table.tolist() == [[expected[page] if page == at % 4 else -at for page in range(4)]]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("pages", [1, 7, 8])
def test_what_a_load_has_to_be_and_is_stays_until_it_was_told(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sealer = SealerTriton(four_pages())
    device = Device(sealer._rows, monkeypatch)

    def noted(at: int) -> Any:
        loaded, read = (Firsts(torch.tensor([at % 4] * pages), range(pages)) for _ in range(2))
        table = Table(torch.arange(at, at + 4))
        return sealer.move(
            [(table, loaded, Table(torch.zeros(1, pages, dtype=torch.int64)), range(pages), 1)], [(table, read, 1)]
        )[0]

    def found(at: int) -> Any:
        return sealer.digests([(0, Firsts(torch.tensor([at % 4] * pages), range(pages)), 1)])[0]

    assert [one.tolist() for one in in_turn(device, noted)] == [[at + at % 4] * pages for at in range(16)]
    in_turn(device, lambda at: noted(at) is None)  # nobody keeps it
    device = Device(sealer._now, monkeypatch)
    assert [one.tolist() for one in in_turn(device, found)] == [[digests()[at % 4]] * pages for at in range(16)]
    in_turn(device, lambda at: found(at) is None)


def test_what_was_over_stays_so_when_its_slot_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sealer = SealerTriton(four_pages())
    device = Device(sealer._rows, monkeypatch)

    def begin() -> Any:
        return sealer.move((), [(Table(torch.arange(4)), [1], 1)])[1]

    first, second = begin(), begin()
    assert (first.query(), second.query()) == (False, False)
    device.run(1)
    assert (first.query(), second.query()) == (True, False)
    third = begin()
    assert len(device.events) == 2
    assert (first.query(), second.query(), third.query()) == (True, False, False)
    first.synchronize()
    assert not third.query(), "nobody waits for a later use"
    second.synchronize()
    third.synchronize()
    assert (second.query(), third.query()) == (True, True)
