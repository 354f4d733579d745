"""`dsv4ctl start`: from a configuration file to a running control plane, in the foreground."""

from __future__ import annotations

import errno
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from socket import gaierror
from typing import Any

import anyio
import click
import msgspec

from dsv4ctl.controlplane.admin.plane import Plane
from dsv4ctl.controlplane.admin.socket import SocketError, SocketOwnedError, refuse_if_owned, resolve
from dsv4ctl.controlplane.admin.verbs.version import here
from dsv4ctl.controlplane.cli import ports
from dsv4ctl.controlplane.cli.exits import Exit, Failure
from dsv4ctl.controlplane.cli.notify import notify
from dsv4ctl.controlplane.config import installed
from dsv4ctl.controlplane.config.load import check, load
from dsv4ctl.controlplane.config.problems import ConfigError, show
from dsv4ctl.controlplane.config.schema import Config, embedded
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import Telemetry, open_telemetry

UNSAFE = "WARNING: [unsafe] switches off {}: output WILL be corrupted"
#: After one of these the service manager is told that the stop has begun.
_STOPPING = frozenset({Event.STOP_SIGNAL.value, Event.STOP_DONE.value})


@click.command(
    epilog="""
Signals: the first SIGTERM or SIGINT drains, a second one stops now.

\b
Examples:
  dsv4ctl start
  dsv4ctl start cluster.toml
"""
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.pass_obj
def start(given_socket: str | None, file: Path | None) -> None:
    """Start the engines and serve until drained. Without FILE: the embedded prefill and decode engine."""
    config = configured(file, given_socket)
    preflight(config)
    if config.unsafe.off:
        click.secho(UNSAFE.format(", ".join(config.unsafe.off)), fg="red", bold=True, err=True)
    telemetry = open_telemetry(config.log.level, config.log.format, config.log.queue)
    try:
        code = serve(config, file, telemetry)
    finally:
        telemetry.close()
    raise SystemExit(code)


def configured(file: Path | None, given_socket: str | None) -> Config:
    """The configuration, checked; `given_socket` wins over the file's. Raises Failure."""
    facts = installed.facts()
    try:
        config = load(file, facts) if file else embedded()
        if given_socket:
            config = msgspec.structs.replace(config, socket=given_socket)
        check(config, str(file or "(embedded)"), facts)
    except ConfigError as error:
        raise Failure(str(error), Exit.USAGE) from error
    return config


def preflight(config: Config) -> None:
    """What would fail anyway, before anything is started. Raises Failure."""
    for engine in config.engines:
        missing = installed.missing(engine)
        if missing:
            raise Failure(f"engine {engine.name} cannot be started: {missing}", Exit.FAILED)
    try:
        refuse_if_owned(resolve(config.socket))
    except SocketOwnedError as error:
        raise Failure(str(error), Exit.REFUSED) from error
    taken = ports.taken(config)
    if taken:
        raise Failure(taken, Exit.FAILED)


def serve(config: Config, file: Path | None, telemetry: Telemetry) -> int:
    """Runs the control plane; its exit code. Raises Failure."""
    telemetry.emit(
        Event.START_BEGIN,
        version=here()["version"],
        pid=os.getpid(),
        file=str(file) if file else None,
        engines=[engine.name for engine in config.engines],
    )
    for guard in config.unsafe.off:
        telemetry.emit(Event.GUARD_OFF, "warning", guard=guard)
    try:
        return anyio.run(_run, config, telemetry, backend_options={"use_uvloop": find_spec("uvloop") is not None})
    except (SocketError, OSError) as error:
        raise _fault(error, config, telemetry) from error
    except BaseExceptionGroup as group:
        only = _only(group)
        if not isinstance(only, SocketError | OSError):
            raise
        raise _fault(only, config, telemetry) from only


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error inside, where there is just one: a task group wraps what ends it."""
    if len(group.exceptions) != 1:
        return group
    (error,) = group.exceptions
    return _only(error) if isinstance(error, BaseExceptionGroup) else error


def _fault(error: SocketError | OSError, config: Config, telemetry: Telemetry) -> Failure:
    """A fault of the first minute as one line, whoever else got the socket or the port since the preflight."""
    if isinstance(error, SocketOwnedError):
        failure = Failure(str(error), Exit.REFUSED)
    elif isinstance(error, gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
        host = config.gateway.host  # an engine says of its own
        failure = Failure(
            f"gateway.host: expected a name or an address of this machine, found {show(host)}", Exit.FAILED
        )
    elif isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        failure = Failure(ports.taken(config) or str(error), Exit.FAILED)
    else:
        failure = Failure(str(error), Exit.FAILED)
    telemetry.emit(Event.START_FAILED, "error", reason=failure.message)
    return failure


async def _run(config: Config, telemetry: Telemetry) -> int:
    run: Any = import_module("dsv4ctl.controlplane.supervisor.run").run

    def ready(plane: Plane) -> None:
        _tell_manager("READY=1", telemetry)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_tell_stopping, telemetry)
        code: int = await run(config, telemetry=telemetry, ready=ready)
        tasks.cancel_scope.cancel()
    return code


async def _tell_stopping(telemetry: Telemetry) -> None:
    async with telemetry.subscribe() as events:
        async for record in events:
            if record["event"] in _STOPPING:
                _tell_manager("STOPPING=1", telemetry)
                return


def _tell_manager(state: str, telemetry: Telemetry) -> None:
    try:
        notify(state)
    except OSError as error:
        telemetry.emit(Event.NOTIFY_FAILED, "warning", state=state, error=str(error))
