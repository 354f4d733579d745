"""Why an admin call is not done: a stable code, its HTTP status, its exit code, and a message."""

from __future__ import annotations

from typing import Literal

Code = Literal["bad_request", "denied", "not_found", "refused", "failed"]

STATUS: dict[Code, int] = {"bad_request": 400, "denied": 403, "not_found": 404, "refused": 409, "failed": 500}
EXIT_CODE: dict[Code, int] = {"bad_request": 2, "denied": 4, "not_found": 5, "refused": 4, "failed": 1}


class AdminError(Exception):
    """Shown as `{"error": {"code", "message"}}`."""

    def __init__(self, code: Code, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(message)
