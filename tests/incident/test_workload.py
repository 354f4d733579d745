"""Conversations depend on nothing but their seed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dsv4ctl.controlplane.incident.workload import PAGE_TOKENS, QUICK_SIZE, Size, conversations, victims

SIZE = Size()
ANSWER = (1,) * SIZE.new_tokens


def test_the_same_seed_gives_the_same_conversations() -> None:
    assert conversations(3, 6, SIZE) == conversations(3, 6, SIZE)
    assert conversations(3, 6, SIZE) != conversations(4, 6, SIZE)
    assert conversations(3, 6, SIZE) == conversations(3, 8, SIZE)[:6]


def test_two_sessions_of_a_group_share_whole_pages_and_no_more() -> None:
    first, second, other = conversations(0, 3, SIZE)
    assert first.prefix == second.prefix
    assert len(first.prefix) == SIZE.prefix_pages * PAGE_TOKENS
    assert first.prefix != other.prefix
    assert first.turns[0][:PAGE_TOKENS] != second.turns[0][:PAGE_TOKENS]


def test_each_prompt_begins_with_the_one_before_and_its_answer() -> None:
    (conversation,) = conversations(0, 1, SIZE)
    prompts = [conversation.prompt([ANSWER] * round_) for round_ in range(SIZE.rounds)]
    for before, after in pairwise(prompts):
        assert after[: len(before) + len(ANSWER)] == before + ANSWER
        assert len(after) >= len(before) + len(ANSWER) + SIZE.turn_tokens[0]


@pytest.mark.parametrize("size", [SIZE, QUICK_SIZE])
def test_prompts_are_4_to_14_pages_of_byte_tokens(size: Size) -> None:
    for conversation in conversations(1, 64, size):
        last = conversation.prompt([ANSWER] * (size.rounds - 1))
        assert 3 * PAGE_TOKENS < len(conversation.prompt([])) < len(last) < 14 * PAGE_TOKENS
        assert all(0 <= token < 256 for token in last)


def test_half_of_the_sessions_are_aborted_and_not_always_the_same() -> None:
    assert len(victims(0, 0, 16)) == 8
    assert victims(0, 0, 16) == victims(0, 0, 16)
    assert len({victims(0, round_, 16) for round_ in range(4)}) > 1
