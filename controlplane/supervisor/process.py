"""An engine's process, or its tree of processes, as our child: its output relayed, killed and reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import anyio
from anyio.abc import ByteReceiveStream, Process

from dsv4ctl.controlplane.supervisor import guardian
from dsv4ctl.controlplane.supervisor.lines import LineCutter

_CHILD = str(Path(__file__).with_name("child.py"))
_GUARDIAN = str(Path(guardian.__file__))
#: In the environment of every process of a tree: the tree's own mark.
_TREE = "DSV4CTL_TREE"
#: Seconds between two looks whether a server answers, or whether processes are gone that are not our children.
_LOOK = 0.1
#: Seconds that a server may take to answer one look.
_ANSWER = 5.0


class Health(NamedTuple):
    """Where a server says that it serves: HTTP status 200 at `path`."""

    host: str
    port: int
    path: str


class RankProcess:
    """A running child. Every method may be called after it ended."""

    def __init__(self, process: Process, argv: Sequence[str], health: Health | None = None) -> None:
        self._process = process
        self._health = health
        self.argv = tuple(argv)
        self.pid = process.pid
        self.relayed = anyio.Event()  #: both output streams ended and every line was passed on

    @property
    def exit_code(self) -> int | None:
        """Negative: ended by that signal. None: not reaped yet."""
        return self._process.returncode

    async def serving(self) -> None:
        """Returns once its server answers, if one was named. The caller has a deadline."""
        while self._health is not None and not await _answers(self._health):  # noqa: ASYNC110 - a server of others
            await anyio.sleep(_LOOK)

    async def reaped(self) -> int:
        """The exit code. No deadline: only the kernel can say when a process is gone."""
        return await self._process.wait()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole process group; a stopped process dies of it too."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # the group is gone already, which is what was wanted
            os.killpg(self.pid, number)

    async def relay(self, line: Callable[[str, str], None]) -> None:
        """Calls `line(stream, text)` for each line of output, until both streams end."""
        async with anyio.create_task_group() as tasks:
            for name, stream in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
                if stream is not None:
                    tasks.start_soon(_relay, name, stream, line)
        self.relayed.set()

    async def close(self) -> None:
        """Closes our ends of its pipes."""
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                await stream.aclose()


class TreeProcess(RankProcess):
    """A guardian and the tree of processes below it, all of them reaped when it is."""

    def __init__(self, process: Process, argv: Sequence[str], health: Health | None, mark: str) -> None:
        super().__init__(process, argv, health)
        self._mark = mark
        self._sweep = anyio.Lock()

    def kill(self) -> None:
        if self.exit_code is None:
            with suppress(ProcessLookupError):  # it is gone already, which is what was wanted
                os.kill(self.pid, guardian.KILL)
                os.kill(self.pid, signal.SIGCONT)

    async def reaped(self) -> int:
        """A guardian that was itself killed proves nothing: then all that carries the tree's mark is killed."""
        code = await super().reaped()
        async with self._sweep:
            while left := _marked(self._mark):
                for pid in left:
                    with suppress(ProcessLookupError):  # it ended by itself
                        os.kill(pid, signal.SIGKILL)
                await anyio.sleep(_LOOK)
        return code


async def start(argv: Sequence[str], env: Mapping[str, str]) -> RankProcess:
    """Starts `argv` with `env` added to our environment, as leader of its own session.

    Raises OSError if no process can be started.
    """
    return RankProcess(await _open(_CHILD, argv, env), argv)


async def start_tree(argv: Sequence[str], env: Mapping[str, str], health: Health | None = None) -> TreeProcess:
    """Like `start`, for a program that starts processes of its own."""
    mark = uuid.uuid4().hex
    return TreeProcess(await _open(_GUARDIAN, argv, {**env, _TREE: mark}), argv, health, mark)


async def _open(script: str, argv: Sequence[str], env: Mapping[str, str]) -> Process:
    return await anyio.open_process(
        [sys.executable, "-S", "-s", script, str(os.getpid()), *argv],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
        start_new_session=True,
    )


async def _answers(health: Health) -> bool:
    request = f"GET {health.path} HTTP/1.1\r\nHost: {health.host}\r\nConnection: close\r\n\r\n"
    try:
        with anyio.fail_after(_ANSWER):
            async with await anyio.connect_tcp(health.host, health.port) as stream:
                await stream.send(request.encode())
                answer = await stream.receive()
    except (OSError, TimeoutError, anyio.EndOfStream, anyio.BrokenResourceError):
        return False
    return answer.split(b"\r\n", 1)[0].split(b" ")[1:2] == [b"200"]


def _marked(mark: str) -> list[int]:
    """The processes that carry `mark`. A zombie has no environment, and writes nothing."""
    found, wanted = [], f"{_TREE}={mark}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it ended, or is another user's
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


async def _relay(name: str, stream: ByteReceiveStream, line: Callable[[str, str], None]) -> None:
    cutter = LineCutter()
    try:
        async for data in stream:
            for text in cutter.feed(data):
                line(name, text)
    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
        pass  # the process is gone and its pipe was closed: what came is relayed
    for text in cutter.end():
        line(name, text)
