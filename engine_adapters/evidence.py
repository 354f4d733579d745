"""What any rank can say of something that went wrong: its tickets, its last events, its stacks. Never a prompt."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Any

from dsv4ctl.controlplane.tickets.gate import Gate

#: Of the trace, the last events.
EVENTS = 256


def stacks() -> dict[str, str]:
    """Every thread's stack."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    }


def tickets_and_events(room: str, gate: Gate) -> dict[str, Any]:
    """Of `room` (as `7.1`; of all if empty), as plain data.

    An event: number, monotonic ns, kind, room, who, where, note.
    """
    last = [event for event in gate.trace.events() if room in ("", str(event.room))][-EVENTS:]
    return {
        "tickets": [ticket for ticket in gate.live() if room in ("", ticket["room"])],
        "trace": [[e.seq, e.at_ns, e.kind, str(e.room), str(e.who), repr(e.where), str(e.note)] for e in last],
    }
