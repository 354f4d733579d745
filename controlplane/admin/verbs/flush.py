"""`flush`: forget every cached page."""

from __future__ import annotations

from typing import Any

from dsv4ctl.controlplane.admin.plane import Json, Plane
from dsv4ctl.controlplane.admin.verb import Nothing, Verb


async def answer(plane: Plane, args: Nothing) -> Json:
    return await plane.flush()


def render(answer: Any) -> str:
    return f"flushed: {' '.join(answer['flushed']) or 'none'}"


VERB = Verb(
    name="flush",
    method="POST",
    paths=("/flush",),
    help="Drop the cached pages of every engine, on device and host. Refused by an engine that is busy.",
    example="dsv4ctl flush",
    args=Nothing,
    answer=answer,
    render=render,
    timeout=60.0,
)
