"""A paused engine: nothing is computed and nothing is lost, its rooms can still be aborted, ranks pause as one."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from dsv4ctl.controlplane.config.schema import EngineConfig, HiCacheConfig, ReferenceConfig
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey
from dsv4ctl.engine_adapters.reference.engine import Engine
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.oracle import Oracle
from dsv4ctl.engine_adapters.reference.requests import Output, Request, Token
from pair import Pair
from ranks import Ranks
from single import answer

#: Rounds that a paused engine is watched for.
ROUNDS = 5
NEW = 8


def prompt(seed: int, tokens: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(256) for _ in range(tokens)]


def expected(ids: list[int]) -> list[int]:
    return Oracle(Geometry(), 0).generate(ids, NEW).tokens


@contextmanager
def engine_of(number: int) -> Iterator[Ranks]:
    """A single engine of so many ranks."""
    config = EngineConfig(
        name="s",
        role="single",
        ranks=number,
        hicache=HiCacheConfig(enabled=False),
        reference=ReferenceConfig(device_pages=12),
    )
    ranks = Ranks(config)
    try:
        yield ranks
    finally:
        ranks.stop()


def ask_and_pause(ranks: Ranks, ids: list[int], after: int) -> tuple[RoomKey, queue.Queue[Output]]:
    """A request whose engine is told to pause by whoever takes its token number `after`: in the step of that token."""
    key, outputs, first = ranks.room(), queue.Queue[Output](), ranks.engines[0]

    def emit(output: Output) -> None:
        outputs.put(output)
        if isinstance(output, Token) and outputs.qsize() == after:
            first.pause_generation(abort=False)

    first.submit(Request("r", key, tuple(ids), NEW, True, None, None, emit))
    return key, outputs


def until_paused(ranks: Ranks) -> None:
    ranks.until("every rank is paused", lambda: all(engine._loop.paused for engine in ranks.engines))


def after_rounds(ranks: Ranks) -> None:
    """Returns when every rank has been through some more rounds."""
    first = ranks.engines[0]._loop
    seen = [engine._loop.rounds for engine in ranks.engines]

    def passed() -> bool:
        first.wake()
        return all(engine._loop.rounds > n + ROUNDS for engine, n in zip(ranks.engines, seen, strict=True))

    ranks.until("some rounds", passed)


def note_steps(engine: Engine, steps: list[int]) -> None:
    """Notes the round of every step."""
    loop, plain = engine._loop, engine._loop._step

    def step(*arguments: object) -> None:
        steps.append(loop.rounds)
        plain(*arguments)  # type: ignore[arg-type]

    loop._step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("number", [1, 2])
def test_paused_in_the_middle_of_an_answer_it_goes_on_where_it_was(number: int) -> None:
    with engine_of(number) as ranks:
        steps: list[list[int]] = [[] for _ in ranks.engines]
        for engine, mine in zip(ranks.engines, steps, strict=True):
            note_steps(engine, mine)
        ids, later = prompt(1, 300), prompt(2, 100)
        _, outputs = ask_and_pause(ranks, ids, 3)
        until_paused(ranks)
        _, waiting = ranks.ask(later, NEW)
        after_rounds(ranks)
        assert outputs.qsize() == 3
        assert all(mine == steps[0] for mine in steps), "all ranks pause in one round"
        for engine in ranks.engines:
            assert engine._loop.work() == 0
            assert engine._loop.queues() == {"waiting": 1, "prefilling": 0, "transferring": 0, "decoding": 1}
        assert ranks.engines[0].info()["paused"]
        held = [engine.gate.counts()["owned"] for engine in ranks.engines]
        after_rounds(ranks)
        assert [engine.gate.counts()["owned"] for engine in ranks.engines] == held
        ranks.engines[0].continue_generation()
        assert answer(outputs)[0] == expected(ids)
        assert answer(waiting)[0] == expected(later)
        assert all(mine == steps[0] for mine in steps)
        ranks.until("at rest", ranks.at_rest)


def test_asked_for_in_the_middle_of_a_round_it_holds_from_the_next_one_on() -> None:
    """Rank 0 is asked when this round's orders are out: it computes once more, as the other does."""
    with engine_of(2) as ranks:
        first, asked = ranks.engines[0], [False]
        agreement, plain = first._loop._agreement, first._loop._agreement.least

        def least(values: Sequence[int]) -> list[int]:
            if first._loop.decoding and not asked[0]:
                asked[0] = True
                first.pause_generation(abort=False)
            return plain(values)

        agreement.least = least  # type: ignore[method-assign]
        _, outputs = ranks.ask(prompt(1, 300), NEW)
        until_paused(ranks)
        after_rounds(ranks)
        assert ranks.engines[0]._loop.steps == ranks.engines[1]._loop.steps
        first.continue_generation()
        assert answer(outputs)[0] == expected(prompt(1, 300))


