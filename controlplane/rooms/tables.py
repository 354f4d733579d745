"""The state tables of rooms as Markdown, printed from the tables that the machines run on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dsv4ctl.controlplane.rooms.half import Half
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.rooms.states import ABORTS, LIVE, NEXT, TERMINAL, RoomState
from dsv4ctl.controlplane.rooms.writer import Writer

_GROUPS = {
    "any": frozenset(RoomState),
    "any live": LIVE,
    "any live, any abort": LIVE | ABORTS,
    "any but `allocated`": frozenset(RoomState) - {RoomState.ALLOCATED},
}


def markdown() -> str:
    """Three tables: which state may follow which, and the events of the writing and of the reading half."""
    lines = ["| state | may be followed by |", "| --- | --- |"]
    lines += [
        f"| `{state.value}` | {_names(NEXT[state]) if state not in TERMINAL else 'nothing'} |" for state in RoomState
    ]
    lines += ["", f"Live states: {_names(LIVE)}."]
    for title, half in (("Writer (prefill rank)", Writer), ("Reader (decode rank, or a single engine)", Reader)):
        lines += ["", f"**{title}**", *_events(half)]
    return "\n".join(lines) + "\n"


def _events(half: type[Half]) -> Iterator[str]:
    yield ""
    yield "| event | in state | leads to | when |"
    yield "| --- | --- | --- | --- |"
    for event, move in half.MOVES.items():
        yield f"| `{event}` | {_group(move.allowed)} | `{move.to.value}` | {move.when} |"


def _group(states: frozenset[RoomState]) -> str:
    return next((name for name, group in _GROUPS.items() if group == states), _names(states))


def _names(states: Iterable[RoomState]) -> str:
    chosen = set(states)
    return ", ".join(f"`{state.value}`" for state in RoomState if state in chosen)
