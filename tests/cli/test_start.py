"""`start` as a process: readiness, signals, and the faults of the first minute as one clear line each."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FAKE_START = Path(__file__).parent.parent / "support" / "fake_start.py"
DEADLINE = 60
CONFIG = """
[gateway]
port = {port}
[[engines]]
name = "one"
role = "single"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CONFIG.format(port=0))
    return path


def argv(tmp_path: Path, *words: object) -> list[str]:
    return [sys.executable, str(FAKE_START), "--socket", str(tmp_path / "s"), *map(str, words)]


def refused(tmp_path: Path, *words: object, code: int, **env: str) -> list[str]:
    """Lines on stderr of a `start` that must not succeed."""
    done = subprocess.run(
        argv(tmp_path, "start", *words), capture_output=True, text=True, timeout=DEADLINE, env={**os.environ, **env}
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()


@contextmanager
def started(tmp_path: Path, file: Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A start whose admin socket is there."""
    with subprocess.Popen(
        argv(tmp_path, "start", file), stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if json.loads(line)["event"] == "start.ready":
                    break
            yield process
        finally:
            process.kill()


def events(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return [json.loads(line)["event"] for line in process.stdout]


def test_json_lines_readiness_and_a_drain_by_signal(tmp_path: Path, file: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(DEADLINE)
        with started(tmp_path, file, NOTIFY_SOCKET=str(tmp_path / "notify")) as process:
            assert manager.recv(100) == b"READY=1"
            process.send_signal(signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            assert process.wait(DEADLINE) == 0
            assert events(process) == ["stop.signal"]
    assert not (tmp_path / "s").exists()


def test_a_second_start_names_the_firsts_pid(tmp_path: Path, file: Path) -> None:
    with started(tmp_path, file) as process, socket.socket() as gateway:
        gateway.bind(("127.0.0.1", 0))
        gateway.listen()
        file.write_text(CONFIG.format(port=gateway.getsockname()[1]))  # taken too, but that is not the reason
        (line,) = refused(tmp_path, file, code=4)
    who = f"a control plane (pid {process.pid}) already runs on {tmp_path / 's'}"
    assert line == f"dsv4ctl: {who}; stop it, or give another --socket"


def test_a_killed_ones_socket_is_replaced(tmp_path: Path, file: Path) -> None:
    with started(tmp_path, file) as process:
        process.kill()
        process.wait(DEADLINE)
    assert (tmp_path / "s").exists()
    with started(tmp_path, file) as process:
        process.terminate()
        assert process.wait(DEADLINE) == 0


def test_a_bad_file_starts_nothing(tmp_path: Path, file: Path) -> None:
    file.write_text("[gateway]\nprot = 1\n")
    lines = refused(tmp_path, file, code=2)
    assert lines[0].startswith(f'dsv4ctl: {file}: gateway.prot: unknown key "prot". Did you mean port?')
    assert not (tmp_path / "s").exists()
    assert refused(tmp_path, tmp_path / "none.toml", code=2)[0].endswith("cannot be read: No such file or directory")


def test_a_taken_port_names_its_owner(tmp_path: Path, file: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        file.write_text(CONFIG.format(port=port))
        (line,) = refused(tmp_path, file, code=1)
    assert line.startswith(f"dsv4ctl: port {port} on 127.0.0.1 is taken by pid {os.getpid()} (")
    assert line.endswith("); end it, or set another gateway.port")


def test_a_port_that_was_taken_in_between_is_one_line_too(tmp_path: Path, file: Path) -> None:
    (line,) = refused(tmp_path, file, code=1, FAKE_START_FAULT="port")
    assert line == "dsv4ctl: [Errno 98] Address already in use"


@pytest.mark.parametrize("fault", ["host", "address"])
def test_a_host_that_is_not_here_is_named(tmp_path: Path, file: Path, fault: str) -> None:
    file.write_text(CONFIG.format(port=0).replace("[gateway]", "[gateway]\nhost = 'no.such.host'"))
    (line,) = refused(tmp_path, file, code=1, FAKE_START_FAULT=fault)
    assert line == 'dsv4ctl: gateway.host: expected a name or an address of this machine, found "no.such.host"'


def test_no_torch_names_the_extra(tmp_path: Path, file: Path) -> None:
    hide = tmp_path / "sitecustomize.py"
    hide.write_text(
        "import importlib.util as util\n"
        "real = util.find_spec\n"
        "util.find_spec = lambda name, package=None: None if name == 'torch' else real(name, package)\n"
    )
    (line,) = refused(tmp_path, file, code=1, PYTHONPATH=str(tmp_path))
    assert line.startswith("dsv4ctl: engine one cannot be started: ")
    assert line.endswith("torch: pip install 'dsv4ctl[reference]'")


def test_guards_that_are_off_are_warned_of_and_logged(tmp_path: Path, file: Path) -> None:
    with file.open("a") as more:
        more.write('[unsafe]\noff = ["quiesce"]\n')
    with subprocess.Popen(
        argv(tmp_path, "start", file), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        seen = []
        for line in process.stdout:
            seen.append(json.loads(line))
            if seen[-1]["event"] == "start.ready":
                process.terminate()
        assert process.wait(DEADLINE) == 0
        warning = process.stderr.read()
    assert warning == "WARNING: [unsafe] switches off quiesce: output WILL be corrupted\n"
    assert [one["guard"] for one in seen if one["event"] == "guard.off"] == ["quiesce"]
