"""Errors as clients see them, in either dialect."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.engine_adapters.reference.requests import Finished

#: Aborts that are neither the client's wish nor a failure.
_COME_AGAIN = (AbortSource.ADMIN, AbortSource.DRAIN, AbortSource.RETRACTION)


class AnswerError(Exception):
    """A request that ends with an error: HTTP status, message, and what OpenAI's clients look at.

    `source` is set for an aborted request only: who aborted it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        source: AbortSource | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.source = source

    @property
    def kind(self) -> str:
        return "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"


def invalid(message: str, param: str | None = None) -> AnswerError:
    """A request that is wrong in itself."""
    return AnswerError(HTTPStatus.BAD_REQUEST, message, param=param)


def aborted(finished: Finished) -> AnswerError:
    """An aborted request is an error, never a short answer: a length or a stop would be believed."""
    if finished.source in _COME_AGAIN:
        status = HTTPStatus.SERVICE_UNAVAILABLE
    elif finished.source is AbortSource.CLIENT:
        status = HTTPStatus.BAD_REQUEST
    else:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
    message = finished.message or "the request was aborted"
    return AnswerError(status, message, code="aborted", source=finished.source)


def openai_error(error: AnswerError) -> dict[str, Any]:
    body: dict[str, Any] = {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.code,
    }
    return {"error": body | _source(error)}


def sglang_error(error: AnswerError) -> dict[str, Any]:
    """SGLang's `code` is the HTTP status, so the word for an abort stands in `type`."""
    body: dict[str, Any] = {
        "message": error.message,
        "type": error.code or error.kind,
        "code": int(error.status),
    }
    return {"error": body | _source(error)}


def _source(error: AnswerError) -> dict[str, str]:
    return {"source": error.source.value} if error.source is not None else {}
