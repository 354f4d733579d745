"""`rooms [ID]`: rooms in flight, or the whole story of one."""

from __future__ import annotations

from typing import Annotated, Any

from dsv4ctl.controlplane.admin import table
from dsv4ctl.controlplane.admin.errors import AdminError
from dsv4ctl.controlplane.admin.plane import Json, Plane
from dsv4ctl.controlplane.admin.verb import Arguments, Verb, argument

#: Shown in another way; the history says what `timings` say.
_NO_FACTS = frozenset({"room", "generation", "history", "timings", "detail", "age_s"})


class RoomsArguments(Arguments):
    room: Annotated[int | None, argument("One room, ended ones included.", "ROOM")] = None


async def answer(plane: Plane, args: RoomsArguments) -> list[Json]:
    rooms = await plane.rooms(args.room)
    if args.room is not None and not rooms:
        raise AdminError("not_found", f"no room {args.room}: neither in flight nor among those remembered")
    return rooms


def render(rooms: Any) -> str:
    if any("history" in room for room in rooms):
        return "\n\n".join(_story(room) for room in rooms)
    header = ("room", "state", "age", "engines", "request", "reason")
    rows = (
        (
            room["key"],
            room["state"],
            table.seconds(room["age_s"]),
            room["engines"],
            room["request_id"],
            room["reason"],
        )
        for room in rooms
    )
    return table.table(header, rows, "no rooms in flight")


def _story(room: Json) -> str:
    facts = {name: value for name, value in room.items() if name not in _NO_FACTS}
    facts |= {"age": table.seconds(room["age_s"]), **room["detail"]}
    history = [f"  {entry['at_s']:>9.4f}s  {entry['state']}" for entry in room["history"]]
    return "\n".join([table.pairs(facts), "history", *history])


VERB = Verb(
    name="rooms",
    method="GET",
    paths=("/rooms", "/rooms/{room}"),
    help="Rooms in flight, or one room with its history.",
    example="dsv4ctl rooms 4611686018427387904",
    args=RoomsArguments,
    answer=answer,
    render=render,
)
