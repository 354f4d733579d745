"""`metrics`: what Prometheus scrapes."""

from __future__ import annotations

from typing import Any

from dsv4ctl.controlplane.admin.plane import Plane
from dsv4ctl.controlplane.admin.verb import METRICS, Nothing, Verb


async def answer(plane: Plane, args: Nothing) -> str:
    return plane.telemetry.metrics.render(await plane.status(), await plane.engines()).decode()


def render(answer: Any) -> str:
    return str(answer).rstrip()


VERB = Verb(
    name="metrics",
    method="GET",
    paths=("/metrics",),
    help="Metrics in Prometheus' text format.",
    example="dsv4ctl metrics",
    args=Nothing,
    answer=answer,
    render=render,
    content_type=METRICS,
)
