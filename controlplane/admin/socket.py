"""The admin socket: where it is, whose it is, and that a dead one is replaced."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dsv4ctl.controlplane.config.semantics import SOCKET_PATH_MAX

NAME = "dsv4ctl.sock"
SYSTEM_FOLDER = Path("/run/dsv4ctl")
#: Seconds an owner has to accept a connection (its listen queue does that even when it is busy).
CONNECT_TIMEOUT = 1.0


class SocketError(Exception):
    """The admin socket cannot be had; the message says why and what helps."""


class SocketOwnedError(SocketError):
    """A living control plane owns the socket. `pid` is None where it cannot be told."""

    def __init__(self, path: Path, pid: int | None) -> None:
        self.path = path
        self.pid = pid
        owner = "a control plane" if pid is None else f"a control plane (pid {pid})"
        super().__init__(f"{owner} already runs on {path}; stop it, or give another --socket")


def default_path(environ: Mapping[str, str], uid: int) -> Path:
    """`$XDG_RUNTIME_DIR/dsv4ctl.sock`, else /run/dsv4ctl for root, else a folder of this user below tmp."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / NAME
    if uid == 0 or os.access(SYSTEM_FOLDER, os.W_OK | os.X_OK):
        return SYSTEM_FOLDER / NAME
    return Path(tempfile.gettempdir()) / f"dsv4ctl-{uid}" / NAME


def resolve(configured: str | None) -> Path:
    """The path to use: the configured one, else this user's default."""
    return Path(configured) if configured else default_path(os.environ, os.getuid())


class AdminSocket:
    """A bound Unix socket (mode 0600) that this process alone owns until `close`.

    The owner holds a lock on `<path>.lock`, which names its pid and is free as soon as it dies, in any way.
    """

    def __init__(self, path: Path) -> None:
        """Takes the socket, replacing one whose owner is gone. Raises SocketError, SocketOwnedError."""
        if len(os.fsencode(path)) > SOCKET_PATH_MAX:
            raise SocketError(f"{path} is longer than {SOCKET_PATH_MAX} bytes; give a shorter --socket")
        self.path = path
        self.replaced = False  #: a stale socket stood here
        try:
            _own_folder(path.parent)
            self._lock = _lock(path)
        except OSError as error:
            raise SocketError(f"socket {path} cannot be made: {error.strerror}") from error
        try:
            self._remove_stale()
            self.socket = _bind(path)
            self._identity = _identity(path)
        except OSError as error:
            self._unlock()
            raise SocketError(f"socket {path} cannot be made: {error.strerror}") from error
        except SocketError:
            self._unlock()
            raise

    def close(self) -> None:
        """Gives the socket up and removes it, if it is still ours."""
        self.socket.close()
        if _identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        self._unlock()

    def _remove_stale(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise SocketError(f"{self.path} exists and is no socket; remove it, or give another --socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(CONNECT_TIMEOUT)
            try:
                probe.connect(str(self.path))
            except (ConnectionRefusedError, FileNotFoundError):
                self.path.unlink(missing_ok=True)
                self.replaced = True
                return
            except (TimeoutError, BlockingIOError) as error:  # its listen queue is full: somebody owns it
                raise SocketOwnedError(self.path, None) from error
            raise SocketOwnedError(self.path, peer_credentials(probe)[0])

    def _unlock(self) -> None:
        _lock_path(self.path).unlink(missing_ok=True)
        os.close(self._lock)


def refuse_if_owned(path: Path) -> None:
    """Raises SocketOwnedError if a living control plane holds the lock. Makes nothing."""
    try:
        fd = os.open(_lock_path(path), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return  # no lock, or none that is ours to try: taking the socket will tell
    try:
        _take(fd, path)
    finally:
        os.close(fd)


def peer_credentials(connected: socket.socket) -> tuple[int, int]:
    """pid and uid of the process at the other end (SO_PEERCRED: as they were when it connected)."""
    pid, uid, _gid = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _own_folder(folder: Path) -> None:
    if folder.parent == Path(tempfile.gettempdir()) and folder.name == f"dsv4ctl-{os.getuid()}":
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        # Anybody may make this folder first; whoever owns it could replace the socket in it.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise SocketError(f"{folder} is not a folder of this user alone; give another --socket")
        return
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)


def _lock(path: Path) -> int:
    lock = _lock_path(path)
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _take(fd, path)
        except SocketOwnedError:
            os.close(fd)
            raise
        # A previous owner may have removed the file between our open and our lock.
        if _identity(lock) == (os.fstat(fd).st_dev, os.fstat(fd).st_ino):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return fd
        os.close(fd)


def _take(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(fd, 32, 0).strip()
        raise SocketOwnedError(path, int(pid) if pid.isdigit() else None) from error


def _lock_path(path: Path) -> Path:
    return Path(f"{path}.lock")


def _bind(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o177)
    try:
        bound.bind(str(path))
    except OSError:
        bound.close()
        raise
    finally:
        os.umask(old)
    bound.setblocking(False)
    return bound


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
