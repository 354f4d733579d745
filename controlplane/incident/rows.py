"""The rows of the incident table: which deployment each needs, and which guards are off while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import product
from typing import Literal, NamedTuple

from dsv4ctl.controlplane.tickets.types import TICKET_GUARDS, Guard

Dtype = Literal["bf16", "fp8"]
Topology = Literal["pd", "single"]

#: `guards` of a row with every guard on, and of one with every ticket off.
ON, TICKETS = "on", "tickets"


class UnknownRowError(ValueError):
    """The message names the row that does not exist, and those that do."""


class Deployment(NamedTuple):
    """What is started: rows with the same deployment share one, and differ by what is switched at run time."""

    index_k: Dtype
    hicache: bool
    topology: Topology

    def __str__(self) -> str:
        return f"{self.topology}-{self.index_k}-hicache-{'on' if self.hicache else 'off'}"


class Row(NamedTuple):
    """One line of the table. `guards` is `on`, `tickets`, or the one guard that is off.

    `waves`: requests are aborted in waves and asked again. `must_damage`: a run in which this row shows no damage
    has failed to show what it is for.
    """

    name: str
    deployment: Deployment
    guards: str = ON
    waves: bool = False
    must_damage: bool = False

    @property
    def off(self) -> tuple[str, ...]:
        """Guards switched off. Without `verdict` the digests would (rightly) stop the damaged rooms."""
        if self.guards == ON:
            return ()
        if self.guards == TICKETS:
            return (*(guard.value for guard in TICKET_GUARDS), Guard.VERDICT.value)
        return (self.guards, Guard.VERDICT.value)

    @property
    def guarded(self) -> bool:
        return self.guards == ON


#: Where the incident happened.
THERE = Deployment("bf16", True, "pd")
_WITHOUT_HICACHE = THERE._replace(hicache=False)
_DTYPES: tuple[Dtype, ...] = ("bf16", "fp8")
_TOPOLOGIES: tuple[Topology, ...] = ("pd", "single")
_ONE_OFF = (Guard.INDEXER, Guard.ATTENTION, Guard.SENDER)


def quick_rows() -> tuple[Row, ...]:
    """One prefill/decode pair kept up; the last row is the control of the abort waves as well."""
    off = [Row(_off(guard), THERE, guard.value, must_damage=True) for guard in _ONE_OFF]
    waves = Row(_off(Guard.QUIESCE), THERE, Guard.QUIESCE.value, waves=True)
    return (Row("on", THERE), *off, waves, Row("on-again", THERE, waves=True))


def full_rows() -> tuple[Row, ...]:
    """The matrix, each cell with guards on and with tickets off; then one guard off at a time."""
    cells = [Deployment(*cell) for cell in product(_DTYPES, (True, False), _TOPOLOGIES)]
    rows = [
        Row(f"{cell}-{'guards-on' if guards == ON else 'tickets-off'}", cell, guards)
        for cell in cells
        for guards in (ON, TICKETS)
    ]
    rows += [Row(_off(guard), THERE, guard.value, must_damage=True) for guard in _ONE_OFF]
    for cell in (THERE, _WITHOUT_HICACHE):
        suffix = "hicache-on" if cell.hicache else "hicache-off"
        rows.append(Row(f"waves-{suffix}-guards-on", cell, waves=True))
        rows.append(Row(f"waves-{suffix}-quiesce-off", cell, Guard.QUIESCE.value, waves=True))
    return tuple(rows)


def select(rows: Sequence[Row], names: Sequence[str]) -> tuple[Row, ...]:
    """The rows of these names, in the order of `rows`; all of them if none is named. Raises UnknownRowError."""
    valid = [row.name for row in rows]
    for name in names:
        if name not in valid:
            near = get_close_matches(name, valid, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UnknownRowError(f"no row {name!r}; {hint}there are: {', '.join(valid)}")
    return tuple(row for row in rows if not names or row.name in names)


def by_deployment(rows: Sequence[Row]) -> list[tuple[Deployment, list[Row]]]:
    """Rows that share a deployment, together; deployments in the order of their first row."""
    groups: dict[Deployment, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.deployment, []).append(row)
    return list(groups.items())


def _off(guard: Guard) -> str:
    return f"{guard.value.removesuffix('_ticket')}-off"
