"""What a client is told when it gets no answer: OpenAI's error body, on every path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.controlplane.scheduler.live import RoomAbortedError

#: The status of an answer whose room was aborted, by who asked for it. 499: its client does not want it any more, and
#: no client library retries it.
ABORT_STATUS: dict[AbortSource, int] = {
    AbortSource.CLIENT: 499,
    AbortSource.ADMIN: 503,
    AbortSource.DEADLINE: 504,
    AbortSource.ENGINE_FAULT: 502,
    AbortSource.INTEGRITY: 500,
    AbortSource.DRAIN: 503,
    AbortSource.RETRACTION: 503,  # seen by nobody but who asks an engine directly: the room begins again
}
#: Aborts after which the same request is not to be made again by itself: an operator ended it, or its time is used up
#: (its next room would have as little). The official clients repeat every other answer from 500 on.
_NOT_AGAIN = frozenset({AbortSource.ADMIN, AbortSource.DRAIN, AbortSource.DEADLINE})


class RequestError(Exception):
    """An answer that is an error. `param` is the field of the request that is wrong."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if 400 <= self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.body())

    def response(self) -> web.Response:
        return web.Response(
            status=self.status, body=self.encoded(), content_type="application/json", headers=self.headers
        )

    def event(self) -> bytes:
        """As the last event of a stream."""
        return b"data: " + self.encoded() + b"\n\n"


class EngineAnswerError(RequestError):
    """An engine's own refusal, passed on as it came."""

    def __init__(self, status: int, message: str, raw: bytes) -> None:
        super().__init__(status, "engine_refused", message)
        self._raw = raw

    def encoded(self) -> bytes:
        return self._raw


def of_abort(error: RoomAbortedError) -> RequestError:
    headers = {"x-should-retry": "false"} if error.source in _NOT_AGAIN else {}
    message = f"room aborted: {error.reason}"
    return RequestError(ABORT_STATUS[error.source], error.source.value, message, headers=headers)


def message_in(raw: bytes) -> str:
    """What an engine's error body says, whatever its shape; at most 500 characters."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return raw[:500].decode("utf-8", "replace").strip()
    for _ in range(3):
        if not isinstance(body, dict):
            break
        body = body.get("error", body.get("message", body.get("detail", "")))
    return str(body)[:500]


def source_in(raw: bytes) -> str | None:
    """Who aborted the request, where an engine's error body says so."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return None
    error = body.get("error") if isinstance(body, dict) else None
    source = error.get("source") if isinstance(error, dict) else None
    return source if isinstance(source, str) else None
