"""Policy `emit`: a room decodes before its verdict, and not one token of it leaves before then."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.engine_adapters.reference import receiver
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.landed import LandedDigests, digest_landed
from dsv4ctl.engine_adapters.reference.oracle import Oracle
from pair import Pair
from single import answer

NEW = 12


class Verdicts:
    """Digests of the pages before the tail: taken once `may` is set, and wrong if `wrong`."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.wrong = False

    def digest(self, *args: Any, tail: bool) -> LandedDigests:
        assert tail or self.may.wait(60)
        found = digest_landed(*args, tail=tail)
        return {pool: digests ^ 1 for pool, digests in found.items()} if self.wrong and not tail else found


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Verdicts]:
    verdicts = Verdicts()
    monkeypatch.setattr(receiver, "digest_landed", verdicts.digest)
    yield verdicts
    verdicts.may.set()


@pytest.fixture
def pair(verdicts: Verdicts) -> Iterator[Pair]:
    pair = Pair("emit")
    yield pair
    verdicts.may.set()
    pair.stop()


def prompt(tokens: int) -> list[int]:
    numbers = random.Random(tokens)
    return [numbers.randrange(256) for _ in range(tokens)]


def test_every_token_is_there_and_held_until_the_verdict(pair: Pair, verdicts: Verdicts) -> None:
    """The engine has nothing left to compute for the room: whatever does not come now waits for the verdict alone."""
    ids = prompt(600)
    sequence, outputs = pair.ask(ids, NEW)
    pair.until("all is computed", lambda: sequence.over == "length")
    assert outputs.empty()
    verdicts.may.set()
    tokens, finished = answer(outputs)
    assert (tokens, finished.reason) == (Oracle(Geometry(), 0).generate(ids, NEW).tokens, "length")
    pair.until("at rest", lambda: not pair.decode._rooms.live and not pair.prefill._rooms.live)
    assert pair.decode.gate.totals()["tickets"] == 0


def test_a_bad_verdict_lets_no_token_out(pair: Pair, verdicts: Verdicts) -> None:
    verdicts.wrong = True
    sequence, outputs = pair.ask(prompt(600), NEW)
    pair.until("all is computed", lambda: sequence.over == "length")
    verdicts.may.set()
    tokens, finished = answer(outputs)
    assert (tokens, finished.source) == ([], AbortSource.INTEGRITY)
    pair.until("at rest", lambda: not pair.decode._rooms.live and not pair.prefill._rooms.live)


def test_after_the_verdict_tokens_leave_as_they_come(pair: Pair, verdicts: Verdicts) -> None:
    verdicts.may.set()
    sequence, outputs = pair.ask(prompt(300), 40)
    outputs.get(timeout=60)
    assert sequence.held is None
    assert answer(outputs)[1].reason == "length"
