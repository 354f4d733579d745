"""A progress bar on a terminal's standard error; nothing anywhere else."""

from __future__ import annotations

from typing import TextIO

_WIDTH = 30


class Progress:
    """`total` steps of about the same length."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream = stream
        self._shown = stream.isatty()
        self._total = total
        self._done = 0
        self._label = ""

    def label(self, text: str) -> None:
        self._label = text
        self._draw()

    def step(self) -> None:
        self._done += 1
        self._draw()

    def clear(self) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _draw(self) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K" + bar(self._done, self._total, self._label))
            self._stream.flush()


def bar(done: int, total: int, label: str) -> str:
    filled = _WIDTH * done // max(total, 1)
    return f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {done}/{total} {label}"
