"""The link of a rank that outlives its control plane."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4ctl.controlplane.link.lasting import LastingLink
from dsv4ctl.controlplane.link.wire import WIRE_VERSION, Fenced, Received, Refused, Welcome
from link_plane import HELLO, LIMIT, ControlPlane


class ControlPlanes:
    """One control plane after the other on one path; `happened` is what the rank was told, in order."""

    first: ControlPlane

    def __init__(self, path: Path) -> None:
        self._path = path
        self.happened: queue.Queue[Any] = queue.Queue()
        self.handles = threading.Event()  #: cleared: a frame is being handled until it is set
        self.handles.set()
        self.link = LastingLink(
            str(path),
            self._handle,
            self.happened.put,
            lambda why: self.happened.put(("lost", why)),
            lambda why: self.happened.put("orphaned"),
            lambda: self.happened.put("adopted"),
        )

    def _handle(self, frame: Any) -> None:
        self.happened.put("handling")
        assert self.handles.wait(LIMIT)
        self.happened.put(frame)

    def next(self) -> Any:
        return self.happened.get(timeout=LIMIT)

    def start(self, *frames: Any, meanwhile: Callable[[], object] = lambda: None) -> ControlPlane:
        """A new one takes the place of the last, and answers the Hello with `frames`. It accepts nobody else."""
        plane = ControlPlane(self._path)
        thread = threading.Thread(target=meanwhile)
        thread.start()
        plane.accept(*frames)
        plane.listener.close()
        thread.join(LIMIT)
        return plane


@pytest.fixture
def planes(tmp_path: Path) -> Iterator[ControlPlanes]:
    planes = ControlPlanes(tmp_path / "link.sock")
    first = planes.start(Welcome(WIRE_VERSION, 0.5), meanwhile=lambda: planes.link.connect(HELLO, LIMIT))
    planes.link.start()
    planes.first = first
    yield planes
    planes.link.finish(LIMIT)


def test_the_next_control_plane_is_greeted_as_the_first_was(planes: ControlPlanes) -> None:
    """Told in order: the old one is gone, a new one is there, its frames."""
    planes.first.close()
    assert planes.next() == "orphaned"
    planes.link.send(Received(1))  # goes nowhere
    second = planes.start(Welcome(WIRE_VERSION, 0.5), Fenced("P-2"))
    assert [planes.next() for _ in range(3)] == ["adopted", "handling", Fenced("P-2")]
    planes.link.send(Received(2))
    assert second.read() == Received(2)
    second.close()
    assert planes.next() == "orphaned"
    planes.start(Welcome(WIRE_VERSION, 0.5)).close()
    assert [planes.next(), planes.next()] == ["adopted", "orphaned"]
    planes.start(Refused("the test is over"))


def test_a_control_plane_that_refuses_it_ends_the_search(planes: ControlPlanes) -> None:
    planes.first.close()
    assert planes.next() == "orphaned"
    planes.start(Refused("incarnation D-1 is unknown"))
    assert planes.next() == ("lost", "refused: incarnation D-1 is unknown")


def test_the_old_control_plane_s_last_frame_is_handled_before_it_is_gone(planes: ControlPlanes) -> None:
    """The writing thread meets the end first, while the reading one is still busy."""
    planes.handles.clear()
    planes.first.send(Fenced("P-1"))
    assert planes.next() == "handling"
    planes.first.close()
    writer = planes.link._link._writer
    while writer.is_alive():
        planes.link.send(Received(1))
    planes.handles.set()
    assert [planes.next(), planes.next()] == [Fenced("P-1"), "orphaned"]
    planes.start(Refused("the test is over"))
