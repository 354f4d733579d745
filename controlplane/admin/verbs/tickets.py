"""`tickets`: every live ticket, as the ranks' ledgers have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4ctl.controlplane.admin import table
from dsv4ctl.controlplane.admin.plane import Json, Plane
from dsv4ctl.controlplane.admin.verb import Nothing, Verb


async def answer(plane: Plane, args: Nothing) -> list[Json]:
    return await plane.tickets()


def render(ranks: Any) -> str:
    rows = (
        (
            rank["engine"],
            rank["rank"],
            ticket["consumer"],
            ticket["room"],
            ticket["state"],
            f"{ticket['readable']}/{ticket['layers']}",
            {space: _ranges(pages) for space, pages in ticket["pages"].items()},
        )
        for rank in ranks
        for ticket in rank.get("tickets", ())
    )
    header = ("engine", "rank", "consumer", "room", "state", "layers", "pages")
    silent = [f"{rank['engine']} rank {rank['rank']}: {rank['error']}" for rank in ranks if "error" in rank]
    return "\n".join([table.table(header, rows, "no live tickets"), *silent])


def _ranges(pages: Sequence[int]) -> str:
    """`0-3,7`: page numbers, in order, as ranges."""
    runs: list[list[int]] = []
    for page in sorted(pages):
        if runs and page == runs[-1][1] + 1:
            runs[-1][1] = page
        else:
            runs.append([page, page])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


VERB = Verb(
    name="tickets",
    method="GET",
    paths=("/tickets",),
    help="Live tickets of every rank. Who holds which pages, for which room.",
    example="dsv4ctl tickets --json",
    args=Nothing,
    answer=answer,
    render=render,
)
