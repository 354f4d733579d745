"""From the engine's threads to one HTTP handler: the outputs of a request, and the text they become."""

from __future__ import annotations

import asyncio
import codecs
from typing import NamedTuple

from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.engine_adapters.reference.requests import Finished, Output, Token


class Outputs:
    """The queue of one request. `emit` is called from any thread, all else on the event loop.

    Holds at most `limit` tokens over its life: more of them end the request as an engine fault.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self._loop = loop
        self._left = limit
        self._limit = limit
        self._waiting: list[Output] = []
        self._some = asyncio.Event()
        self._closed = False
        self.ended_by_engine = False  #: its Finished has come: there is nothing left to abort

    def emit(self, output: Output) -> None:
        """Never blocks and never raises: the engine's threads outlive the server."""
        try:
            self._loop.call_soon_threadsafe(self._add, output)
        except RuntimeError:  # the loop is closed: whoever waited is gone
            return

    async def take(self) -> list[Output]:
        """Everything that has come since the last call, at least one output.

        Waits without a deadline: the engine ends every request by its room's deadline, and the
        handler of a client that leaves is cancelled.
        """
        await self._some.wait()
        self._some.clear()
        taken, self._waiting = self._waiting, []
        return taken

    def _add(self, output: Output) -> None:
        if isinstance(output, Finished):
            self.ended_by_engine = True
        if self._closed:
            return
        if isinstance(output, Token):
            if self._left == 0:
                message = f"the engine generated more than the {self._limit} tokens asked for"
                output = Finished("abort", message, AbortSource.ENGINE_FAULT, 0, 0)
            self._left -= 1
        self._closed = isinstance(output, Finished)
        self._waiting.append(output)
        self._some.set()


class Step(NamedTuple):
    """What one batch of outputs added to an answer. `text` is whole characters only."""

    text: str
    first: bool
    last: bool


class Answer:
    """A growing answer.

    The text of a byte-level model may end inside a character: those bytes are held back until the
    character is whole or can no longer become so (then U+FFFD). All the texts of the steps together
    are `tokenizer.decode` of the tokens.
    """

    def __init__(self, prompt_tokens: int, keep: int) -> None:
        """`keep`: tokens the client is told of; later ones are not part of the answer."""
        self.prompt_tokens = prompt_tokens
        self.ids: list[int] = []
        self.text = ""
        self.finished: Finished | None = None
        self._keep = keep
        self._started = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def aborted(self) -> Finished | None:
        """How the request ended, if neither at its length nor at a stop."""
        if self.finished is None or self.finished.reason in ("length", "stop"):
            return None
        return self.finished

    def add(self, outputs: list[Output]) -> Step:
        new: list[int] = []
        for output in outputs:
            if isinstance(output, Finished):
                self.finished = output
            elif len(self.ids) + len(new) < self._keep:
                new.append(output.id)
        self.ids += new
        last = self.finished is not None
        text = self._decoder.decode(bytes(token for token in new if token < 256), final=last)
        self.text += text
        first, self._started = not self._started, True
        return Step(text, first, last)
