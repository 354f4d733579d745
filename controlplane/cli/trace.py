"""`dsv4ctl trace`: record what the ranks did, look for races in it, and look at it."""

from __future__ import annotations

import base64
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import anyio
import click
import msgspec

from dsv4ctl.controlplane.admin import table
from dsv4ctl.controlplane.admin.client import connect
from dsv4ctl.controlplane.admin.socket import resolve
from dsv4ctl.controlplane.admin.verbs import trace as verb
from dsv4ctl.controlplane.cli.exits import Exit, Failure
from dsv4ctl.controlplane.cli.verbs import SECONDS, asking, pretty
from dsv4ctl.controlplane.trace.check import check as find_races
from dsv4ctl.controlplane.trace.file import TraceError, TraceFile, Writer, older
from dsv4ctl.controlplane.trace.perfetto import export as perfetto_pieces
from dsv4ctl.controlplane.trace.races import Report
from dsv4ctl.controlplane.trace.show import timeline

#: MiB of one trace file: minutes of a busy engine.
LIMIT_MIB = 256
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group(
    epilog="\b\nExamples:\n  dsv4ctl trace record run.trace\n  dsv4ctl trace check run.trace\n  dsv4ctl trace show 7"
)
def trace() -> None:
    """Event traces: record, check for races, export, show one room."""


@trace.command(epilog="Example: dsv4ctl trace record run.trace --seconds 60")
@click.argument("file", type=_FILE)
@click.option("--seconds", type=SECONDS, help="Go on for so long. Default: what the ranks hold now.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=LIMIT_MIB,
    show_default=True,
    metavar="MIB",
    help="At so many MiB, FILE becomes FILE.1 and a new FILE begins.",
)
@click.pass_obj
def record(socket: str | None, file: Path, seconds: float | None, limit: int) -> None:
    """Write the event rings of every rank to FILE."""
    try:
        recorded = _record(socket, file, seconds, limit << 20)
    except OSError as error:
        raise Failure(f"{file} can't be written: {error.strerror}", Exit.FAILED) from error
    except KeyboardInterrupt as error:
        raise Failure(f"interrupted: {file} has what came until then", Exit.INTERRUPTED) from error
    rotated = f"; {older(file)} has what came before" if recorded.rotated else ""
    click.echo(f"{file}: {', '.join(recorded.ranks)}{rotated}")


class _Recorded(NamedTuple):
    ranks: list[str]  #: that told events
    errors: list[str]  #: what went wrong with others
    rotated: int


def _record(socket: str | None, file: Path, seconds: float | None, limit: int = LIMIT_MIB << 20) -> _Recorded:
    """`file` is left as it was until some rank has told something. Raises Failure if none does, OSError."""
    with asking(socket, None):
        recorded = anyio.run(_told, socket, file, seconds, limit)
    for silent in recorded.errors:
        click.echo(f"dsv4ctl: {silent}", err=True)
    if not recorded.ranks:
        raise Failure("no rank told its events", Exit.FAILED)
    return recorded


async def _told(socket: str | None, file: Path, seconds: float | None, limit: int) -> _Recorded:
    """Raises as `connect` and the client's calls do, OSError."""
    parts: Counter[str] = Counter()
    errors: dict[str, None] = {}
    writer: Writer | None = None
    with ExitStack() as files:
        async with connect(resolve(socket)) as client:
            with anyio.move_on_after(seconds):
                async for line in client.lines(verb.VERB.paths[0], {"follow": seconds is not None}):
                    part = msgspec.json.decode(line)
                    name = f"{part['engine']}/{part['rank']}"
                    if "error" in part:
                        errors[f"{name}: {part['error']}"] = None
                        continue
                    parts[name] += 1
                    identity, events = (base64.b64decode(part[field]) for field in ("identity", "events"))
                    writer = writer or files.enter_context(Writer(file, limit))
                    writer.write(part["incarnation"], identity, events)
    return _Recorded(sorted(parts), list(errors), writer.rotated if writer else 0)


