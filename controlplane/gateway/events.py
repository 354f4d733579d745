"""Cuts a stream of server-sent events at their ends, so that a client never gets half of one."""

from __future__ import annotations

import msgspec

#: A longer event is no event: the stream is given up.
MAX_EVENT_BYTES = 16 * 1024 * 1024
DONE = b"[DONE]"
_ENDS = (b"\n\n", b"\r\n\r\n")


class EventError(ValueError):
    """The stream is not one of server-sent events."""


class EventCutter:
    """Bytes in, whole events out (each with its blank line)."""

    def __init__(self) -> None:
        self._rest = b""  #: of an event whose end is still to come

    def feed(self, data: bytes) -> list[bytes]:
        """The events completed by `data`. Raises EventError above `MAX_EVENT_BYTES`."""
        events, begin, at = [], 0, len(self._rest)
        data = self._rest + data
        while at := data.find(b"\n", at) + 1:  # a search for one byte is many times faster than for the whole mark
            if data.endswith(_ENDS, begin, at):
                events.append(data[begin:at])
                begin = at
        self._rest = data[begin:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events


def is_done(event: bytes) -> bool:
    return event.startswith(b"data:") and event[5:].strip() == DONE


def error_in(event: bytes) -> bytes | None:
    """The JSON of an event that is an error, or None."""
    if not event.startswith(b"data:") or event.find(b'"error"', 0, 64) < 0:
        return None
    payload = event[5:].strip()
    try:
        body = msgspec.json.decode(payload)
    except msgspec.DecodeError:
        return None
    return payload if isinstance(body, dict) and body.get("error") else None
