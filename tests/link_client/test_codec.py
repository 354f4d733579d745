"""The codec against any bytes: frames come out whole, in order, and nothing but FrameError goes wrong."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4ctl.controlplane.link import codec
from dsv4ctl.controlplane.link.codec import Decoder, FrameError, encode
from dsv4ctl.controlplane.link.wire import Answer, Fenced, Received, ToControlPlane, ToRank


@settings(max_examples=200)
@given(st.lists(st.integers(0, 2**40), max_size=8), st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_any_cut_of_the_stream_gives_the_same_frames(numbers: list[int], cuts: list[int]) -> None:
    data = b"".join(encode(Received(number)) for number in numbers)
    decoder: Decoder[ToControlPlane] = Decoder(ToControlPlane)
    found, at, turn = [], 0, 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        found += decoder.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert found == [Received(number) for number in numbers]


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_any_body_is_a_frame_or_a_frame_error_and_the_next_is_read(bodies: list[bytes]) -> None:
    decoder: Decoder[ToRank] = Decoder(ToRank)
    for body in bodies:
        (found,) = decoder.feed(len(body).to_bytes(4, "big") + body)
        assert isinstance(found, FrameError | msgspec.Struct)
    assert list(decoder.feed(encode(Fenced("x")))) == [Fenced("x")]


def test_a_body_nested_too_deep_is_one_bad_frame() -> None:
    plain = msgspec.msgpack.encode(Answer(1, "x"))
    body = plain.replace(b"\xa1x", b"\x91" * 100_000 + b"\x90")
    decoder: Decoder[ToControlPlane] = Decoder(ToControlPlane)
    (found,) = decoder.feed(len(body).to_bytes(4, "big") + body)
    assert isinstance(found, FrameError)


def test_frames_above_the_limit_are_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 100)
    with pytest.raises(FrameError, match=r"Fenced is \d+ bytes, the limit is 100"):
        encode(Fenced("x" * 200))
    decoder: Decoder[ToRank] = Decoder(ToRank)
    with pytest.raises(FrameError, match="a frame of 101 bytes was announced"):
        list(decoder.feed((101).to_bytes(4, "big")))
