"""`version`: what runs."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

from dsv4ctl.controlplane.admin import table
from dsv4ctl.controlplane.admin.plane import Json, Plane
from dsv4ctl.controlplane.admin.verb import Nothing, Verb
from dsv4ctl.controlplane.link.wire import WIRE_VERSION


def here() -> Json:
    """The versions of this process."""
    return {"version": version("dsv4ctl"), "wire": WIRE_VERSION, "python": platform.python_version()}


async def answer(plane: Plane, args: Nothing) -> Json:
    return {**here(), "pid": os.getpid()}


def render(answer: Any) -> str:
    return table.pairs(answer)


VERB = Verb(
    name="version",
    method="GET",
    paths=("/version",),
    help="Versions of dsv4ctl, its wire format and Python.",
    example="dsv4ctl version --json",
    args=Nothing,
    answer=answer,
    render=render,
)
