"""Whose a port is."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from dsv4ctl.controlplane.cli import ports
from dsv4ctl.controlplane.config.schema import Config, EngineConfig, GatewayConfig


def test_the_owner_of_a_listening_port() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert ports.owner(port) is None, "bound, but it does not listen"
        listening.listen()
        found = ports.owner(port)
    assert found is not None
    assert found.pid == os.getpid()
    assert "python" in found.command or "pytest" in found.command


def test_an_owner_that_this_user_may_not_see(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    row = "   0: 0100007F:{:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 1000 0 777 1 0 100 0 0 10 0\n"
    (tmp_path / "net" / "tcp").write_text("header\n" + row.format(31000))
    (tmp_path / "net" / "tcp6").write_text("header\n")
    (tmp_path / "12" / "fd").mkdir(parents=True)
    (tmp_path / "12" / "fd" / "3").symlink_to("socket:[778]")
    (tmp_path / "12" / "cmdline").write_text("server\0-c\0two\n lines\0")
    assert ports.owner(31000, tmp_path) is None
    (tmp_path / "12" / "fd" / "4").symlink_to("socket:[777]")
    assert ports.owner(31000, tmp_path) == ports.Owner(12, "server -c two lines")


def test_engines_ports_are_looked_at_too() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        engine = EngineConfig(name="one", role="single", port=port)
        line = ports.taken(Config(engines=[engine], gateway=GatewayConfig(port=0)))
    assert line is not None
    assert line.endswith("set another engines[0].port")


def test_free_ports_are_no_fault() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = EngineConfig(name="one", role="single")
    assert ports.taken(Config(engines=[engine], gateway=GatewayConfig(port=port))) is None
