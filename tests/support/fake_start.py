"""`dsv4ctl` as a process whose `start` serves a FakePlane instead of engines: `python fake_start.py ARGUMENTS`."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

import anyio

from dsv4ctl.controlplane.admin.plane import Plane
from dsv4ctl.controlplane.admin.server import admin_server
from dsv4ctl.controlplane.admin.socket import resolve
from dsv4ctl.controlplane.cli.main import main
from dsv4ctl.controlplane.config.schema import Config
from dsv4ctl.controlplane.supervisor import run as supervisor
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import Telemetry
from fake_plane import FakePlane

#: Environment variable: which of `FAULTS` is raised instead of serving.
FAULT = "FAKE_START_FAULT"
FAULTS = {
    "port": OSError(98, "Address already in use"),
    "address": OSError(99, "Cannot assign requested address"),
    "host": socket.gaierror(-2, "Name or service not known"),
}


async def run(config: Config, *, telemetry: Telemetry, ready: Callable[[Plane], None]) -> int:
    plane = FakePlane(config)
    plane.telemetry = telemetry
    if fault := FAULTS.get(os.environ.get(FAULT, "")):
        raise ExceptionGroup("tasks", [fault])
    async with admin_server(plane, resolve(config.socket)):
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            telemetry.emit(Event.START_READY, gateway="http://127.0.0.1:30000")
            ready(plane)
            async for number in signals:
                telemetry.emit(Event.STOP_SIGNAL, "warning", signal=number.name)
                return 0
    raise AssertionError("signals never end")


if __name__ == "__main__":
    supervisor.run = run
    main()
