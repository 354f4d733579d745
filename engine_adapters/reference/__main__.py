"""One rank of the reference engine as a process: started by the control plane, ends with it."""

from __future__ import annotations

import os
import signal
import sys

import anyio

from dsv4ctl.controlplane.link.client import LinkRefusedError
from dsv4ctl.controlplane.link.url import local_url
from dsv4ctl.engine_adapters.reference.engine import Engine
from dsv4ctl.engine_adapters.reference.log import Log
from dsv4ctl.engine_adapters.reference.options import read
from dsv4ctl.engine_adapters.reference.server import ListenError, serve

EXIT_FAILED = 1
_MAX_BODY_BYTES = 64 * 1024 * 1024


def main() -> int:
    launch, options = read(dict(os.environ))
    log = Log(engine=options.name, rank=launch.rank, incarnation=launch.incarnation)

    def end(reason: str) -> None:
        """From any thread, at once: pages, threads and NIXL's registrations go with the process."""
        log("engine.ended", "warning", reason=reason)
        os._exit(EXIT_FAILED)  # noqa: TID251 - a thread may be stuck in native code; nothing here outlives the process

    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # noqa: TID251 - the supervisor has drained us
    engine = Engine(launch, options, log, end)
    try:
        engine.start()
    except RuntimeError as broken:  # of torch: no memory, a rank that is gone, a kernel that can't be launched
        log("engine.failed", "error", error=str(broken))
        return EXIT_FAILED

    async def run() -> None:
        if launch.rank:  # clients talk to the first rank
            await _report(engine, "")
            return
        async with anyio.create_task_group() as tasks:

            def ready(port: int) -> None:
                tasks.start_soon(_report, engine, local_url(options.host, port))

            await serve(
                engine,
                options.role,
                launch.model,
                options.host,
                options.port,
                max_body_bytes=_MAX_BODY_BYTES,
                ready=ready,
                vocab=engine.geometry.vocab,
            )

    code = 0
    try:
        anyio.run(run)
    except* (ListenError, LinkRefusedError, OSError) as group:
        for error in group.exceptions:
            log("engine.failed", "error", error=str(error))
        code = EXIT_FAILED
    return code


async def _report(engine: Engine, url: str) -> None:
    interval = await anyio.to_thread.run_sync(engine.connect, url)
    while True:
        engine.tick()
        await anyio.sleep(interval)


if __name__ == "__main__":
    sys.exit(main())
