"""Evidence as files: one JSON document each in one folder, the oldest removed above a bound."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

#: Only files named like ours are counted, and removed: what else lies in the folder is somebody's.
_OURS = re.compile(r"\d{8}T\d{6}\.\d{6}Z-\d{6}-[\w.-]+\.json")


class Kept(NamedTuple):
    """A file of the folder. Names begin with the time, so they sort by age."""

    name: str
    size: int


def to_remove(kept: Iterable[Kept], more: int, max_bytes: int) -> list[str]:
    """Which files must go, the oldest first, so that `more` bytes fit."""
    files = sorted(kept)
    over = sum(file.size for file in files) + more - max_bytes
    gone: list[str] = []
    for file in files:
        if over <= 0:
            break
        gone.append(file.name)
        over -= file.size
    return gone


class EvidenceFolder:
    """Blocking; the caller writes one file at a time."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def write(self, name: str, body: bytes) -> Path:
        """The file, whole or not there. Raises OSError, also for a body that alone is above the bound."""
        if len(body) > self._max_bytes:
            raise OSError(f"{name} has {len(body)} bytes, [evidence] max_bytes is {self._max_bytes}")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = [Kept(path.name, path.stat().st_size) for path in self._folder.iterdir() if _OURS.fullmatch(path.name)]
        for gone in to_remove(kept, len(body), self._max_bytes):
            (self._folder / gone).unlink(missing_ok=True)
        path, part = self._folder / name, self._folder / f"{name}.part"
        try:
            part.touch(mode=0o600)
            part.write_bytes(body)
            part.rename(path)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        return path
