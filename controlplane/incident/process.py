"""Child processes that are always ended: with what they were started for, or with us."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio.abc import Process

from dsv4ctl.controlplane.supervisor import child

#: Seconds that a child has after SIGTERM.
GRACE = 8.0


def ours(arguments: Sequence[str]) -> list[str]:
    """The command that runs Python with these arguments, and that the kernel kills when we die."""
    return [sys.executable, child.__file__, str(os.getpid()), sys.executable, *arguments]


@asynccontextmanager
async def ended(process: Process) -> AsyncIterator[Process]:
    """Whatever happens inside, the process is reaped at the end: asked by SIGTERM, then killed."""
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.terminate()
            with anyio.move_on_after(GRACE):
                await process.wait()
            if process.returncode is None:
                process.kill()
            await process.aclose()
