"""Frames between ranks that say nothing, neither now nor later: a room that is over on a rank never lives again.

What this goes by is what the real code does with such a frame, and two things that worlds without it check: a frame
names its generation, and what a fenced writer had sent counts no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4ctl.controlplane.explore.nodes import Nodes
from dsv4ctl.controlplane.explore.plan import Env, Layout, Plan
from dsv4ctl.controlplane.rooms.states import Quiet

Frame = tuple[Any, ...]


class Silence:
    def __init__(self, plan: Plan, layout: Layout, nodes: Nodes) -> None:
        self._lossy = plan.peer_faults > 0
        self._layout = layout
        self._nodes = nodes
        self._found: dict[tuple[Any, ...], tuple[Frame, ...]] = {}

    def frames(self, nodes: Sequence[int], channels: Sequence[Any], env: Env, at: int) -> tuple[Frame, ...]:
        """Those of the line `at`; which ones follows from its two ends and the way back."""
        kind, one, other = self._layout.lines[at]
        if kind not in ("peer", "note"):
            return ()
        back = channels[self._layout.line["peer", other, one]]
        situation = (at, nodes[one], nodes[other], channels[at], back)
        found = self._found.get(situation)
        if found is None:
            line = (kind, one, other)
            frames = dict.fromkeys(channels[at])
            found = tuple(frame for frame in frames if self._says_nothing(nodes, channels, env, line, frame))
            self._found[situation] = found
        return found

    def _says_nothing(
        self, nodes: Sequence[int], channels: Sequence[Any], env: Env, line: tuple[str, int, int], frame: Frame
    ) -> bool:
        (kind, one, other), (sender, receiver, *rest) = line, frame
        if not self._layout.alive(receiver, nodes, env):
            return True
        node = nodes[other]
        view = self._nodes.view(node)
        if kind == "note":
            return rest[0] not in view.expects
        if rest[1] not in view.over:
            return False
        if rest[0] == "destination":
            return True
        after, sent = self._nodes.step(node, (f"peer_{rest[0]}", sender, *rest[1:]))
        back = ("peer", other, one)
        waits = channels[self._layout.line[back]]
        acks: list[Frame] = [(receiver, sender, *output[2:]) for output in sent]  # one that the sender has, or will
        if self._lossy:  # an ack on its way may be lost, and this abort bring about another one
            waits = ()
            if rest[0] == "abort" and receiver[0] == "P":
                acks = [(receiver, sender, "ack", rest[1], outcome) for outcome in Quiet]
        return after == node and all(
            ack in waits or self._says_nothing(nodes, channels, env, back, ack) for ack in acks
        )
