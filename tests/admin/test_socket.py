"""Whose the socket is: one owner at a time, a dead one's is taken over, nothing else is touched."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsv4ctl.controlplane.admin.socket import AdminSocket, SocketError, SocketOwnedError, default_path, refuse_if_owned

OWNER = """
import sys
from pathlib import Path
from dsv4ctl.controlplane.admin.socket import AdminSocket
owned = AdminSocket(Path(sys.argv[1]))
owned.socket.listen()
print("owned", flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns the socket."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "owned\n"
        yield process
        process.kill()


def test_a_second_owner_is_told_the_firsts_pid(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with owner(path) as process:
        with pytest.raises(SocketOwnedError) as caught:
            AdminSocket(path)
        assert caught.value.pid == process.pid
        assert str(caught.value).startswith(f"a control plane (pid {process.pid}) already runs on {path}; ")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))  # the first one's is as it was


def test_the_socket_of_a_killed_owner_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with owner(path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert path.exists()
        owned = AdminSocket(path)
    assert owned.replaced
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    owned.close()
    assert list(tmp_path.iterdir()) == []


def test_a_live_socket_without_a_lock_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with owner(path) as process:
        (tmp_path / "s.lock").unlink()
        with pytest.raises(SocketOwnedError) as caught:
            AdminSocket(path)
    assert caught.value.pid == process.pid


def test_an_owner_that_does_not_listen_yet_is_an_owner(tmp_path: Path) -> None:
    path = tmp_path / "s"
    owned = AdminSocket(path)
    for take in (AdminSocket, refuse_if_owned):
        with pytest.raises(SocketOwnedError) as caught:
            take(path)
        assert caught.value.pid == os.getpid()
    owned.close()
    refuse_if_owned(path)
    assert list(tmp_path.iterdir()) == [], "looking makes nothing"


def test_after_a_close_it_can_be_had_again(tmp_path: Path) -> None:
    for _ in range(2):
        owned = AdminSocket(tmp_path / "s")
        assert not owned.replaced
        owned.close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(SocketError, match="exists and is no socket"):
        AdminSocket(path)
    assert path.read_text() == "precious"
    assert [one.name for one in tmp_path.iterdir()] == ["s"]


def test_a_path_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SocketError, match="longer than 107 bytes"):
        AdminSocket(tmp_path / ("s" * 108))


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SocketError, match="cannot be made: Not a directory"):
        AdminSocket(tmp_path / "file" / "deeper" / "s")


def test_closing_does_not_remove_a_socket_that_is_no_longer_ours(tmp_path: Path) -> None:
    path = tmp_path / "s"
    owned = AdminSocket(path)
    path.unlink()
    path.write_text("somebody else's")
    owned.close()
    assert path.read_text() == "somebody else's"


def test_default_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4ctl.controlplane.admin.socket.SYSTEM_FOLDER", tmp_path / "none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert default_path({"XDG_RUNTIME_DIR": str(tmp_path)}, 1000) == tmp_path / "dsv4ctl.sock"
    assert default_path({"XDG_RUNTIME_DIR": str(tmp_path / "gone")}, 0) == tmp_path / "none" / "dsv4ctl.sock"
    assert default_path({}, 0) == tmp_path / "none" / "dsv4ctl.sock"
    assert default_path({}, 1000) == tmp_path / "dsv4ctl-1000" / "dsv4ctl.sock"


def test_a_folder_below_tmp_that_others_could_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"dsv4ctl-{os.getuid()}"
    owned = AdminSocket(folder / "s")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    owned.close()
    folder.chmod(0o777)
    with pytest.raises(SocketError, match="not a folder of this user alone"):
        AdminSocket(folder / "s")
