"""One list of event names: stable, documented, and used by every emit of the code base."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from dsv4ctl.controlplane.telemetry.events import BY_NAME, Event

FOLDERS = ("dsv4ctl.controlplane", "dsv4ctl.engine_adapters", "dsv4ctl.policies", "dsv4ctl.kernels")


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        spec = find_spec(folder)
        assert spec is not None
        for place in spec.submodule_search_locations or ():
            yield from Path(place).rglob("*.py")


def bad_emits(source: str) -> list[int]:
    """Lines of `telemetry.emit(...)` calls whose event is neither a member of Event nor a parameter of that type."""
    tree = ast.parse(source)
    typed = {
        node.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation) == "Event"
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "emit"
        and "telemetry" in ast.unparse(node.func.value)
        and not (node.args and names_event(node.args[0], typed))
    ]


def names_event(argument: ast.expr, typed: set[str]) -> bool:
    if isinstance(argument, ast.IfExp):
        return names_event(argument.body, typed) and names_event(argument.orelse, typed)
    if isinstance(argument, ast.Name):
        return argument.id in typed
    return (
        isinstance(argument, ast.Attribute)
        and isinstance(argument.value, ast.Name)
        and argument.value.id == "Event"
        and argument.attr in Event.__members__
    )


@pytest.mark.parametrize("event", Event, ids=lambda event: event.value)
def test_names_are_dotted_and_documented(event: Event) -> None:
    assert re.fullmatch(r"[a-z]+(\.[a-z_]+)+", event.value)
    assert event.name == event.value.replace(".", "_").upper()
    assert event.doc.endswith(".")
    assert BY_NAME[event.value] is event


def test_every_emit_names_an_event_of_the_list() -> None:
    found = {str(path): bad_emits(path.read_text()) for path in sources()}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_every_event_is_used() -> None:
    text = "\n".join(path.read_text() for path in sources())
    assert [event.name for event in Event if not re.search(rf"\bEvent\.{event.name}\b", text)] == []


@pytest.mark.parametrize(
    "call", ["telemetry.emit('room.closed')", "self._telemetry.emit(Event.NO_SUCH)", "telemetry.emit(name)"]
)
def test_a_free_name_is_found(call: str) -> None:
    assert bad_emits(call) == [1]


@pytest.mark.parametrize(
    "source",
    [
        "telemetry.emit(Event.ROOM_CLOSED if ok else Event.ROOM_ABORTED)",
        "def condemn(event: Event): telemetry.emit(event)",
        "logger.emit('of another kind')",
    ],
)
def test_a_member_is_no_finding(source: str) -> None:
    assert bad_emits(source) == []
