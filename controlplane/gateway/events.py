"""Cuts a stream of server-sent events at their ends, so that a client never gets half of one."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

#: A longer event is no event: the stream is given up.
MAX_EVENT_BYTES = 16 * 1024 * 1024
DONE = b"[DONE]"


class EventError(ValueError):
    """The stream is not one of server-sent events."""


class EventCutter:
    """Bytes in, whole events out (each with its blank line)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields each event completed by `data`. Raises EventError above `MAX_EVENT_BYTES`."""
        self._buffer += data
        while (end := self._end()) is not None:
            event = bytes(self._buffer[:end])
            del self._buffer[:end]
            yield event
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise EventError(f"an event of more than {MAX_EVENT_BYTES} bytes")

    def _end(self) -> int | None:
        ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (at := self._buffer.find(mark)) >= 0]
        return min(ends, default=None)


def is_done(event: bytes) -> bool:
    return event.startswith(b"data:") and event[5:].strip() == DONE


def error_in(event: bytes) -> bytes | None:
    """The JSON of an event that is an error, or None."""
    if not event.startswith(b"data:") or b'"error"' not in event[:64]:
        return None
    payload = event[5:].strip()
    try:
        body = msgspec.json.decode(payload)
    except msgspec.DecodeError:
        return None
    return payload if isinstance(body, dict) and body.get("error") else None
