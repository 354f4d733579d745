"""JSON lines on standard output, which the control plane reads and re-emits."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec


class Log:
    """One write a line, so that threads never mix theirs. The supervisor always reads the pipe."""

    def __init__(self, **context: Any) -> None:
        self._context = context

    def __call__(self, event: str, level: str = "info", **fields: Any) -> None:
        line = {"ts": time.time(), "level": level, "event": event, **self._context, **fields}
        os.write(1, msgspec.json.encode(line, enc_hook=str) + b"\n")
