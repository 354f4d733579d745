"""The rows of the incident table: which deployment each needs, and which guards are off while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import product
from typing import Literal, NamedTuple

from dsv4ctl.controlplane.tickets.types import TICKET_GUARDS, Guard

Dtype = Literal["bf16", "fp8"]
Topology = Literal["pd", "single"]
#: How a storm ends its requests.
How = Literal["all", "half", "staggered", "peer-back", "poisoned"]

#: `guards` of a row with every guard on, and of one with every ticket off.
ON, TICKETS = "on", "tickets"


class UnknownRowError(ValueError):
    """The message names the row that does not exist, and those that do."""


class Deployment(NamedTuple):
    """What is started: rows with the same deployment share one, and differ by what is switched at run time.

    `setting`: what is made hard there (`configuration.SETTINGS`); empty: nothing.
    """

    index_k: Dtype
    hicache: bool
    topology: Topology
    setting: str = ""

    def __str__(self) -> str:
        name = f"{self.topology}-{self.index_k}-hicache-{'on' if self.hicache else 'off'}"
        return f"{name}-{self.setting}" if self.setting else name


class Row(NamedTuple):
    """One line of the table. `guards` is `on`, `tickets`, or the one guard that is off.

    `waves`: requests are aborted in waves and asked again. `must_damage`, `must_stick`: a run in which this row shows
    no damage, or in which nothing is stuck, has failed to show what it is for. `fault`: what strikes one rank in every
    `STRUCK`th group of sessions. `storm`: what comes before the conversations. `must_retract`: they are more than the
    decode pool has room for, asked again until one gives way. `group`: what `--only` calls it with its like. `work`:
    what its conversations are; empty: as those of its group.
    """

    name: str
    deployment: Deployment
    guards: str = ON
    waves: bool = False
    must_damage: bool = False
    must_stick: bool = False
    fault: str = ""
    storm: How | None = None
    must_retract: bool = False
    group: str = ""
    work: str = ""

    @property
    def off(self) -> tuple[str, ...]:
        """Guards switched off. Without `verdict` the digests would (rightly) stop the damaged rooms."""
        if self.guards == ON:
            return ()
        if self.guards == Guard.AGREEMENT.value:
            return (self.guards,)
        if self.guards == TICKETS:
            return (*(guard.value for guard in TICKET_GUARDS), Guard.VERDICT.value)
        return (self.guards, Guard.VERDICT.value)

    @property
    def guarded(self) -> bool:
        return self.guards == ON


#: What one rank alone sees (the reference engine's staged faults).
RANK_FAULTS = ("abort", "clock", "stale-byte", "link")
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
    return (*rows, *more_rows())


def rank_rows() -> tuple[Row, ...]:
    """One engine of two ranks, and what only the second one sees."""
    agreed, alone = (Deployment("bf16", True, "single", setting) for setting in ("ranks-agreed", "ranks-alone"))
    off = Guard.AGREEMENT.value
    return (
        *(Row(f"{fault}-agreed", agreed, fault=fault, group="ranks") for fault in RANK_FAULTS),
        *(Row(f"{fault}-alone", alone, off, fault=fault, must_stick=True, group="ranks") for fault in RANK_FAULTS),
    )


def group_rows() -> tuple[Row, ...]:
    """Member pools that are shorter, and copies between device and host that are overtaken."""
    short, slow, cramped = (
        Deployment("bf16", True, "single", setting) for setting in ("short-sidecar", "slow-backup", "cramped")
    )
    return (
        Row("sidecar-on", short, group="groups"),
        Row("whole_groups-off", short, Guard.GROUPS.value, must_damage=True, group="groups"),
        Row("slow-backup-on", slow, group="groups"),
        Row("load-before-backup", slow, Guard.LOAD.value, group="groups"),
        Row("backup-reused", slow, Guard.HOLD.value, group="groups"),
        Row("cramped-on", cramped, waves=True, group="groups"),
        Row("host-evicted-under-load", cramped, Guard.HOLD.value, waves=True, group="groups"),
        Row("fold-off", cramped, Guard.FOLD.value, waves=True, group="groups"),
    )


def storm_rows() -> tuple[Row, ...]:
    """80 requests under way, and an end to all or half of them, then the conversations; a crowd in a small pool."""
    calm, poison, small = (Deployment("bf16", True, "pd", setting) for setting in ("storm", "poison", "small-pool"))
    aborts: tuple[How, ...] = ("all", "half", "staggered")
    return (
        *(
            Row(f"{how}-{'quiesce-off' if guards != ON else 'on'}", calm, guards, storm=how, group="storms")
            for how in aborts
            for guards in (ON, Guard.QUIESCE.value)
        ),
        Row("peer-back", calm, storm="peer-back", group="storms"),
        Row("poisoned", poison, storm="poisoned", group="storms"),
        Row("retraction", small, must_retract=True, group="storms", work="crowd"),
    )


def more_rows() -> tuple[Row, ...]:
    """The rows beside the incident's own, by groups."""
    return (*rank_rows(), *group_rows(), *storm_rows())


def select(rows: Sequence[Row], others: Sequence[Row], names: Sequence[str]) -> tuple[Row, ...]:
    """The rows of these names or groups, in their order; `rows` if none is named. Raises UnknownRowError."""
    known = (*rows, *(row for row in others if row not in rows))
    valid = [row.name for row in known]
    groups = list(dict.fromkeys(row.group for row in known if row.group))
    for name in names:
        if name not in (*valid, *groups):
            near = get_close_matches(name, (*valid, *groups), 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UnknownRowError(f"no row {name!r}; {hint}there are: {', '.join((*valid, *groups))}")
    return tuple(row for row in known if row.name in names or row.group in names) if names else tuple(rows)


def by_deployment(rows: Sequence[Row]) -> list[tuple[Deployment, list[Row]]]:
    """Rows that share a deployment, together; deployments in the order of their first row."""
    groups: dict[Deployment, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.deployment, []).append(row)
    return list(groups.items())


def _off(guard: Guard) -> str:
    return f"{guard.value.removesuffix('_ticket')}-off"
