"""Device streams and events on a CPU, in the place of `torch.cuda` and of torch's no-op stand-ins: order is real.

A stream is a list of operations; nothing runs before a test asks for it (`Device.run`), so every order of events is
the test's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Event:
    """Recorded on a stream, it fires when that stream gets there. One never recorded has fired, as in CUDA."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pending = 0

    def record(self, stream: Stream | None = None) -> None:
        self._pending += 1
        (stream or self._device.current).put(self._fire)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._device.current).wait_event(self)

    def query(self) -> bool:
        return self._pending == 0

    def synchronize(self) -> None:
        self._device.run()
        assert self.query(), "the host would wait for ever: nothing that runs fires this event"

    def elapsed_time(self, other: Event) -> float:
        return 0.0

    def _fire(self) -> None:
        self._pending -= 1


class Stream:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.operations: list[Callable[[], None] | Event] = []
        device.streams.append(self)

    def put(self, operation: Callable[[], None]) -> None:
        self.operations.append(operation)

    def wait_event(self, event: Event) -> None:
        self.operations.append(event)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._device)
        event.record(other)
        self.wait_event(event)

    def step(self) -> bool:
        """Runs one operation; False if there is none, or the next waits."""
        if not self.operations:
            return False
        first = self.operations[0]
        if isinstance(first, Event):
            if not first.query():
                return False
        else:
            first()
        del self.operations[0]
        return True


class Device:
    """What SGLang calls a device module."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.current = Stream(self)

    def Event(self, **_: Any) -> Event:  # noqa: N802 - torch's name
        return Event(self)

    def Stream(self, **_: Any) -> Stream:  # noqa: N802 - torch's name
        return Stream(self)

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def run(self, *streams: Stream) -> None:
        """Runs these streams (default: all) as far as they get, in turns."""
        while [stream for stream in streams or self.streams if stream.step()]:
            pass
