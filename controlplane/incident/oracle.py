"""The oracle as a process: the reference model, one request at a time, without a cache. JSON lines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from dsv4ctl.controlplane.incident.evaluate import Expected
from dsv4ctl.controlplane.incident.process import ended, ours
from dsv4ctl.controlplane.incident.rows import Dtype
from dsv4ctl.controlplane.incident.workload import Conversation, Turn

_MODULE = "dsv4ctl.engine_adapters.reference.oracle"
#: Seconds for one answer; the first includes the start of the process.
ANSWER_DEADLINE = 180.0
#: Oracle processes at a time. Each answers one request at a time.
ORACLES = 2
_MAX_LINE = 1 << 20


class OracleError(RuntimeError):
    """The oracle ended or answered with an error; the message says which."""


class _Answer(msgspec.Struct):
    output_ids: tuple[int, ...] = ()
    folded: dict[str, list[int]] = {}
    folded_full_pages: dict[str, list[int]] = {}
    error: str | None = None


class Script(NamedTuple):
    """Every prompt of the run, and what is right; both by (session, round). Histories use the right answers."""

    turns: dict[tuple[int, int], Turn]
    expected: dict[tuple[int, int], Expected]


class Oracle:
    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin = process.stdin
        self._lines = BufferedByteReceiveStream(process.stdout)

    async def ask(self, prompt: Sequence[int], new_tokens: int) -> Expected:
        """Raises OracleError, TimeoutError."""
        question = {"id": 0, "input_ids": prompt, "max_new_tokens": new_tokens}
        try:
            with anyio.fail_after(ANSWER_DEADLINE):
                await self._stdin.send(msgspec.json.encode(question) + b"\n")
                line = await self._lines.receive_until(b"\n", _MAX_LINE)
        except (anyio.BrokenResourceError, anyio.IncompleteRead, anyio.EndOfStream) as error:
            raise OracleError("the oracle ended before it answered; its errors stand above") from error
        answer = msgspec.json.decode(line, type=_Answer)
        if answer.error is not None:
            raise OracleError(f"the oracle refused: {answer.error}")
        return Expected(answer.output_ids, answer.folded, answer.folded_full_pages)


@asynccontextmanager
async def oracle(index_k: Dtype, model_seed: int) -> AsyncIterator[Oracle]:
    """Its standard error is ours."""
    geometry = msgspec.json.encode({"index_k_dtype": index_k}).decode()
    command = ours(["-m", _MODULE, "--seed", str(model_seed), "--geometry", geometry])
    process = await anyio.open_process(command, stderr=None)
    async with ended(process):
        yield Oracle(process)


async def write_scripts(
    index_k: Dtype, model_seed: int, spoken: Sequence[Sequence[Conversation]], told: Callable[[], None]
) -> list[Script]:
    """One script for each of `spoken`. Asks one oracle a core, each about sessions of its own.

    `told` is called after each answer. Raises OracleError, TimeoutError.
    """
    scripts = [Script({}, {}) for _ in spoken]
    sessions = [
        (script, session, conversation)
        for script, conversations in zip(scripts, spoken, strict=True)
        for session, conversation in enumerate(conversations)
    ]

    async def ask(share: list[tuple[Script, int, Conversation]]) -> None:
        async with oracle(index_k, model_seed) as asked:
            for script, session, conversation in share:
                await _play(asked, session, conversation, script, told)

    async with anyio.create_task_group() as tasks:
        for first in range(min(ORACLES, len(sessions))):
            tasks.start_soon(ask, sessions[first::ORACLES])
    return scripts


async def _play(
    asked: Oracle,
    session: int,
    conversation: Conversation,
    script: Script,
    told: Callable[[], None],
) -> None:
    answers: list[tuple[int, ...]] = []
    for round_ in range(len(conversation.turns)):
        turn = Turn(session, round_, conversation.prompt(answers), conversation.new_tokens)
        right = await asked.ask(turn.prompt, turn.new_tokens)
        script.turns[session, round_], script.expected[session, round_] = turn, right
        answers.append(right.output_ids)
        told()
