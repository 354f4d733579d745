"""`abort ROOM|--all`: end rooms on both sides."""

from __future__ import annotations

from typing import Annotated, Any

from dsv4ctl.controlplane.admin.errors import AdminError
from dsv4ctl.controlplane.admin.plane import Json, Plane
from dsv4ctl.controlplane.admin.verb import Arguments, Verb, argument


class AbortArguments(Arguments):
    room: Annotated[int | None, argument("The room to abort.", "ROOM")] = None
    all: Annotated[bool, argument("Abort every room in flight.", "--all")] = False
    reason: Annotated[str, argument("Kept with the room and logged.", "--reason", max_length=200)] = "operator"


async def answer(plane: Plane, args: AbortArguments) -> Json:
    if (args.room is None) is not args.all:
        raise AdminError("bad_request", "expected one room, or `--all` (in JSON: `all`) for every room in flight")
    if args.room is not None:
        rooms = await plane.rooms(args.room)
        if not rooms:
            raise AdminError("not_found", f"no room {args.room}: neither in flight nor among those remembered")
        if all(room["state"] in ("closed", "aborted") for room in rooms):
            raise AdminError("refused", f"room {args.room} has already ended: {rooms[-1]['state']}")
    return await plane.abort(args.room, args.reason)


def render(answer: Any) -> str:
    keys = answer["aborted"]
    return f"aborting {len(keys)} room(s): {' '.join(map(str, keys))}" if keys else "no rooms in flight"


VERB = Verb(
    name="abort",
    method="POST",
    paths=("/abort",),
    help="Abort one room, or all. Writers stop; pages are freed once both sides are quiet.",
    example="dsv4ctl abort --all --reason 'bad prompt batch'",
    args=AbortArguments,
    answer=answer,
    render=render,
    timeout=30.0,
)
