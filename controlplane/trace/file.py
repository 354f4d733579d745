"""Trace files: written within a bound, read as far as they go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

import msgspec

from dsv4ctl.controlplane.trace.format import (
    FORMAT,
    MAX_FRAME_BYTES,
    PREFIX,
    VERSION,
    Events,
    Extents,
    Frame,
    Header,
    Rank,
    encode,
)
from dsv4ctl.controlplane.trace.merge import Merged, Stream, merge

NO_EXTENTS: Extents = ()


class TraceError(ValueError):
    """The file is no trace that can be read here; the message says what was found and what was expected."""


class Writer:
    """Appends to `path`. At `limit` bytes the file becomes `path`.1 (replacing the one before) and a new one begins:
    both stand on their own, and together they never exceed twice the limit."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._ranks: dict[str, bytes] = {}
        self.rotated = 0
        self._open()

    def _open(self) -> None:
        self._file: BinaryIO = self._path.open("wb")
        self._written: set[str] = set()
        self._size = self._file.write(encode(Header()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def write(self, incarnation: str, rank: bytes, events: bytes) -> None:
        """One `rank` and one `events` frame of `incarnation`; the rank's is written once a file."""
        self._ranks[incarnation] = rank
        if self._size + len(rank) + len(events) > self._limit and self._written:
            self._file.close()
            self._path.replace(older(self._path))
            self.rotated += 1
            self._open()
        if incarnation not in self._written:
            self._written.add(incarnation)
            self._size += self._file.write(rank)
        self._size += self._file.write(events)
        self._file.flush()


def older(path: Path) -> Path:
    """Where the file before goes when `path` is full."""
    return path.with_name(f"{path.name}.1")


class _Place(NamedTuple):
    at: int
    size: int


class TraceFile:
    """An index of the file: its ranks, and where each one's events lie. Memory is a few bytes an `events` frame."""

    def __init__(self, path: Path) -> None:
        """Raises TraceError, OSError."""
        self.path = path
        self.ranks: dict[str, Rank] = {}
        self.cut: str | None = None  #: how the file ends if not with a whole frame
        self._places: dict[str, list[_Place]] = {}
        self._index()

    def stream(self, incarnation: str) -> Stream:
        """The rank's events in order, a frame in memory at a time. A gap in `seq` is one in what was recorded."""
        with self.path.open("rb") as file:
            for place in self._places.get(incarnation, []):
                file.seek(place.at)
                frame = _decoder.decode(file.read(place.size))
                assert isinstance(frame, Events)
                table = frame.extents
                for event in frame.events:
                    yield event, table[event.extents] if event.extents >= 0 else NO_EXTENTS

    def ahead_ns(self) -> dict[str, int]:
        """What to add to a rank's monotonic times so that those of all ranks compare, by incarnation."""
        return {incarnation: rank.wall_ns - rank.monotonic_ns for incarnation, rank in self.ranks.items()}

    def merged(self) -> Iterator[Merged]:
        """Every event, causes before effects; each call reads the file again."""
        return merge({incarnation: self.stream(incarnation) for incarnation in self.ranks}, self.ahead_ns())

    def _index(self) -> None:
        with self.path.open("rb") as file:
            at = 0
            for number, body in enumerate(self._bodies(file)):
                at += PREFIX
                if number == 0:
                    _check_header(body, self.path)
                else:
                    self._take(body, at)
                at += len(body)
        if at == 0:
            raise TraceError(f"{self.path} is no trace: it has no header frame")
        unknown = set(self._places) - set(self.ranks)
        if unknown:
            raise TraceError(f"{self.path}: events of {', '.join(sorted(unknown))}, whose `rank` frame is missing")

    def _take(self, body: bytes, at: int) -> None:
        try:
            frame = _skimmer.decode(body)
            if isinstance(frame, _Skimmed):
                self._places.setdefault(frame.incarnation, []).append(_Place(at, len(body)))
            elif isinstance(frame, Rank):
                self.ranks[frame.incarnation] = frame
        except (msgspec.DecodeError, RecursionError) as error:
            raise TraceError(f"{self.path}: the frame at byte {at - PREFIX} is no trace frame: {error}") from error

    def _bodies(self, file: BinaryIO) -> Iterator[bytes]:
        at = 0
        while prefix := file.read(PREFIX):
            size = int.from_bytes(prefix, "big")
            if len(prefix) == PREFIX and size > MAX_FRAME_BYTES:
                raise TraceError(
                    f"{self.path} is no trace: a frame of {size} bytes at byte {at}, the most is {MAX_FRAME_BYTES}"
                )
            body = file.read(size)
            if len(prefix) < PREFIX or len(body) < size:
                self.cut = f"cut off in the middle of a frame at byte {at}"
                return
            yield body
            at += PREFIX + size


class _Skimmed(msgspec.Struct, tag="events"):
    """An `events` frame, without what is in it."""

    incarnation: str


_skimmer: msgspec.msgpack.Decoder[Header | Rank | _Skimmed] = msgspec.msgpack.Decoder(Header | Rank | _Skimmed)
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def _check_header(body: bytes, path: Path) -> None:
    """A later version may have other fields: what must be there is read by name."""
    try:
        found = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceError(f"{path} is no trace: its first frame is not msgpack: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise TraceError(f"{path} is no trace: its first frame does not say `format: {FORMAT}`")
    if found.get("version") != VERSION:
        raise TraceError(f"{path} has trace version {found.get('version')}, this dsv4ctl reads version {VERSION}")
