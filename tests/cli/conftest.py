"""A FakePlane behind a real admin socket, and the command line in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dsv4ctl.controlplane.cli.main import cli
from fake_plane import FakePlane, served_from_thread

Dsv4ctl = Callable[..., Result]


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "admin.sock"


@pytest.fixture
def plane(socket_path: Path) -> Iterator[FakePlane]:
    plane = FakePlane()
    with served_from_thread(plane, socket_path):
        yield plane


@pytest.fixture
def dsv4ctl(socket_path: Path) -> Dsv4ctl:
    def call(*words: str) -> Result:
        return CliRunner().invoke(cli, ["--socket", str(socket_path), *words], prog_name="dsv4ctl")

    return call
