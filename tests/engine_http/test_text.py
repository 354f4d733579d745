"""Texts of a stream: whole characters, and together the text of the whole answer."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4ctl.engine_adapters.reference.http.answer import Answer, Outputs
from dsv4ctl.engine_adapters.reference.requests import Finished, Output, Token
from dsv4ctl.engine_adapters.reference.tokenizer import EOS, USER, decode
from http_engine import ended, tokens


def texts(batches: list[list[Output]]) -> list[str]:
    answer = Answer(0, keep=10_000)
    return [answer.add(batch).text for batch in batches]


def test_bytes_of_an_unfinished_character_are_held_back() -> None:
    euro = "€".encode()
    assert texts([tokens(euro[:1]), tokens(euro[1:2]), [*tokens(euro[2:]), ended()]]) == ["", "", "€"]


def test_special_tokens_inside_a_character_do_not_break_it() -> None:
    euro = list("€".encode())
    assert texts([tokens([euro[0], USER]), tokens([*euro[1:], EOS]), [ended()]]) == ["", "€", ""]


def test_bytes_that_can_be_no_character_are_told_at_once_and_a_cut_one_at_the_end() -> None:
    assert texts([tokens(b"\xffa"), tokens(b"\xe2\x82"), [ended()]]) == ["\ufffda", "", "\ufffd"]


@given(st.lists(st.lists(st.integers(0, 263) | st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F]))))
def test_the_texts_together_are_the_decoded_tokens(batches: list[list[int]]) -> None:
    told = texts([*(tokens(batch) for batch in batches), [ended()]])
    assert "".join(told) == decode([token for batch in batches for token in batch])
    for text in told:
        text.encode("utf-8")


@pytest.mark.asyncio
async def test_outputs_of_another_thread_come_in_order_and_together() -> None:
    outputs = Outputs(asyncio.get_running_loop(), limit=100)
    thread = threading.Thread(target=lambda: [outputs.emit(Token(one)) for one in range(100)])
    thread.start()
    thread.join()
    assert await outputs.take() == [Token(one) for one in range(100)]
    outputs.emit(ended())
    assert isinstance((await outputs.take())[0], Finished)
    assert outputs.ended_by_engine


def test_emit_after_the_loop_has_closed_does_not_hurt_the_engine() -> None:
    loop = asyncio.new_event_loop()
    outputs = Outputs(loop, limit=1)
    loop.close()
    outputs.emit(Token(1))
