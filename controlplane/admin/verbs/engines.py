"""`engines`: every engine, its processes and its ledger."""

from __future__ import annotations

from typing import Any

from dsv4ctl.controlplane.admin import table
from dsv4ctl.controlplane.admin.plane import Json, Plane
from dsv4ctl.controlplane.admin.verb import Nothing, Verb


async def answer(plane: Plane, args: Nothing) -> list[Json]:
    return await plane.engines()


def render(engines: Any) -> str:
    header = (
        "engine",
        "role",
        "state",
        "pid",
        "url",
        "restarts",
        "tickets",
        "leased",
        "quarantined",
        "queues",
    )
    return table.table(header, (_row(engine) for engine in engines), "no engines")


def _row(engine: Json) -> tuple[Any, ...]:
    ledgers = (engine.get("ledger") or {}).values()
    return (
        engine["name"],
        engine["role"],
        table.state(engine["state"], paused=engine["verdict"] == "paused"),
        engine["pid"],
        engine["url"],
        engine["restarts"],
        sum(ledger.get("tickets", 0) for ledger in ledgers),
        sum(sum(ledger.get("pages_leased", {}).values()) for ledger in ledgers),
        sum(sum(ledger.get("pages_quarantined", {}).values()) for ledger in ledgers),
        {name: length for name, length in (engine.get("queues") or {}).items() if length},
    )


VERB = Verb(
    name="engines",
    method="GET",
    paths=("/engines",),
    help="The engines. State, process, restarts, live tickets, leased and quarantined pages, queues.",
    example="dsv4ctl engines",
    args=Nothing,
    answer=answer,
    render=render,
)
