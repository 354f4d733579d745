"""The radix prefix cache: one node a sealed 256-token page, on the device, on the host, or both.

Only prefill-computed pages enter it. A node's pages are reachable by any request from the moment they are
published, loading ones too: what keeps a reader from stale bytes is its ticket, not the tree.
Not thread-safe: the step loop owns it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.types import Extent, Guard
from dsv4ctl.engine_adapters.reference.digests import PageDigests
from dsv4ctl.engine_adapters.reference.facts import Budget
from dsv4ctl.engine_adapters.reference.geometry import SPACES


@dataclass(eq=False, slots=True)
class Node:
    """One page of a prefix. `device` and `host` hold its extent by space (`full`, `swa`, `state`).

    A node whose prefix is usable up to its end has all three somewhere; one in the middle needs only `full` (S7).
    """

    parent: Node | None
    key: bytes
    logical: int
    digests: PageDigests
    device: dict[str, Extent] = field(default_factory=dict)
    host: dict[str, Extent] = field(default_factory=dict)
    children: dict[bytes, Node] = field(default_factory=dict)
    users: int = 0  #: live sequences whose prefix goes through this node
    used_at: int = 0
    alive: bool = True


class PrefixCache:
    def __init__(self, gate: Gate, page_tokens: int) -> None:
        self._gate = gate
        self._page_tokens = page_tokens
        self._root = Node(None, b"", -1, PageDigests())
        self._tick = 0
        self._pools: dict[str, frozenset[str]] = {space: gate.extent(space, ()).pools for space in SPACES}

    def nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def match(self, ids: Sequence[int]) -> list[Node]:
        """The longest usable prefix, at least one token short of `ids` (something must be computed)."""
        path: list[Node] = []
        node = self._root
        for logical in range((len(ids) - 1) // self._page_tokens):
            found = node.children.get(self.page_key(ids, logical))
            if found is None or not self._covers(found, "full"):
                break
            path.append(found)
            node = found
        while path and not all(self._covers(path[-1], space) for space in SPACES):
            path.pop()
        return path

    def _covers(self, node: Node, space: str) -> bool:
        """Every pool of the space is there (S7): the host may keep less than the device had."""
        if space in node.device or space not in node.host:
            return space in node.device
        return node.host[space].pools == self._pools[space] or not self._gate.guarded(Guard.GROUPS)

    def page_key(self, ids: Sequence[int], logical: int) -> bytes:
        at = logical * self._page_tokens
        return array("H", ids[at : at + self._page_tokens]).tobytes()

    def pin(self, path: Sequence[Node]) -> None:
        """The nodes are in use: not evicted until `unpin`."""
        self._tick += 1
        for node in path:
            node.users += 1
            node.used_at = self._tick

    def unpin(self, path: Sequence[Node]) -> None:
        for node in path:
            node.users -= 1

    def insert(
        self, parent: Node | None, key: bytes, device: dict[str, Extent], digests: PageDigests
    ) -> tuple[Node, bool]:
        """Publishes a sealed page below `parent` (None: the root). Returns its node, and whether it took the pages.

        A page that is on the device already keeps what it has, a loading one too; the caller keeps its own until it
        ends.
        """
        above = self._root if parent is None else parent
        node = above.children.get(key)
        if node is None:
            node = above.children[key] = Node(parent, key, above.logical + 1, digests)
        if node.device:
            if self._gate.guarded(Guard.FOLD):
                return node, False
            for extent in node.device.values():  # what an engine does that keeps one copy of two, whoever fills it
                self._gate.free(extent.space, extent.pages, guarded=False)
        node.device = dict(device)
        return node, True

    def evict_device(self, wants: dict[str, int], budget: Budget) -> None:
        """Gives device pages back, least recently used first, until `wants` will fit once they are free.

        Evicts nothing if that would not be enough: a request that must wait anyway costs nobody the cache.
        """
        missing = budget.missing(wants)
        idle = [node for node in self.nodes() if node.device and not node.users]
        if any(sum(space in node.device for node in idle) < count for space, count in missing.items()):
            return
        while budget.missing(wants):
            leaves = [node for node in self.nodes() if node.device and not node.users and self._is_device_leaf(node)]
            victim = min(leaves, key=lambda node: node.used_at)
            _promise(victim.device, budget)
            self._drop_device(victim)

    def evict_host(self, wants: dict[str, int], budget: Budget) -> None:
        """The same for host pages; a node that is nowhere any more leaves the tree."""
        while budget.missing(wants):
            victims = [node for node in self.nodes() if node.host and not node.users and not node.children]
            if not victims:
                return
            victim = min(victims, key=lambda node: node.used_at)
            _promise(victim.host, budget)
            self._free(victim.host)
            if not victim.device:
                self._remove(victim)

    def forget(self, nodes: Sequence[Node]) -> None:
        """Their bytes never came, or came wrong: no later request may match them, on the device or the host."""
        for node in nodes:
            if node.alive:
                self._remove(node)

    def clear(self) -> None:
        """Forgets everything. The caller made sure that no sequence lives."""
        for node in list(self.nodes()):
            self._free(node.device)
            self._free(node.host)
            node.alive = False
        self._root.children.clear()

    def _is_device_leaf(self, node: Node) -> bool:
        return not any(child.device for child in node.children.values())

    def _drop_device(self, node: Node) -> None:
        self._free(node.device)
        if not node.host:
            self._remove(node)

    def _remove(self, node: Node) -> None:
        """Takes the node out of the tree; what hangs below it is unreachable and goes with it."""
        for child in list(node.children.values()):
            self._remove(child)
        self._free(node.device)
        self._free(node.host)
        node.alive = False
        (node.parent or self._root).children.pop(node.key, None)

    def _free(self, extents: dict[str, Extent]) -> None:
        for extent in extents.values():
            self._gate.free(extent.space, extent.pages)
        extents.clear()


def _promise(extents: dict[str, Extent], budget: Budget) -> None:
    for extent in extents.values():
        budget.promise(extent.space, len(extent.pages))
