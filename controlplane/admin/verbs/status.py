"""`status`: the control plane in one look."""

from __future__ import annotations

from typing import Any

from dsv4ctl.controlplane.admin import table
from dsv4ctl.controlplane.admin.plane import Json, Plane
from dsv4ctl.controlplane.admin.verb import Nothing, Verb


async def answer(plane: Plane, args: Nothing) -> Json:
    return await plane.status()


def render(status: Any) -> str:
    shown = {
        "state": status["state"],
        "version": status["version"],
        "pid": status["pid"],
        "up": table.seconds(status["uptime_s"]),
        "gateway": status["gateway"],
        "engines": {
            name: table.state(state, paused=name in status["paused"]) for name, state in status["engines"].items()
        },
        "rooms": status["rooms"] or "none",
    }
    if status["unsafe"]:
        shown["UNSAFE"] = f"off: {', '.join(status['unsafe'])}; output will be corrupted"
    if status["quarantined"]:
        shown["quarantined"] = f"{status['quarantined']} pages"
    if status["dropped_log_lines"]:
        shown["log lines dropped"] = status["dropped_log_lines"]
    return table.pairs(shown)


VERB = Verb(
    name="status",
    method="GET",
    paths=("/status",),
    help="The state of the control plane, its engines and rooms.",
    example="dsv4ctl status",
    args=Nothing,
    answer=answer,
    render=render,
)
