"""Breadth-first search over every state of a world, and the analysis of its graph for S5."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dsv4ctl.controlplane.explore.nodes import Event, Violation

#: Hashable; each world has its own.
State = Any


class Step(NamedTuple):
    """`fair`: it must happen if it stays possible (a frame that arrives); else it may (a fault, an abort)."""

    action: Event
    fair: bool
    state: State | None
    violation: Violation | None = None


class World(Protocol):
    name: str

    def initial(self) -> State: ...

    def steps(self, state: State) -> Iterable[Step]: ...

    def check(self, state: State) -> None:
        """Raises Violation."""

    def done(self, state: State) -> bool:
        """Every room ended on every side, and nothing of it is left."""

    def describe(self, action: Event) -> str: ...


@dataclass(slots=True)
class Found:
    """What became of one world. `trace`: the shortest way to the violation, one line a step."""

    name: str
    states: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    ended: int = 0  #: states in which everything has ended
    violation: Violation | None = None
    trace: list[str] = field(default_factory=list)
    complete: bool = True


class _Graph:
    """States by number, in the order of their depth; edges by source."""

    def __init__(self) -> None:
        self.numbers: dict[State, int] = {}
        self.states: list[State] = []
        self.parent = array("l")
        self.by = array("l")  #: the action that first led here
        self.first = array("l")  #: of each state: where its edges begin
        self.to = array("l")
        self.label = array("l")
        self.fair = bytearray()
        self.done = bytearray()
        self.actions: dict[Event, int] = {}

    def add(self, state: State, parent: int, action: Event | None) -> int:
        number = self.numbers.get(state)
        if number is None:
            number = self.numbers[state] = len(self.states)
            self.states.append(state)
            self.parent.append(parent)
            self.by.append(-1 if action is None else self.action(action))
        return number

    def action(self, action: Event) -> int:
        return self.actions.setdefault(action, len(self.actions))

    def edges(self, state: int) -> range:
        return range(self.first[state], self.first[state + 1])

    def path(self, state: int) -> list[Event]:
        names = list(self.actions)
        path = []
        while self.parent[state] >= 0:
            path.append(names[self.by[state]])
            state = self.parent[state]
        return path[::-1]


def search(world: World, limit: int | None = None, clock: Callable[[], float] = time.monotonic) -> Found:
    """Stops at the first violation, which has the shortest trace. `limit`: states, after which it is not complete."""
    began, graph, found = clock(), _Graph(), Found(world.name)
    start = world.initial()
    graph.add(start, -1, None)
    level_end, at = 1, 0
    try:
        while at < len(graph.states):
            if limit is not None and len(graph.states) > limit:
                found.complete = False
                break
            if at == level_end:
                level_end = len(graph.states)
                found.depth += 1
            _expand(world, graph, at, found)
            if found.violation is not None:
                break
            at += 1
        if found.violation is None and found.complete:
            graph.first.append(len(graph.to))
            _terminates(world, graph, found)
    finally:
        found.states, found.transitions = len(graph.states), len(graph.to)
        found.ended = sum(graph.done)
        found.seconds = clock() - began
    return found


def _expand(world: World, graph: _Graph, at: int, found: Found) -> None:
    state = graph.states[at]
    graph.first.append(len(graph.to))
    graph.done.append(world.done(state))
    for step in world.steps(state):
        violation, last = step.violation, step.action
        if step.state is not None:
            new = step.state not in graph.numbers
            number = graph.add(step.state, at, step.action)
            graph.to.append(number)
            graph.label.append(graph.action(step.action))
            graph.fair.append(step.fair)
            if new and violation is None:
                violation = _broken(world, step.state)
        if violation is not None:
            _report(world, graph, found, at, violation, last)
            return


def _broken(world: World, state: State) -> Violation | None:
    try:
        world.check(state)
    except Violation as violation:
        return violation
    return None


def _report(
    world: World, graph: _Graph, found: Found, at: int, violation: Violation, last: Event | None = None
) -> None:
    path = graph.path(at) + ([] if last is None else [last])
    found.violation = violation
    found.trace = [world.describe(action) for action in path]
    found.depth = len(path)


# ---- S5 ------------------------------------------------------------------------------------------------------


def _terminates(world: World, graph: _Graph, found: Found) -> None:
    """S5: an end is reachable from everywhere by what must happen, and no fair run avoids it for ever."""
    stuck = _cannot_end(graph)
    if stuck is not None:
        _report(world, graph, found, stuck, Violation("S5", "no end can be reached without an abort or a fault"))
        return
    for component in _cycles(graph):
        if not _left_by_fairness(graph, component):
            what = f"{len(component)} states can follow each other for ever, and no room ends"
            _report(world, graph, found, min(component), Violation("S5", what))
            return


def _cannot_end(graph: _Graph) -> int | None:
    """The first state from which fair steps lead to no end."""
    count = len(graph.states)
    source, before = array("l", bytes(8 * len(graph.to))), array("l", [-1]) * len(graph.to)
    last = array("l", [-1]) * count  #: the last fair edge into each state; `before`: of an edge, the one before it
    for state in range(count):
        for edge in graph.edges(state):
            if graph.fair[edge]:
                source[edge], before[edge] = state, last[graph.to[edge]]
                last[graph.to[edge]] = edge
    ends = bytearray(graph.done)
    todo = [state for state in range(count) if ends[state]]
    while todo:
        edge = last[todo.pop()]
        while edge >= 0:
            if not ends[source[edge]]:
                ends[source[edge]] = 1
                todo.append(source[edge])
            edge = before[edge]
    return next((state for state in range(count) if not ends[state]), None)


def _left_by_fairness(graph: _Graph, component: list[int]) -> bool:
    """Some fair action is possible in every state of the cycle and always leads out of it."""
    inside = set(component)
    always: set[int] | None = None
    taken: set[int] = set()
    for state in component:
        here = set()
        for edge in graph.edges(state):
            if graph.fair[edge]:
                here.add(graph.label[edge])
                if graph.to[edge] in inside:
                    taken.add(graph.label[edge])
        always = here if always is None else always & here
    return bool((always or set()) - taken)


def _cycles(graph: _Graph) -> Iterator[list[int]]:
    """Strongly connected components of the states that are not ended, of two states or more (Tarjan, iterative)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in range(len(graph.states)):
        if root in index or graph.done[root]:
            continue
        work = [(root, iter(graph.edges(root)))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            state, edges = work[-1]
            for edge in edges:
                to = graph.to[edge]
                if graph.done[to]:
                    continue
                if to not in index:
                    index[to] = low[to] = len(index)
                    stack.append(to)
                    on_stack.add(to)
                    work.append((to, iter(graph.edges(to))))
                    break
                if to in on_stack:
                    low[state] = min(low[state], index[to])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[state])
                if low[state] == index[state]:
                    component = _pop(stack, on_stack, state)
                    if len(component) > 1:
                        yield component


def _pop(stack: list[int], on_stack: set[int], root: int) -> list[int]:
    component = []
    while True:
        state = stack.pop()
        on_stack.discard(state)
        component.append(state)
        if state == root:
            return component
