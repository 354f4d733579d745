"""`logs [--follow]`: events, the latest ones or as they happen."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any

from dsv4ctl.controlplane.admin import table
from dsv4ctl.controlplane.admin.plane import Json, Plane
from dsv4ctl.controlplane.admin.verb import LINES, Arguments, Verb, argument
from dsv4ctl.controlplane.telemetry.log import FIRST


class LogsArguments(Arguments):
    follow: Annotated[bool, argument("Go on with live events until interrupted.", "--follow")] = False


async def answer(plane: Plane, args: LogsArguments) -> AsyncGenerator[Json, None]:
    return _follow(plane) if args.follow else _recent(plane)


async def _recent(plane: Plane) -> AsyncGenerator[Json, None]:
    for record in plane.telemetry.recent():
        yield record


async def _follow(plane: Plane) -> AsyncGenerator[Json, None]:
    async with plane.subscribe() as stream:
        # Nothing can be emitted between these two lines: no await.
        for record in plane.telemetry.recent():
            yield record
        async for record in stream:
            yield record


def render(record: Any) -> str:
    rest = {name: value for name, value in record.items() if name not in FIRST[:3]}
    line = f"{record['ts'][11:23]} {record['level']:<7} {record['event']:<20}"
    return f"{line} {table.cell(rest)}" if rest else line.rstrip()


VERB = Verb(
    name="logs",
    method="GET",
    paths=("/logs",),
    help="The latest events, or live ones. With --follow they go on until interrupted.",
    example="dsv4ctl logs --follow --json",
    args=LogsArguments,
    answer=answer,
    render=render,
    content_type=LINES,
    timeout=None,
)
