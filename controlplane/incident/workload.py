"""Conversations, made from a seed: groups of two share a long prefix, and every prompt grows by turns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

#: Bytes as tokens; what is above them are special tokens.
_TOKENS = 256
PAGE_TOKENS = 256
GROUP = 2


class Size(NamedTuple):
    """How long the conversations are. `turn_tokens`: shortest and longest text of a user.

    `growing`: so many conversations, the first ones, fill three pages but for a token; their answers are a page long
    and outgrow the next one.
    """

    rounds: int = 4
    prefix_pages: int = 4
    turn_tokens: tuple[int, int] = (130, 260)
    new_tokens: int = 6
    growing: int = 0


#: Tokens of a prompt that grows.
_GROWING = 3 * PAGE_TOKENS - 1

#: Short prompts: six rows in less than a minute.
QUICK_SIZE = Size(prefix_pages=3, turn_tokens=(130, 200))


class Work(NamedTuple):
    """What a row is given to do."""

    sessions: int
    size: Size


_TWO = Size(rounds=2, prefix_pages=2, turn_tokens=(130, 200), new_tokens=4)
_ONE = _TWO._replace(rounds=1)
#: Conversations of a group grow at different speeds: one is loaded while the other is computed again.
_UNEVEN = Size(prefix_pages=3, turn_tokens=(100, 420))

#: Two take four pages each and need a fifth; of the others each takes one.
_CROWD = Size(rounds=1, prefix_pages=0, turn_tokens=(20, 60), new_tokens=3, growing=2)

#: By `Row.work`; the incident's own rows have none.
FULL_WORK = {
    "": Work(64, Size()),
    "ranks": Work(16, _TWO),
    "storms": Work(16, _ONE),
    "crowd": Work(200, _CROWD),
    "groups": Work(32, _UNEVEN),
}
QUICK_WORK = {
    "": Work(16, QUICK_SIZE),
    "ranks": Work(8, _TWO),
    "storms": Work(8, _ONE),
    "crowd": Work(40, _CROWD),
    "groups": Work(8, _UNEVEN._replace(rounds=3)),
}


class Turn(NamedTuple):
    """One request: its session, its round, the prompt, and how long its answer is."""

    session: int
    round: int
    prompt: tuple[int, ...]
    new_tokens: int

    @property
    def request_id(self) -> str:
        return f"incident-{self.session}-{self.round}"


class Conversation(NamedTuple):
    """`turns[r]` is what the user says in round r, `new_tokens` the length of each answer."""

    prefix: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...]
    new_tokens: int

    def prompt(self, answers: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The prompt of round `len(answers)`: everything said so far, and the next turn."""
        tokens = list(self.prefix)
        for turn, answer in zip(self.turns, answers, strict=False):
            tokens += [*turn, *answer]
        return (*tokens, *self.turns[len(answers)])


def conversations(seed: int, sessions: int, size: Size) -> list[Conversation]:
    """The same for the same arguments. Session 2n and 2n + 1 share a prefix of whole pages, and nothing else."""
    made: list[Conversation] = []
    prefix: tuple[int, ...] = ()
    for session in range(sessions):
        if session % GROUP == 0:
            prefix = _text(random.Random(f"{seed}/prefix/{session}"), size.prefix_pages * PAGE_TOKENS)
        dice = random.Random(f"{seed}/session/{session}")
        grows = session < size.growing
        tokens = (_GROWING, _GROWING) if grows else size.turn_tokens
        turns = tuple(_text(dice, dice.randint(*tokens)) for _ in range(size.rounds))
        made.append(Conversation(prefix, turns, PAGE_TOKENS + 4 if grows else size.new_tokens))
    return made


def victims(seed: int, round_: int, sessions: int) -> frozenset[int]:
    """Half of the sessions: those whose requests of this round are aborted on their way, and asked again."""
    return frozenset(random.Random(f"{seed}/victims/{round_}").sample(range(sessions), sessions // 2))


def _text(dice: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(dice.randrange(_TOKENS) for _ in range(tokens))
