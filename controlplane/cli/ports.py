"""Ports that are taken, and by whom."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dsv4ctl.controlplane.config.schema import Config

_LISTEN = "0A"  #: TCP_LISTEN in include/net/tcp_states.h
PROC = Path("/proc")


class Owner(NamedTuple):
    pid: int
    command: str


def taken(config: Config) -> str | None:
    """One line about the first port of the configuration that cannot be had, or None."""
    places = [("gateway.port", config.gateway.host, config.gateway.port)]
    for index, engine in enumerate(config.engines):
        if engine.survive:
            continue  # it may live, and hold them
        places.append((f"engines[{index}].port", engine.host, engine.port))
        places.append((f"engines[{index}].bootstrap_port", engine.host, engine.bootstrap_port))
    for key, host, port in places:
        if port and _in_use(host, port):
            return describe(key, host, port)
    return None


def describe(key: str, host: str, port: int) -> str:
    found = owner(port)
    who = f"pid {found.pid} ({found.command})" if found else "a process of another user"
    return f"port {port} on {host} is taken by {who}; end it, or set another {key}"


def owner(port: int, proc: Path = PROC) -> Owner | None:
    """The process that listens on `port`, as far as this user may see it."""
    inodes = {
        inode
        for table in ("tcp", "tcp6")
        for found, inode in _listeners((proc / "net" / table).read_text())
        if found == port
    }
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in proc.glob("[0-9]*"):
        try:
            if any(os.readlink(fd) in wanted for fd in (process / "fd").iterdir()):
                return Owner(int(process.name), _command(process))
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue  # another user's, or it just ended
    return None


def _listeners(table: str) -> Iterator[tuple[int, int]]:
    """(port, inode) of each listening socket of /proc/net/tcp or tcp6."""
    for line in table.splitlines()[1:]:
        columns = line.split()
        if columns[3] == _LISTEN:
            yield int(columns[1].rpartition(":")[2], 16), int(columns[9])


def _command(process: Path) -> str:
    words = (process / "cmdline").read_bytes().decode("utf-8", "replace").replace("\0", " ")
    command = " ".join(words.split())  # in one line
    return command if len(command) <= 100 else f"{command[:97]}..."


def _in_use(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is no owner
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
