"""What a world of rooms has, how often each fault may strike, and who is called what in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dsv4ctl.controlplane.explore.nodes import Event
from dsv4ctl.controlplane.explore.rank import Setup
from dsv4ctl.controlplane.rooms.states import RoomKey

SIDES = ("P", "D")
#: Of a plan: how often each may still strike is part of a world's state.
STRIKES = ("aborts", "link_faults", "peer_faults", "breaks", "crashes", "poisons")
FAULTS = (*STRIKES, "restarts")


class Plan(NamedTuple):
    """What a world has and how often each fault may strike."""

    name: str
    prefill: int = 1  #: ranks
    decode: int = 1
    fan: bool = False  #: every rank of one side is the peer of every rank of the other; else rank i of rank i
    rooms: tuple[tuple[int, int], ...] = ((1, 1), (2, 1))
    setup: Setup = Setup()
    link: str = (
        "instant"  #: but for frames that a fault strikes; "down": frames to ranks wait in line; "both": reports too
    )
    in_order: bool = False  #: ranks take in openings before what was sent later; requests follow at once
    aborts: int = 1
    abort_by: tuple[str, ...] = ("client", "P", "D")
    link_faults: int = 0  #: frames lost, repeated, late or overtaken between control plane and ranks
    peer_faults: int = 0  #: the same between ranks
    breaks: int = 0  #: connections between two ranks lost with all that is on them, and made again
    crashes: int = 0
    poisons: int = 0  #: writes that end without a known state
    restarts: int = 0
    at_most: int | None = None  #: aborts and faults of all kinds together, restarts aside
    one_by_one: bool = False  #: a room opens when the one before it has ended
    eager: bool = False  #: frames between ranks that say nothing any more arrive at once, what is over is forgotten


def eager_may_be(plan: Plan) -> bool:
    """Nothing is said a second time because a connection broke, and what ended is remembered."""
    return not plan.breaks and plan.setup.remembered is None


class Env(NamedTuple):
    opened: int
    aborts: int
    link_faults: int
    peer_faults: int
    breaks: int
    crashes: int
    poisons: int
    restarts: int
    epochs: tuple[int, int] = (1, 1)
    ending: tuple[bool, bool] = (False, False)  #: the engine will be killed and reaped
    unnoticed: tuple[bool, bool] = (False, False)  #: a rank of it crashed, the control plane does not know
    faulty: tuple[bool, bool] = (False, False)  #: a rank of it crashed, or lost track of a write
    lost: bool = False  #: a frame was lost that nobody sends again
    submitted: tuple[tuple[str, RoomKey], ...] = ()


def capped(env: Env, plan: Plan, at_most: int) -> Env:
    """Nothing more may strike once as much has struck as may altogether: what is left of each kind says nothing."""
    if sum(getattr(plan, kind) - getattr(env, kind) for kind in STRIKES) < at_most:
        return env
    return env._replace(aborts=0, link_faults=0, peer_faults=0, breaks=0, crashes=0, poisons=0)


class Flight(NamedTuple):
    """A posted write. `state`: posted, landed (its bytes are there), unknown (nobody can say)."""

    writer: str
    reader: str
    key: RoomKey
    logical: int
    source: int
    target: int
    state: str


class Layout:
    """Nodes by number (0 is the control plane), their names, and the lines between them: (kind, from, to)."""

    def __init__(self, plan: Plan) -> None:
        self._fan = plan.fan
        self.of_side = {"P": range(1, 1 + plan.prefill), "D": range(1 + plan.prefill, 1 + plan.prefill + plan.decode)}
        self.ranks = range(1, 1 + plan.prefill + plan.decode)
        self.lines: list[tuple[str, int, int]] = []
        for rank in self.ranks:
            self.lines += [("down", 0, rank), ("up", rank, 0)]
        for p in self.of_side["P"]:
            for d in self.of_side["D"]:
                if plan.fan or p - 1 == d - 1 - plan.prefill:
                    self.lines += [("peer", p, d), ("peer", d, p), ("note", p, d)]
        self.line = {line: at for at, line in enumerate(self.lines)}
        self._sides = {rank: at for at, side in enumerate(SIDES) for rank in self.of_side[side]}
        self._names: dict[tuple[int, int], str] = {}

    def side(self, rank: int) -> int:
        """0: prefill, 1: decode."""
        return self._sides[rank]

    def name(self, rank: int, epochs: tuple[int, int]) -> str:
        """The incarnation: side, number, epoch."""
        side = self._sides[rank]
        epoch = epochs[side]
        found = self._names.get((rank, epoch))
        if found is None:
            number = rank - self.of_side[SIDES[side]][0]
            found = self._names[rank, epoch] = f"{SIDES[side]}{number}.{epoch}"
        return found

    def rank(self, name: str) -> int:
        return self.of_side[name[0]][int(name[1])]

    def alive(self, name: str, nodes: Sequence[int], env: Env) -> bool:
        """The process of this incarnation runs."""
        rank = self.rank(name)
        return nodes[rank] >= 0 and self.name(rank, env.epochs) == name

    def own(self, name: str, frame: tuple[Any, ...]) -> Event:
        """Rank i writes to rank i of the other engine, and to no other, unless the plan says otherwise."""
        if frame[0] != "open" or self._fan:
            return frame
        return ("open", frame[1], frame[2][int(name[1]) : int(name[1]) + 1])

    def titles(self) -> dict[int, str]:
        """Of nodes, for traces."""
        return {0: "control plane", **{rank: self.name(rank, (1, 1)).split(".")[0] for rank in self.ranks}}
