"""The folder of one control plane: the link's socket and the registry of its engines' processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dsv4ctl.controlplane.admin.socket import resolve
from dsv4ctl.controlplane.config.schema import Config
from dsv4ctl.controlplane.config.semantics import SURVIVORS
from dsv4ctl.controlplane.supervisor.survival import anybody_left

_PREFIX = "dsv4ctl-"
#: In a temporary folder: locked for as long as its control plane lives, however that ends.
_OWNED = "owned"


@contextmanager
def own_folder(config: Config) -> Iterator[Path]:
    """With engines that survive, now or in an earlier run, it has a name to be found by.

    That one is removed once every engine has ended; whoever fails or is stopped before leaves it to the next start.
    """
    lasting = Path(f"{resolve(config.socket)}{SURVIVORS}")
    if lasting.exists() or any(engine.survive for engine in config.engines):
        lasting.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield lasting
        if not anybody_left(lasting):
            shutil.rmtree(lasting)
        return
    _remove_left()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(folder / f"{_OWNED}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / f"{_OWNED}.new").rename(folder / _OWNED)  # nobody ever finds it unlocked while we live
        yield folder
    finally:
        with suppress(FileNotFoundError):  # whoever cleans the temporary directory was there
            shutil.rmtree(folder)
        os.close(lock)


def _remove_left() -> None:
    """Removes the temporary folders that killed control planes of this user left.

    No later control plane looks into one, and engines that do not survive only ever connect to its socket.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, or no such folder, or it cannot be removed: it hurts nobody
            _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    """Raises OSError (BlockingIOError: its owner lives, or another start removes it)."""
    if folder.lstat().st_uid != os.getuid():
        return
    lock = os.open(folder / _OWNED, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
