"""A node is one process's machines behind a thin shell; each (node, event) runs the real code once.

A world's state names its nodes by number: equal nodes have equal numbers, so that the same event in the same node is
looked up and not run again, whatever the rest of the world does meanwhile.
"""

from __future__ import annotations

import marshal
from hashlib import blake2b
from typing import Any

from dsv4ctl.controlplane.explore.snapshot import copy_of, image, packed, unpacked
from dsv4ctl.controlplane.tickets.ledger import Ledger

Event = tuple[Any, ...]
Output = tuple[Any, ...]

#: Nodes in memory as they are, the latest; older ones are packed: a fifth of the size, twice the time to run an event.
LATEST = 20_000


class Violation(Exception):
    """An invariant of design section 3 does not hold: `invariant` is its number."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class Node:
    """`on_<event>` changes the node and leaves its messages in `out`."""

    ledger: Ledger | None = None

    def __init__(self) -> None:
        self.out: list[Output] = []

    def moves(self) -> list[Event]:
        """Events that the node brings about itself."""
        return []

    def settle(self) -> None:
        """Brings what nobody can tell apart into one form."""

    def check(self) -> None:
        """Raises Violation."""

    def view(self) -> Any:
        """What the world must know of the node."""


class Nodes:
    """Told apart by 16 bytes of their image's hash: with a million of them, two collide with probability 2e-27."""

    SKIP = frozenset({"out", "setup"})

    def __init__(self, unread: frozenset[str] = frozenset()) -> None:
        """`unread`: fields that no node of this world reads back."""
        self._skip = self.SKIP | unread
        self._nodes: list[Node | bytes] = []
        self._numbers: dict[bytes, int] = {}
        self._steps: dict[tuple[int, Event], tuple[int, tuple[Output, ...]] | Violation] = {}
        self._views: dict[int, Any] = {}
        self._moves: dict[int, list[Event]] = {}
        self.runs = 0  #: calls of real code

    def add(self, node: Node) -> int:
        """Its number. Raises Violation if it breaks an invariant by itself."""
        node.settle()
        key = blake2b(marshal.dumps(image(node, self._skip, node.ledger), 2), digest_size=16).digest()
        number = self._numbers.get(key)
        if number is None:
            node.check()
            number = self._numbers[key] = len(self._nodes)
            self._nodes.append(node)
            if number >= LATEST:
                self._nodes[number - LATEST] = packed(self._nodes[number - LATEST])
        return number

    def step(self, number: int, event: Event) -> tuple[int, tuple[Output, ...]]:
        """The node after the event, and what it sent. Raises Violation."""
        found = self._steps.get((number, event))
        if found is None:
            found = self._steps[number, event] = self._run(number, event)
        if isinstance(found, Violation):
            raise found
        return found

    def view(self, number: int) -> Any:
        found = self._views.get(number)
        if found is None:
            found = self._views[number] = self.node(number).view()
        return found

    def moves(self, number: int) -> list[Event]:
        found = self._moves.get(number)
        if found is None:
            found = self._moves[number] = self.node(number).moves()
        return found

    def node(self, number: int) -> Node:
        """To look at, not to change."""
        found = self._nodes[number]
        return unpacked(found) if isinstance(found, bytes) else found

    def __len__(self) -> int:
        return len(self._nodes)

    def _run(self, number: int, event: Event) -> tuple[int, tuple[Output, ...]] | Violation:
        self.runs += 1
        found = self._nodes[number]
        node = unpacked(found) if isinstance(found, bytes) else copy_of(found)
        try:
            getattr(node, f"on_{event[0]}")(*event[1:])
            sent = tuple(node.out)
            node.out.clear()
            return self.add(node), sent
        except Violation as violation:
            return violation
        except Exception as error:  # noqa: BLE001 - whatever a machine raises in a call that its shell may make
            return Violation("S8", f"{event[0]} raised {error!r}")
