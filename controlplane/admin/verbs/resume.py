"""`resume [ENGINE...]`: undo a drain."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from dsv4ctl.controlplane.admin.names import check_engines
from dsv4ctl.controlplane.admin.plane import Json, Plane
from dsv4ctl.controlplane.admin.verb import Arguments, Verb, argument


class ResumeArguments(Arguments):
    engines: Annotated[list[str], argument("Engines to resume; none: all that drain.", "ENGINE")] = msgspec.field(
        default_factory=list
    )


async def answer(plane: Plane, args: ResumeArguments) -> Json:
    check_engines(plane, args.engines)
    return await plane.resume(args.engines)


def render(answer: Any) -> str:
    return f"resumed: {' '.join(answer['resumed']) or 'none'}"


VERB = Verb(
    name="resume",
    method="POST",
    paths=("/resume",),
    help="Admit rooms again on drained or draining engines.",
    example="dsv4ctl resume prefill0",
    args=ResumeArguments,
    answer=answer,
    render=render,
)
