"""Exit codes of every command, and the one way in which a command fails."""

from __future__ import annotations

from enum import IntEnum
from typing import IO, Any

import click


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    NOBODY = 3
    REFUSED = 4
    NOT_FOUND = 5
    INTERRUPTED = 130


MEANING = {
    Exit.OK: "done",
    Exit.FAILED: "failed; for `drain`: rooms were left at the deadline and aborted; for `doctor`: holes are open",
    Exit.USAGE: "bad usage or configuration; nothing was done",
    Exit.NOBODY: "no control plane at the socket",
    Exit.REFUSED: "refused: not now, or not to you; for `start`: one already runs on the socket",
    Exit.NOT_FOUND: "no such room",
    Exit.INTERRUPTED: "interrupted",
}


class Failure(click.ClickException):
    """Ends the command with one clear line (or one a problem) and no traceback."""

    def __init__(self, message: str, code: Exit) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc] # click reads it from the instance

    def show(self, file: IO[Any] | None = None) -> None:
        for line in self.message.splitlines():
            click.echo(f"dsv4ctl: {line}", file=file, err=file is None)