@pytest.mark.parametrize("number", [1, 2])
def test_rooms_are_aborted_while_it_is_paused(number: int) -> None:
    """One that decodes and one that waits, each by what the last rank alone has heard; both give everything back."""
    with engine_of(number) as ranks:
        key, outputs = ask_and_pause(ranks, prompt(1, 300), 3)
        until_paused(ranks)
        waits, waiting = ranks.ask(prompt(2, 100), NEW)
        ranks.until("every rank has it", lambda: all(engine._loop.waiting for engine in ranks.engines))
        for room in (key, waits):
            ranks.engines[-1]._agent.abort(room, AbortSource.CLIENT, "left")
        for ended in (outputs, waiting):
            assert answer(ended)[1].source is AbortSource.CLIENT
        ranks.until("at rest", ranks.at_rest)
        assert all(engine._loop.paused for engine in ranks.engines)
        assert all(not any(engine.gate.counts()["leased"].values()) for engine in ranks.engines)


def test_mode_abort_ends_what_runs_and_keeps_what_follows() -> None:
    with engine_of(1) as ranks:
        _, outputs = ask_and_pause(ranks, prompt(1, 300), 3)
        until_paused(ranks)
        ranks.engines[0].pause_generation(abort=True)
        ended = answer(outputs)[1]
        assert (ended.source, ended.message) == (AbortSource.ADMIN, "aborted by /pause_generation")
        _, waiting = ranks.ask(prompt(2, 100), NEW)
        after_rounds(ranks)
        assert waiting.empty()
        ranks.engines[0].continue_generation()
        assert answer(waiting)[0] == expected(prompt(2, 100))


def test_a_paused_engine_ends_when_it_is_told_to() -> None:
    with engine_of(2) as ranks:
        ranks.engines[0].pause_generation(abort=False)
        until_paused(ranks)
        ranks.engines[0]._loop.stop()
        for engine in ranks.engines:
            engine._thread.join(60)
            assert not engine._thread.is_alive()


def test_what_lands_on_a_paused_decode_engine_waits_there() -> None:
    """The prefill engine is paused first: its room waits, until decode is paused behind its admission."""
    pair, ids = Pair("read"), prompt(3, 300)
    prefill, decode = pair.prefill, pair.decode
    try:
        prefill.pause_generation(abort=False)
        pair.until("prefill is paused", lambda: prefill._loop.paused)
        sequence, outputs = pair.ask(ids, NEW)
        pair.until("prefill may begin", lambda: [s.may_begin for s in prefill._loop.waiting] == [True])
        decode.pause_generation(abort=False)
        pair.until("decode is paused", lambda: decode._loop.paused)
        assert prefill._loop.steps == 0
        prefill.continue_generation()
        pair.until("it has landed and is verified", lambda: sequence.manifest is not None)
        seen = decode._loop.rounds

        def passed() -> bool:
            decode._loop.wake()
            return decode._loop.rounds > seen + ROUNDS

        pair.until("some rounds", passed)
        assert outputs.empty()
        assert decode._loop.queues()["transferring"] == 1
        decode.continue_generation()
        tokens, finished = answer(outputs)
        assert (tokens, finished.reason) == (expected(ids), "length")
        assert pair.ended == []
    finally:
        pair.stop()
