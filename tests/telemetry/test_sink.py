"""Where a dropped line is reported, decided write by write."""

from __future__ import annotations

import threading
from queue import Queue
from types import SimpleNamespace

import pytest

from dsv4ctl.controlplane.telemetry.sink import LineSink


def test_drops_are_reported_between_the_lines_they_were_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line taken after a drop, while the lines before the drop are still being written, stands after its report."""
    begun: Queue[str] = Queue()
    finish: Queue[None] = Queue()

    def write(_fd: int, data: memoryview) -> int:
        begun.put(bytes(data).decode())
        finish.get(timeout=30)
        return len(data)

    monkeypatch.setattr("dsv4ctl.controlplane.telemetry.sink.os", SimpleNamespace(write=write))
    sink = LineSink(0, 2, lambda count: f"dropped {count}", lambda error: None)
    sink.put("a")
    assert begun.get(timeout=30) == "a\n"
    for line in ("b", "c", "d"):  # one more is held, two are not
        sink.put(line)
    finish.put(None)
    assert begun.get(timeout=30) == "b\ndropped 2\n"
    sink.put("e")
    sink.put("f")
    finish.put(None)
    assert begun.get(timeout=30) == "e\ndropped 1\n"
    finish.put(None)
    sink.close(30)
    assert begun.empty()
    assert sink.dropped == 3


def test_lines_that_come_together_are_one_write_and_a_close_waits_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def write(_fd: int, data: memoryview) -> int:
        written.append(bytes(data).decode())
        return len(data)

    gathering = threading.Event()

    class Closing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            gathering.set()
            return super().wait(timeout)

    monkeypatch.setattr("dsv4ctl.controlplane.telemetry.sink.os", SimpleNamespace(write=write))
    monkeypatch.setattr("dsv4ctl.controlplane.telemetry.sink.GATHER", 3600.0)
    sink = LineSink(0, 9, lambda count: f"dropped {count}", lambda error: None)
    sink._closing = Closing()
    sink.put("a")
    assert gathering.wait(30)
    sink.put("b")
    sink.put("c")
    sink.close(30)
    assert written == ["a\nb\nc\n"]
