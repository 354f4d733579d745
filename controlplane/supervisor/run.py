"""Everything of `dsv4ctl start` once configuration and logging are set up."""

from __future__ import annotations

import signal
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from dsv4ctl.controlplane.admin.plane import Plane
from dsv4ctl.controlplane.admin.server import admin_server
from dsv4ctl.controlplane.admin.socket import resolve
from dsv4ctl.controlplane.config.schema import Config
from dsv4ctl.controlplane.gateway.app import serve_gateway
from dsv4ctl.controlplane.scheduler.fleet import EngineState
from dsv4ctl.controlplane.supervisor.folder import own_folder
from dsv4ctl.controlplane.supervisor.launch import AdapterLauncher
from dsv4ctl.controlplane.supervisor.plane import SupervisedPlane
from dsv4ctl.controlplane.supervisor.runner import Launcher
from dsv4ctl.controlplane.supervisor.supervisor import Supervisor
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import Telemetry

#: Exit codes of `run`: drained, or given up / stopped without a drain.
DRAINED, GIVEN_UP = 0, 1

LauncherFactory = Callable[[Config, str], Launcher]


async def run(
    config: Config,
    *,
    telemetry: Telemetry,
    ready: Callable[[Plane], None],
    launcher: LauncherFactory = AdapterLauncher,
) -> int:
    """Serves until everything is drained (0), or the start is given up or a second signal stops it (1).

    `ready` is called once, when every engine is. Signals: SIGTERM or SIGINT drains, a second one stops now.
    Raises SocketError (admin socket) or OSError (gateway port) before any engine is started.
    """
    with own_folder(config) as folder:
        link = str(folder / "link.sock")
        supervisor = Supervisor(config, telemetry, link, launcher(config, link))
        plane = SupervisedPlane(supervisor)
        async with (
            admin_server(plane, resolve(config.socket)),
            serve_gateway(config.gateway, supervisor.fleet, supervisor.desk, plane, telemetry) as url,
        ):
            plane.gateway = url
            code = await serve(supervisor, plane, ready)
            supervisor.desk.refusing = "stopped"
    telemetry.emit(Event.STOP_DONE, exit_code=code)
    return code


async def serve(supervisor: Supervisor, plane: SupervisedPlane, ready: Callable[[Plane], None]) -> int:
    """The engines' lives. When this returns, every engine process is reaped.

    But for those of an earlier control plane that a second signal leaves in the registry: it does not wait until they
    are adopted. The first does, as every drain.
    """
    code = GIVEN_UP
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_signals, plane, tasks)
        await supervisor.start(tasks)
        code = await _until_over(supervisor, plane, ready)
        tasks.cancel_scope.cancel()
    return code


async def _until_over(supervisor: Supervisor, plane: SupervisedPlane, ready: Callable[[Plane], None]) -> int:
    telemetry, fleet = supervisor.telemetry, supervisor.fleet

    def all_are(state: EngineState) -> bool:
        return all(engine.state is state for engine in fleet)

    def failed() -> bool:
        return any(engine.state is EngineState.FAILED for engine in fleet)

    await supervisor.changes.until(lambda: failed() or all_are(EngineState.READY) or all_are(EngineState.DRAINED))
    if failed():
        telemetry.emit(Event.START_FAILED, "error", reason=fleet.why_not())
        return GIVEN_UP
    if all_are(EngineState.READY):
        telemetry.emit(Event.START_READY, gateway=plane.gateway)
        ready(plane)
    await supervisor.changes.until(lambda: all_are(EngineState.DRAINED))
    return DRAINED


async def _signals(plane: SupervisedPlane, tasks: TaskGroup) -> None:
    """The first asks, the second insists."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            action = "stop now" if plane.stopping else "drain"
            plane.telemetry.emit(Event.STOP_SIGNAL, "warning", signal=number.name, action=action)
            if plane.stopping:
                tasks.cancel_scope.cancel()
                return
            plane.stopping = True
            tasks.start_soon(plane.drain, [], None)
