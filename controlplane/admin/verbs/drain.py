"""`drain [ENGINE...]`: finish what runs, admit nothing new."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from dsv4ctl.controlplane.admin.names import check_engines
from dsv4ctl.controlplane.admin.plane import Json, Plane
from dsv4ctl.controlplane.admin.verb import Arguments, Verb, argument
from dsv4ctl.controlplane.config.schema import Seconds


class DrainArguments(Arguments):
    engines: Annotated[list[str], argument("Engines to drain; none: all, and the control plane ends.", "ENGINE")] = (
        msgspec.field(default_factory=list)
    )
    deadline_s: Annotated[
        Seconds | None,
        argument(
            "Seconds for all of it; by default `deadlines.drain`. Rooms that are left are aborted when `deadlines.ack` "
            "+ `deadlines.fence` of it remain, or half of it if that is less; the rest is for their acks and the stop.",
            "--deadline",
        ),
    ] = None


async def answer(plane: Plane, args: DrainArguments) -> Json:
    check_engines(plane, args.engines)
    return await plane.drain(args.engines, args.deadline_s)


def render(answer: Any) -> str:
    lines = [f"drained: {' '.join(answer['drained']) or 'none'}"]
    if answer["left"]:
        left = " ".join(map(str, answer["left"]))
        lines.append(f"aborted at the deadline, {len(answer['left'])} room(s): {left}")
    return "\n".join(lines)


VERB = Verb(
    name="drain",
    method="POST",
    paths=("/drain",),
    help="Drain engines: open rooms finish, no new one begins. After draining all engines the control plane ends.",
    example="dsv4ctl drain prefill0 --deadline 60",
    args=DrainArguments,
    answer=answer,
    render=render,
    exit_code=lambda answer: 1 if answer["left"] else 0,
    timeout=None,
)
