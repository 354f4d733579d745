"""Commands made from the admin verbs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_origin

import anyio
import click
import msgspec

from dsv4ctl.controlplane.admin.client import NoControlPlaneError, connect
from dsv4ctl.controlplane.admin.errors import EXIT_CODE, AdminError
from dsv4ctl.controlplane.admin.socket import resolve
from dsv4ctl.controlplane.admin.verb import JSON, LINES, METRICS, Field, Verb, fields
from dsv4ctl.controlplane.cli.exits import Exit, Failure
from dsv4ctl.controlplane.config.schema import Seconds


class RoomNumber(click.ParamType[int]):
    """A room as `rooms` lists it: `7.1` (with its generation) or `7`."""

    name = "room"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number, _, generation = str(value).partition(".")
        if not number.isdecimal() or not (generation or "0").isdecimal():
            self.fail(f"expected a room number such as 7 or 7.1, found {value!r}", param, ctx)
        return int(number)


class Duration(click.ParamType[float]):
    """A deadline as the configuration takes it: `nan` is no number of seconds, and in JSON it would be none at all."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return msgspec.convert(value, Seconds, strict=False)
        except msgspec.ValidationError:
            self.fail(f"expected a number of seconds above 0, found {value!r}", param, ctx)


ROOM = RoomNumber()
SECONDS = Duration()


def command(verb: Verb[Any]) -> click.Command:
    """The command of one verb: its arguments, `--json`, and its answer as text for people."""

    @click.pass_obj
    def call(socket: str | None, /, as_json: bool = False, **given: Any) -> None:
        absent: tuple[Any, ...] = (None, False, ())
        arguments = {name: value for name, value in given.items() if not any(value is one for one in absent)}
        raise SystemExit(_call(verb, socket, arguments, as_json))

    params = [_parameter(field) for field in fields(verb.args)]
    if verb.content_type != METRICS:
        what = "Print JSON objects, one a line." if verb.content_type == LINES else "Print the answer as JSON."
        params.append(click.Option(["--json", "as_json"], is_flag=True, help=what))
    epilog = f"Example: {verb.example}"
    return click.Command(verb.name, params=params, callback=call, help=verb.help, epilog=epilog)


def _parameter(field: Field) -> click.Parameter:
    assert field.command is not None
    many = get_origin(field.kind) is list
    if field.command.startswith("--"):
        flag = field.kind is bool
        return click.Option(
            [field.command, field.name],
            type=None if flag or many else SECONDS if field.kind is float else field.kind,
            is_flag=flag or None,  # False: click would take a value that begins with `-` for another option
            multiple=many,
            help=field.help,
        )
    kind = ROOM if field.command == "ROOM" else None
    return click.Argument(
        [field.name], type=kind, metavar=f"[{field.command}]{'...' * many}", required=False, nargs=-1 if many else 1
    )


def _call(verb: Verb[Any], socket: str | None, arguments: Mapping[str, Any], as_json: bool) -> int:
    try:
        with asking(socket, verb.timeout):
            return anyio.run(_speak, verb, socket, arguments, as_json)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


@contextmanager
def asking(socket: str | None, timeout: float | None) -> Iterator[None]:
    """Whatever keeps the control plane from answering ends the command with its message and exit code."""
    try:
        yield
    except AdminError as error:
        raise Failure(error.message, Exit(EXIT_CODE[error.code])) from error
    except NoControlPlaneError as error:
        raise Failure(str(error), Exit.NOBODY) from error
    except TimeoutError as error:
        message = f"the control plane at {resolve(socket)} gave no answer within {timeout:g} s"
        raise Failure(message, Exit.FAILED) from error


async def _speak(verb: Verb[Any], socket: str | None, arguments: Mapping[str, Any], as_json: bool) -> int:
    async with connect(resolve(socket)) as client:
        if verb.content_type == LINES:
            async for line in client.lines(verb.paths[0], arguments):
                click.echo(line.decode().rstrip("\n") if as_json else verb.render(msgspec.json.decode(line)))
            return Exit.OK
        body = await client.call(verb.method, verb.paths[0], arguments, verb.timeout)
    answer = msgspec.json.decode(body) if verb.content_type == JSON else body.decode()
    click.echo(pretty(answer) if as_json else verb.render(answer))
    return verb.exit_code(answer)


def pretty(answer: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()
