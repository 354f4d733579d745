from __future__ import annotations

import pytest

from dsv4ctl.policies.routing import LeastBytesInFlight, Pair, RoundRobin

A, B, C = Pair("p0", "d0"), Pair("p0", "d1"), Pair("p1", "d0")


def test_round_robin_takes_turns_whatever_the_order_given() -> None:
    routing = RoundRobin()
    assert [routing.choose(pairs) for pairs in ([A, B, C], [C, B, A], [B, A, C], [A, C, B])] == [A, B, C, A]


def test_round_robin_goes_on_after_a_pair_that_left() -> None:
    routing = RoundRobin()
    assert [routing.choose([A, B, C]), routing.choose([A, B, C])] == [A, B]
    assert routing.choose([A, C]) == C
    assert routing.choose([A]) == A


def test_least_bytes_prefers_bytes_then_rooms_then_name() -> None:
    routing = LeastBytesInFlight()
    big = Pair("a", "d", bytes_in_flight=10, rooms_in_flight=1)
    small = Pair("b", "d", bytes_in_flight=5, rooms_in_flight=9)
    calm = Pair("c", "d", bytes_in_flight=5, rooms_in_flight=2)
    assert routing.choose([big, small, calm]) == calm
    assert routing.choose([C, B, A]) == A


@pytest.mark.parametrize("routing", [RoundRobin(), LeastBytesInFlight()])
def test_no_pair_is_an_error(routing: RoundRobin | LeastBytesInFlight) -> None:
    with pytest.raises(ValueError, match="no pair"):
        routing.choose([])


def test_single_engines_have_no_decode() -> None:
    assert RoundRobin().choose([Pair("s0", None)]).decode is None
