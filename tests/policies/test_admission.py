from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4ctl.policies.admission import Bytes, InFlight, PoolCost, room_bytes

POOLS = (PoolCost("full", 1000), PoolCost("window", 100), PoolCost("point", 10), PoolCost("none", 1))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, 0),
        (1, 1000 + 100 + 10),
        (256, 1000 + 100 + 10),
        (257, 2000 + 200 + 10),  # the window of 128 reaches back into the first page
        (383, 2000 + 200 + 10),
        (384, 2000 + 100 + 10),  # and here it begins with the second
        (512, 2000 + 100 + 10),
    ],
)
def test_pages_move_whole(tokens: int, expected: int) -> None:
    assert room_bytes(tokens, POOLS, page_tokens=256, window_tokens=128) == expected


@given(st.integers(1, 5000), st.integers(1, 512), st.integers(1, 512))
def test_window_pages_are_those_that_hold_its_tokens(tokens: int, page_tokens: int, window: int) -> None:
    held = {position // page_tokens for position in range(max(tokens - window, 0), tokens)}
    cost = room_bytes(tokens, [PoolCost("window", 1)], page_tokens=page_tokens, window_tokens=window)
    assert cost == len(held)


def test_below_both_limits_a_room_is_admitted() -> None:
    assert Bytes(max_rooms=2, max_bytes=100).decide(InFlight(1, 60), 40) is None


def test_refused_by_rooms() -> None:
    refused = Bytes(max_rooms=2, max_bytes=100).decide(InFlight(2, 0, room_seconds=8.0), 1)
    assert refused is not None
    assert refused.reason == "2 rooms in flight, limit 2"
    assert refused.retry_after == 4  # two rooms of 8 s each: one leaves every 4 s


def test_refused_by_bytes() -> None:
    refused = Bytes(max_rooms=9, max_bytes=100).decide(InFlight(2, 80, room_seconds=8.0), 40)
    assert refused is not None
    assert refused.reason == "80 bytes in flight, limit 100"
    assert refused.retry_after == 2


def test_a_room_that_never_fits_is_told_so() -> None:
    refused = Bytes(max_rooms=9, max_bytes=100).decide(InFlight(0, 0), 101)
    assert refused is not None
    assert refused.retry_after is None


@given(st.integers(0, 50), st.integers(0, 500), st.floats(0, 1e6), st.integers(0, 200))
def test_the_limits_hold_and_the_wait_is_bounded(rooms: int, held: int, life: float, more: int) -> None:
    refused = Bytes(max_rooms=10, max_bytes=100).decide(InFlight(rooms, held, life), more)
    assert (refused is None) == (rooms + 1 <= 10 and held + more <= 100)
    if refused is not None and refused.retry_after is not None:
        assert 1 <= refused.retry_after <= Bytes.RETRY_CAP


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="max_rooms 0"):
        Bytes(max_rooms=0, max_bytes=1)
