"""The peer channel of a decode rank, which dials, and a prefill rank. A connection that breaks loses its frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey
from simulation.net import LATENCY, Line

if TYPE_CHECKING:
    from simulation.rank import Rank

#: Seconds between two attempts to connect.
_REDIAL = 0.2


class Destination(NamedTuple):
    key: RoomKey
    pages: tuple[int, ...]


class PeerAbort(NamedTuple):
    key: RoomKey
    source: AbortSource
    reason: str


class PeerAck(NamedTuple):
    key: RoomKey
    outcome: Quiet


class Wire:
    """`up` once greeted. Each connection has two lines of its own, closed with it."""

    def __init__(self, dialler: Rank, listener: Rank) -> None:
        self.dialler, self.listener = dialler, listener
        self.up = False
        self._lines: tuple[Line, ...] = ()
        self._dialling = False

    def dial(self) -> None:
        """Keeps the connection for as long as it is wanted."""
        if not (self.up or self._dialling):
            self._dialling = True
            self.dialler.after(LATENCY[1], self._try)

    def _try(self) -> None:
        listener, dialler = self.listener, self.dialler
        if not dialler.receiver.wants(listener.incarnation):
            self._dialling = False
        elif listener.running and not listener.faults.peers_cut and not dialler.faults.peers_cut:
            self._dialling = False
            self._connect()
        else:
            dialler.after(_REDIAL, self._try)

    def _connect(self) -> None:
        dialler, listener = self.dialler, self.listener
        if dialler.incarnation in listener.fences:
            return  # refused; it is gone itself
        self.up = True

        def line(to: Rank, sender: Rank) -> Line:
            def arrive(frame: Any) -> None:
                to.post(lambda: to.sender.peer(sender.incarnation, frame) if to is listener else
                        to.receiver.peer(sender.incarnation, frame))  # fmt: skip

            return Line(dialler.random, dialler.faults.wire, arrive)

        self._lines = (line(listener, dialler), line(dialler, listener))
        dialler.receiver.wire_up(listener.incarnation)

    def send(self, sender: Rank, frame: Destination | PeerAbort | PeerAck) -> None:
        """On a broken connection it goes nowhere: the decode rank repeats what still stands."""
        if self.up:
            self._lines[0 if sender is self.dialler else 1].carry(frame)

    def close(self) -> None:
        """The connection breaks: what is on its way is lost."""
        for line in self._lines:
            line.close()
        if self.up:
            self.up = False
            if self.dialler.receiver.wants(self.listener.incarnation):
                self.dial()
