"""Events as log lines, live records and metrics: whatever happens is said by `Telemetry.emit`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sized
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Literal

import msgspec
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream

from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.hub import Hub, Record
from dsv4ctl.controlplane.telemetry.metrics import Metrics
from dsv4ctl.controlplane.telemetry.sink import LineSink

Level = Literal["debug", "info", "warning", "error"]
LEVELS: dict[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
#: Every record begins with these, in this order, wherever they are known.
FIRST = ("ts", "level", "event", "request_id", "room", "session", "engine", "rank", "incarnation")
#: What a request says. Above debug only its length is kept.
PRIVATE = frozenset({"prompt", "messages", "input_ids", "text", "output", "body"})
#: Seconds that the last lines may take to reach a slow reader.
CLOSE_TIMEOUT = 1.0


class Telemetry:
    """Where events go: lines to `fd`, records to subscribers, counts to `metrics`.

    `emit` may be called from any thread and never blocks.
    """

    def __init__(
        self,
        *,
        fd: int | None = None,
        level: Level = "info",
        console: bool = False,
        colors: bool = False,
        queue: int = 10_000,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`fd` None: no lines. `console`: lines for people, else one JSON object a line."""
        self._now = now
        self._threshold = LEVELS[level]
        self._live_threshold = min(self._threshold, LEVELS["info"])  # however few lines are wanted
        self._render = _console(colors) if console else _json
        self.metrics = Metrics()
        self._hub = Hub(lambda count: self._record(Event.LOG_DROPPED, "warning", {"count": count}))
        self._sink = None if fd is None else LineSink(fd, queue, self._dropped_line, self._reader_gone)

    @property
    def dropped(self) -> int:
        """Log lines lost since start."""
        return self._sink.dropped if self._sink else 0

    def emit(self, event: Event, level: Level = "info", **fields: Any) -> None:
        """One event. None fields are left out; a RoomKey becomes `room.generation`, an Enum its value."""
        listening = LEVELS[level] >= self._live_threshold
        if not listening and not self.metrics.observes(event):  # most of a request's events
            self.metrics.count(event, level)
            return
        record = self._record(event, level, fields)
        self.metrics.observe(event, record)
        if listening:
            self._hub.publish(record)
        if self._sink and LEVELS[level] >= self._threshold:
            self._sink.put(self._render(record))

    def subscribe(self) -> AbstractAsyncContextManager[MemoryObjectReceiveStream[Record]]:
        """Live records from now on; `log.dropped` says how many a slow subscriber missed."""
        return self._hub.subscribe()

    def recent(self) -> list[Record]:
        """The latest records, oldest first."""
        return self._hub.recent()

    def close(self) -> None:
        if self._sink:
            self._sink.close(CLOSE_TIMEOUT)

    def _record(self, event: Event, level: Level, fields: dict[str, Any]) -> Record:
        known = {name: _plain(value) for name, value in fields.items() if value is not None}
        if LEVELS[level] > LEVELS["debug"]:
            for name in PRIVATE & known.keys():
                known[name] = f"<{len(known[name])} withheld>" if isinstance(known[name], Sized) else "<withheld>"
        stamp = datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds")
        known |= {"ts": stamp.replace("+00:00", "Z"), "level": level, "event": event.value}
        first = {name: known.pop(name) for name in FIRST if name in known}
        return first | known

    def _dropped_line(self, count: int) -> str:
        record = self._record(Event.LOG_DROPPED, "warning", {"count": count})
        self.metrics.observe(Event.LOG_DROPPED, record)
        return self._render(record)

    def _reader_gone(self, error: OSError) -> None:
        record = self._record(Event.LOOP_DIED, "error", {"loop": "log-writer", "error": str(error)})
        self.metrics.observe(Event.LOOP_DIED, record)
        self._hub.publish(record)


class LibraryHandler(logging.Handler):
    """What libraries write to Python's logging becomes `log.library`, so that nothing bypasses the queue."""

    def __init__(self, telemetry: Telemetry) -> None:
        super().__init__(logging.WARNING)
        self._telemetry = telemetry

    def emit(self, record: logging.LogRecord) -> None:
        level: Level = "error" if record.levelno >= logging.ERROR else "warning"
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            message = f"{message}: {record.exc_info[1]!r}"
        self._telemetry.emit(Event.LOG_LIBRARY, level, logger=record.name, message=message)


def open_telemetry(level: Level, form: Literal["auto", "json", "console"], queue: int) -> Telemetry:
    """Telemetry on stdout: for people when stdout is a terminal (or `form` says so), else JSON lines."""
    terminal = sys.stdout.isatty()
    console = form == "console" or (form == "auto" and terminal)
    sys.stdout.flush()
    telemetry = Telemetry(
        fd=sys.stdout.fileno(), level=level, console=console, colors=console and terminal, queue=queue
    )
    logging.getLogger().addHandler(LibraryHandler(telemetry))
    return telemetry


def _plain(value: Any) -> Any:
    if isinstance(value, RoomKey):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    return value


def _unknown(value: Any) -> Any:
    return str(value)


_encoder = msgspec.json.Encoder(enc_hook=_unknown)


def _encode(record: Record, **_: Any) -> str:
    return _encoder.encode(record).decode()


_json_renderer = structlog.processors.JSONRenderer(_encode)


def _json(record: Record) -> str:
    return _json_renderer(None, "", record)  # type: ignore[return-value]


def _console(colors: bool) -> Callable[[Record], str]:
    renderer = structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=20, sort_keys=False)

    def render(record: Record) -> str:
        shown = dict(record)
        shown["timestamp"] = shown.pop("ts")[11:23]
        return str(renderer(None, "", shown))

    return render
