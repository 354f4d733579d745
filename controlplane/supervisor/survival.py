"""Engines that outlive their control plane (`engines.survive`): known by pid and start time, their output in files.

All of it is in one folder beside the admin socket, which this process alone owns: the link's socket, the registry
`engines.json`, and what each process writes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import msgspec

from dsv4ctl.controlplane.supervisor.lines import LineCutter

_REGISTRY = "engines.json"
#: Becomes its arguments once a line comes; without one (whoever had it to say is gone) it ends.
_HELD = ("/bin/sh", "-c", 'read -r go && exec "$@" </dev/null', "sh")
#: Seconds between two looks into the files that engines write.
_LOOK = 0.1


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One engine process, as the registry has it. `born`: its start in clock ticks since boot, for a pid comes back."""

    engine: str
    rank: int
    incarnation: str
    pid: int
    born: int
    told: str | None  #: digest of what it was told at its start; None: it ends with its control plane


class Wanted(NamedTuple):
    """What an engine of the configuration would be started as."""

    ranks: int
    told: str


def digest(request: msgspec.Struct) -> str:
    """Equal for processes that are told the same."""
    return hashlib.sha256(msgspec.json.encode(request)).hexdigest()


class Survivors:
    """The registry of one control plane. `note` writes an entry when its process has started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: dict[str, Kept] = {}  #: by incarnation
        self._going_on: dict[str, SurvivingProcess] = {}  #: by incarnation, until it is adopted

    async def settle(self, wanted: Mapping[str, Wanted], refused: Callable[[Kept, str], None]) -> dict[str, list[str]]:
        """The engines that go on: by name the incarnations of their ranks.

        Every other process of the registry is killed, and proven to be gone, when this returns: `refused` is told
        of each and why. Cancelled before, it has written nothing: the next look finds what is left. Raises OSError
        for a registry that cannot be read, or is none.
        """
        found = {kept: self._process(kept, fd) for kept in _read(self.folder) if (fd := _pidfd(kept)) is not None}
        while unfit := _unfit(found, wanted):
            for kept, reason in unfit.items():
                refused(kept, reason)
                if kept.told is not None:  # what does not survive is ending already, and may have children to kill
                    found[kept].kill()
            for kept in unfit:
                await found[kept].reaped()
            for kept in [kept for kept, process in found.items() if process.ended]:  # others may have died meanwhile
                await found.pop(kept).close()
        self._kept = {kept.incarnation: kept for kept in found}
        self._going_on = {kept.incarnation: process for kept, process in found.items()}
        return {kept.engine: [rank.incarnation for rank in _ranks(found, kept.engine)] for kept in found}

    def adopted(self, incarnation: str) -> SurvivingProcess | None:
        """The process of an incarnation that goes on, once. It may have ended since it was found."""
        return self._going_on.pop(incarnation, None)

    async def start(self, incarnation: str, argv: Sequence[str], env: Mapping[str, str]) -> SurvivingProcess:
        """Starts a process that becomes `argv` with `go`, when the registry has it: until then it ends with us.

        `env` is added to our environment; it leads a session of its own. Raises OSError.
        """
        outputs = _outputs(self.folder, incarnation)

        def popen() -> tuple[subprocess.Popen[bytes], int]:
            if shutil.which(argv[0], path=env.get("PATH")) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
            with open(outputs["stdout"], "wb") as stdout, open(outputs["stderr"], "wb") as stderr:
                child = subprocess.Popen(
                    (*_HELD, *argv), stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, bufsize=0,
                    env={**os.environ, **env}, start_new_session=True,
                )  # fmt: skip
            try:
                return child, os.pidfd_open(child.pid)
            except OSError:  # nobody could watch it
                child.kill()
                child.communicate()
                raise

        try:
            child, fd = await anyio.to_thread.run_sync(popen)
        except OSError:
            _remove(outputs)
            raise
        return SurvivingProcess(child.pid, fd, outputs, child, argv)

    def note(self, engine: str, rank: int, incarnation: str, pid: int, told: str | None = None) -> None:
        """Writes a child of ours into the registry, and what is gone out of it. Raises OSError."""
        kept = Kept(engine=engine, rank=rank, incarnation=incarnation, pid=pid, born=_born(pid) or 0, told=told)
        self._kept = {key: value for key, value in self._kept.items() if _lives(value)}
        self._kept[incarnation] = kept
        new = self.folder / f"{_REGISTRY}.new"
        new.write_bytes(msgspec.json.encode(list(self._kept.values())))
        new.replace(self.folder / _REGISTRY)

    def _process(self, kept: Kept, fd: int) -> SurvivingProcess:
        return SurvivingProcess(kept.pid, fd, _outputs(self.folder, kept.incarnation))


def anybody_left(folder: Path) -> bool:
    """Whether a process of its registry lives. Raises OSError like `settle`."""
    return any(map(_lives, _read(folder)))


class SurvivingProcess:
    """A `Running` that may be our child, or that of a control plane that is gone."""

    def __init__(
        self,
        pid: int,
        fd: int,
        outputs: Mapping[str, Path],
        child: subprocess.Popen[bytes] | None = None,
        argv: Sequence[str] = (),
    ) -> None:
        """`fd`: a descriptor of the process, ours from now on; `outputs`: its file for each stream."""
        self.argv = tuple(argv)
        self.pid = pid
        self.relayed = anyio.Event()
        self._fd = fd
        self._child = child
        self._over = anyio.Event()
        #: Of an adopted one, what it wrote before was relayed by its first control plane, or by nobody.
        self._read_to = {path: _size(path) if child is None else 0 for path in outputs.values()}
        self._outputs = outputs

    @property
    def ended(self) -> bool:
        return self._over.is_set() or _ended(self._fd)

    def go(self) -> None:
        """The registry has it: what was held until now begins."""
        assert self._child is not None
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # it ended before, and is found to have
            self._child.stdin.write(b"\n")
            self._child.stdin.close()

    async def serving(self) -> None:
        return

    async def reaped(self) -> int | None:
        """The exit code; None if it was not our child. No deadline: only the kernel can say when a process is gone."""
        if not self._over.is_set():
            fd = os.dup(self._fd)  # whoever else waits has one of its own
            try:
                await anyio.wait_readable(fd)
            finally:
                os.close(fd)
            self._over.set()
        return None if self._child is None else self._child.wait()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if not self._over.is_set():
            with suppress(ProcessLookupError):  # it is gone already, which is what was wanted
                signal.pidfd_send_signal(self._fd, number)

    async def relay(self, line: Callable[[str, str], None]) -> None:
        """Calls `line(stream, text)` for each line of output, until the process has ended."""
        cutters = {stream: LineCutter() for stream in self._outputs}
        while not self._over.is_set():
            with anyio.move_on_after(_LOOK):
                await self._over.wait()
            for stream, path in self._outputs.items():
                for text in cutters[stream].feed(self._more(path)):
                    line(stream, text)
        for stream, cutter in cutters.items():
            for text in cutter.end():
                line(stream, text)
        self.relayed.set()

    async def close(self) -> None:
        os.close(self._fd)
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
        _remove(self._outputs)

    def _more(self, path: Path) -> bytes:
        try:
            with open(path, "rb") as output:
                output.seek(self._read_to[path])
                data = output.read()
        except FileNotFoundError:  # whoever cleans the directory was there: lines are lost, not the engine
            return b""
        self._read_to[path] += len(data)
        return data


def _read(folder: Path) -> list[Kept]:
    try:
        return msgspec.json.decode((folder / _REGISTRY).read_bytes(), type=list[Kept])
    except FileNotFoundError:
        return []
    except msgspec.DecodeError as error:
        raise OSError(f"{folder / _REGISTRY} is no registry of engines ({error}): remove it") from error


def _ranks(living: Iterable[Kept], engine: str) -> list[Kept]:
    return sorted((kept for kept in living if kept.engine == engine), key=lambda kept: kept.rank)


def _unfit(living: Iterable[Kept], wanted: Mapping[str, Wanted]) -> dict[Kept, str]:
    """Those that do not go on, and why: all ranks of an engine or none."""
    living = list(living)
    reasons = {name: _reason(_ranks(living, name), wanted.get(name)) for name in {kept.engine for kept in living}}
    return {kept: reason for kept in living if (reason := reasons[kept.engine]) is not None}


def _reason(ranks: Sequence[Kept], wanted: Wanted | None) -> str | None:
    """Why these ranks of one engine do not go on, or None."""
    if wanted is None:
        return "the configuration has no such engine that survives"
    if any(kept.told != wanted.told for kept in ranks):
        return "it was started with another configuration"
    if [kept.rank for kept in ranks] != list(range(wanted.ranks)):
        return f"of {wanted.ranks} ranks there are left: {', '.join(str(kept.rank) for kept in ranks)}"
    return None


def _outputs(folder: Path, incarnation: str) -> dict[str, Path]:
    return {stream: folder / f"{incarnation}.{stream}" for stream in ("stdout", "stderr")}


def _remove(outputs: Mapping[str, Path]) -> None:
    for path in outputs.values():
        path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    """0 for a file that is not there: what does not survive writes none."""
    return path.stat().st_size if path.exists() else 0


def _pidfd(kept: Kept) -> int | None:
    """A descriptor of exactly this process, or None if it is gone (one that nobody has reaped yet, too)."""
    try:
        fd = os.pidfd_open(kept.pid)
    except ProcessLookupError:
        return None
    if _born(kept.pid) == kept.born and not _ended(fd):
        return fd
    os.close(fd)
    return None


def _ended(fd: int) -> bool:
    """Whether the process that a descriptor stands for is gone."""
    over = select.poll()
    over.register(fd, select.POLLIN)
    return bool(over.poll(0))


def _lives(kept: Kept) -> bool:
    fd = _pidfd(kept)
    if fd is not None:
        os.close(fd)
    return fd is not None


def _born(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat (proc_pid_stat(5)); the name in field 2 may hold anything but ends with `)`."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])
