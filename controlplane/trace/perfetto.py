"""A trace as Chrome trace JSON, which ui.perfetto.dev and chrome://tracing open.

Ranks are processes and their threads tracks; loads, tickets and states of rooms are slices; frames between ranks are
flows; all else is an instant on its thread's track. One event at a time: memory is what is open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from dsv4ctl.controlplane.trace.format import Event, Extents, Rank
from dsv4ctl.controlplane.trace.merge import Merged, frame_key

_ENDS = frozenset({"ended", "release", "revoked"})
_BEGINS = {"lease": "load", "request": "ticket"}
_STEPS = {
    "landed": "load",
    "verified": "load",
    "failed": "load",
    "quarantine": "load",
    "grant": "ticket",
    "revoking": "ticket",
}
_OVER = ("closed", "aborted")
#: A slice of this many microseconds carries each end of a flow.
_FRAME_US = 1

Json = dict[str, Any]


def export(ranks: Mapping[str, Rank], ahead_ns: Mapping[str, int], events: Iterable[Merged]) -> Iterator[bytes]:
    """The file, piece by piece."""
    separator = b'{"displayTimeUnit":"ms","traceEvents":[\n'
    tracks = _Tracks(ranks, ahead_ns)
    for incarnation, event, extents in events:
        for made in tracks.feed(incarnation, event, extents):
            yield separator + msgspec.json.encode(made)
            separator = b",\n"
    yield (separator if separator != b",\n" else b"") + b"\n]}\n"


class _Tracks:
    def __init__(self, ranks: Mapping[str, Rank], ahead_ns: Mapping[str, int]) -> None:
        self._ranks = ranks
        self._ahead = ahead_ns
        self._pids = {incarnation: number for number, incarnation in enumerate(ranks, start=1)}
        self._threads: dict[tuple[str, str], int] = {}
        self._states: dict[tuple[str, str], str] = {}
        self._named: set[str] = set()
        self._open: dict[tuple[str, int], tuple[str, str]] = {}  #: category and name of what began

    def feed(self, incarnation: str, event: Event, extents: Extents) -> Iterator[Json]:
        yield from self._names(incarnation, event)
        base = self._base(incarnation, event)
        if event.kind in _BEGINS:
            yield self._begin(incarnation, event, extents, base)
        elif event.kind in _ENDS:
            opened = self._open.pop((incarnation, event.subject), None)
            if opened is not None:
                yield self._step(incarnation, event, base, "e", *opened)
        elif event.kind in _STEPS and (incarnation, event.subject) in self._open:
            category, name = self._open[incarnation, event.subject]
            yield self._step(incarnation, event, base, "n", category, name)
        elif event.kind == "room":
            yield from self._room(incarnation, event, base)
        elif event.kind in ("sent", "received", "write"):
            yield from self._frame(incarnation, event, base)
        else:
            yield base | {"ph": "i", "s": "t", "name": _name(event), "cat": event.kind, "args": _args(event, extents)}

    def _base(self, incarnation: str, event: Event) -> Json:
        at = (event.at_ns + self._ahead.get(incarnation, 0)) / 1000
        return {"ts": at, "pid": self._pids[incarnation], "tid": self._threads[incarnation, event.agent]}

    def _names(self, incarnation: str, event: Event) -> Iterator[Json]:
        if incarnation not in self._named:
            self._named.add(incarnation)
            rank = self._ranks[incarnation]
            yield self._metadata(incarnation, 0, "process_name", f"{rank.name} {rank.role} {incarnation}")
        if (incarnation, event.agent) not in self._threads:
            thread = self._threads[incarnation, event.agent] = len(self._threads) + 1
            yield self._metadata(incarnation, thread, "thread_name", event.agent)

    def _metadata(self, incarnation: str, thread: int, what: str, name: str) -> Json:
        return {"ph": "M", "pid": self._pids[incarnation], "tid": thread, "name": what, "args": {"name": name}}

    def _begin(self, incarnation: str, event: Event, extents: Extents, base: Json) -> Json:
        category = _BEGINS[event.kind]
        name = f"{category} {event.who}" + (f" room {event.room}" if event.room else "")
        self._open[incarnation, event.subject] = category, name
        return self._step(incarnation, event, base, "b", category, name) | {"args": _args(event, extents)}

    def _step(self, incarnation: str, event: Event, base: Json, phase: str, category: str, name: str) -> Json:
        args = {"event": event.kind, "layers": event.value, "note": event.note}
        return base | {"ph": phase, "cat": category, "id": f"{incarnation}:{event.subject}", "name": name, "args": args}

    def _room(self, incarnation: str, event: Event, base: Json) -> Iterator[Json]:
        same = base | {"cat": "room", "id": f"{incarnation}:{event.room}"}
        before = self._states.pop((incarnation, event.room), None)
        if before is not None:
            yield same | {"ph": "e", "name": before}
        if event.note not in _OVER:
            name = self._states[incarnation, event.room] = f"room {event.room} {event.note}"
            yield same | {"ph": "b", "name": name}

    def _frame(self, incarnation: str, event: Event, base: Json) -> Iterator[Json]:
        sends = event.kind != "received"
        name = f"{'send' if sends else 'receive'} {event.note} room {event.room}"
        args = {"peer": event.who, "room": event.room}
        yield base | {"ph": "X", "dur": _FRAME_US, "cat": "frame", "name": name, "args": args}
        flow = ":".join(frame_key(incarnation, event))
        yield (
            base
            | {"cat": "room", "name": f"room {event.room}", "id": flow}
            | ({"ph": "s"} if sends else {"ph": "f", "bp": "e"})
        )


def _name(event: Event) -> str:
    return (
        f"read {event.pool} layer {event.layer} ({event.who})" if event.kind == "read" else f"{event.kind} {event.who}"
    )


def _args(event: Event, extents: Extents) -> Json:
    pages = {f"{extent.space} {at}": list(extent.pages) for at, extent in enumerate(extents)}
    return {"room": event.room, "readable": event.value, "pages": pages, "note": event.note, "seq": event.seq}
