"""Child processes that are always ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import Process

#: Seconds that a child has after SIGTERM.
GRACE = 8.0


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
