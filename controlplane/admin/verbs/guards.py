"""`guards`: which are off, and (in experiments) switching them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from dsv4ctl.controlplane.admin.errors import AdminError
from dsv4ctl.controlplane.admin.plane import Json, Plane
from dsv4ctl.controlplane.admin.verb import Arguments, Verb, argument
from dsv4ctl.controlplane.config.problems import unknown
from dsv4ctl.controlplane.tickets.types import Guard


class GuardsArguments(Arguments):
    off: Annotated[list[str], argument("Switch this guard off; every other one is on.", "--off")] = msgspec.field(
        default_factory=list
    )
    all_on: Annotated[bool, argument("Switch every guard on.", "--all-on")] = False


async def answer(plane: Plane, args: GuardsArguments) -> Json:
    if not args.off and not args.all_on:
        return {"off": (await plane.status())["unsafe"]}
    if args.off and args.all_on:
        raise AdminError("bad_request", "expected guards that are off, or `all_on`, not both")
    names = [guard.value for guard in Guard]
    for name in args.off:
        if name not in names:
            raise AdminError("bad_request", unknown("guard", name, names))
    if not plane.config.unsafe.runtime:
        raise AdminError("refused", "guards are fixed: the configuration does not say `unsafe.runtime = true`")
    return await plane.set_guards(args.off)


def render(answer: Any) -> str:
    off = answer["off"]
    return f"OFF: {', '.join(off)}; output will be corrupted" if off else "every guard is on"


VERB = Verb(
    name="guards",
    method="POST",
    paths=("/guards",),
    help="Show which guards are off, or switch them. Switching needs `unsafe.runtime`; output WILL be corrupted.",
    example="dsv4ctl guards --off indexer_ticket",
    args=GuardsArguments,
    answer=answer,
    render=render,
)