@trace.command(
    epilog="Exit code 0: no race. 1: races were found. 2: FILE can't be read, or holds no event.\n\n"
    "Example: dsv4ctl trace check run.trace"
)
@click.argument("file", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print every race as JSON.")
def check(file: Path, as_json: bool) -> None:
    """Replay FILE and report each read before land, write under a reader, early reuse and stale access."""
    opened = _open(file)
    try:
        report = find_races(opened.ranks, opened.merged())
    except TraceError as error:
        raise Failure(str(error), Exit.USAGE) from error
    if not report.events:
        raise Failure(f"{file} holds no event: nothing can be said of it", Exit.USAGE)
    report.cut = opened.cut
    click.echo(pretty(_as_json(report)) if as_json else _as_text(report))
    raise SystemExit(Exit.FAILED if report.accesses else Exit.OK)


def _as_json(report: Report) -> dict[str, object]:
    races = [{**msgspec.to_builtins(race), "sentence": race.sentence()} for race in report.races]
    return {
        "ranks": report.ranks,
        "events": report.events,
        "accesses": report.accesses,
        "consumers": report.consumers(),
        "races": races,
        "dropped": report.dropped,
        "gaps": report.resets,
        "cut": report.cut,
    }


def _as_text(report: Report) -> str:
    lines = []
    rows = report.rows()
    if rows:
        names = ("kind", "who", "pool", "against", "rank", "rooms", "accesses")
        lines += [table.table(names, ([row[name] for name in names] for row in rows), ""), ""]
        lines += [f"{row['example']}\n" for row in rows]
    found = f"{report.accesses} racing accesses" if report.accesses else "no race"
    lines.append(f"{report.events} events of {', '.join(report.ranks) or 'no rank'}: {found}")
    if report.dropped:
        lines.append(f"{report.dropped} of them are counted only: too many different ones")
    if report.resets:
        lines.append(f"{report.resets} gaps: events were lost there, and what they began is unknown")
    if report.cut:
        lines.append(report.cut)
    return "\n".join(lines)


@trace.command(epilog="Example: dsv4ctl trace export --perfetto run.trace run.json")
@click.option("--perfetto", is_flag=True, help="Chrome trace JSON, for ui.perfetto.dev.")
@click.argument("file", type=_FILE)
@click.argument("output", type=_FILE)
def export(perfetto: bool, file: Path, output: Path) -> None:
    """Write FILE in another format to OUTPUT."""
    if not perfetto:
        raise click.UsageError("expected --perfetto, the one format there is")
    opened = _open(file)
    try:
        with output.open("wb") as written:
            for piece in perfetto_pieces(opened.ranks, opened.ahead_ns(), opened.merged()):
                written.write(piece)
    except OSError as error:
        raise Failure(f"{output} can't be written: {error.strerror}", Exit.FAILED) from error
    click.echo(f"{output}: open it in ui.perfetto.dev")


@trace.command(epilog="Example: dsv4ctl trace show 7 run.trace")
@click.argument("room")
@click.argument("file", type=_FILE, required=False)
@click.pass_obj
def show(socket: str | None, room: str, file: Path | None) -> None:
    """The timeline of ROOM (7 or 7.1), from FILE or from what the ranks hold now."""
    if file is not None:
        _show(room, file)
        return
    with tempfile.TemporaryDirectory(prefix="dsv4ctl-trace-") as folder:
        held = Path(folder) / "now.trace"
        _record(socket, held, None)
        _show(room, held)


def _show(room: str, file: Path) -> None:
    opened = _open(file)
    shown = False
    for line in timeline(room, opened.ranks, opened.ahead_ns(), opened.merged):
        click.echo(line)
        shown = True
    if not shown:
        raise Failure(f"no event of room {room} is in the trace", Exit.NOT_FOUND)


def _open(file: Path) -> TraceFile:
    try:
        return TraceFile(file)
    except TraceError as error:
        raise Failure(str(error), Exit.USAGE) from error
    except OSError as error:
        raise Failure(f"{file} can't be read: {error.strerror}", Exit.USAGE) from error
