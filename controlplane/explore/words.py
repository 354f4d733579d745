"""Actions of the worlds in the project's vocabulary, one line each."""

from __future__ import annotations

from typing import Any

from dsv4ctl.controlplane.explore.nodes import Event

_SIDES = {"P": "prefill", "D": "decode"}

_MOVES = {
    "expose": "exposes the pages of room {0} and tells them to its peers",
    "compare": "takes a checksum ticket for room {0}",
    "verdict": "room {0} is verified",
    "send": "posts logical page {1} of room {0} to {2}",
    "sent_all": "has sent all of room {0}",
    "overdue": "has no ack for room {0} by the deadline",
}

_WHOLE = {
    "open": "control plane: opens room {0}",
    "abort": "control plane: aborts room {0}, whose client left",
    "tick": "control plane: a deadline of room {0} passes",
    "resend": "control plane: sends {0} again what it has not received",
}


def describe(names: dict[int, str], lines: list[tuple[str, int, int]], action: Event) -> str:
    """One line of a trace: who, and what."""
    kind, *rest = action
    match kind:
        case "rank":
            return f"{names[rest[0]]}: " + _MOVES[rest[1][0]].format(*rest[1][1:])
        case "fault":
            return f"{names[rest[0]]}: the engine aborts room {rest[1]} by itself"
        case "deliver" | "lose" | "repeat" | "overtake":
            return f"{_line(names, lines[rest[0]])}: {_FRAMES[kind]}"
        case "break":
            _, one, other = lines[rest[0]]
            return f"{names[one]} and {names[other]}: the connection breaks and is made again"
        case "land" | "complete" | "fail":
            return _flight(kind, rest[0])
        case "struck":
            told = describe(names, lines, rest[0])
            return f"{told}; of the frames that this sends over the link the {rest[1] + 1}. {_STRUCK[rest[2]]}"
        case "crash":
            return f"{names[rest[0]]}: crashes"
        case "submit" | "round" | "admit" | "step" | "notice" | "reap" | "restart":
            return f"{_SIDES[rest[0]]} engine: {_ENGINE[kind].format(*rest[1:])}"
        case _:
            return _WHOLE[kind].format(*rest)


_ENGINE = {
    "submit": "the request of room {0} arrives",
    "round": "a round of its ranks",
    "admit": "admits what fits its pages",
    "step": "the step of room {0} ends",
    "notice": "the control plane sees that a rank crashed",
    "reap": "its processes are killed and reaped (fence)",
    "restart": "starts again, with new incarnations",
}
_STRUCK = {"lost": "is lost", "repeated": "comes again later", "late": "comes late"}
_FRAMES = {
    "deliver": "the next frame arrives",
    "lose": "the next frame is lost",
    "repeat": "the next frame is repeated",
    "overtake": "the second frame overtakes the first",
}


def _line(names: dict[int, str], line: tuple[str, int, int]) -> str:
    kind, one, other = line
    what = {"down": "link", "up": "link", "peer": "peer channel", "note": "notifications"}[kind]
    return f"{what} {names[one]} -> {names[other]}"


def _flight(kind: str, flight: Any) -> str:
    what = f"write of room {flight.key} into page {flight.target} of {flight.reader}"
    if kind == "land":
        return f"{what}: its bytes land{' after all' if flight.state == 'unknown' else ''}"
    return f"{flight.writer}: the {what} {'ended' if kind == 'complete' else 'ends, nobody knows how'}"
