"""One rank as a child process: started in its own process group, its output relayed, killed and reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
from anyio.abc import ByteReceiveStream, Process

from dsv4ctl.controlplane.supervisor.lines import LineCutter

_CHILD = str(Path(__file__).with_name("child.py"))


class RankProcess:
    """A running child. Every method may be called after it ended."""

    def __init__(self, process: Process, argv: Sequence[str]) -> None:
        self._process = process
        self.argv = tuple(argv)
        self.pid = process.pid
        self.relayed = anyio.Event()  #: both output streams ended and every line was passed on

    @property
    def exit_code(self) -> int | None:
        """Negative: ended by that signal. None: not reaped yet."""
        return self._process.returncode

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


async def start(argv: Sequence[str], env: Mapping[str, str]) -> RankProcess:
    """Starts `argv` with `env` added to our environment, as leader of its own session.

    Raises OSError if no process can be started.
    """
    process = await anyio.open_process(
        [sys.executable, "-S", "-s", _CHILD, str(os.getpid()), *argv],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
        start_new_session=True,
    )
    return RankProcess(process, argv)


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
