"""`trace`: what the ranks' trace rings hold, as frames of the trace format."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from dsv4ctl.controlplane.admin.plane import Json, Plane
from dsv4ctl.controlplane.admin.verb import LINES, Arguments, Verb, argument


class TraceArguments(Arguments):
    follow: Annotated[bool, argument("Go on with what is recorded later, until interrupted.", "--follow")] = False


async def answer(plane: Plane, args: TraceArguments) -> AsyncIterator[Json]:
    return plane.trace(args.follow)


def render(part: Any) -> str:
    who = f"{part['engine']}/{part['rank']}"
    return f"{who}: {part['error']}" if "error" in part else f"{who}: {len(part['events'])} characters of events"


VERB = Verb(
    name="trace",
    method="GET",
    paths=("/trace",),
    help="Event traces of every rank: frames of the trace format, in base64, each part with its rank's identity.",
    example="dsv4ctl trace record run.trace",
    args=TraceArguments,
    answer=answer,
    render=render,
    content_type=LINES,
    timeout=None,
)
