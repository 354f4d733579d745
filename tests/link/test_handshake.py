"""Who is let in on a link, and what a rank that is not is told."""

from __future__ import annotations

import msgspec
import pytest

from dsv4ctl.controlplane.link.handshake import Expected, decode_hello, refusal
from dsv4ctl.controlplane.link.wire import WIRE_VERSION, Geometry, Hello, Role
from fake_engine import GEOMETRY

EXPECTED = {
    "p": Expected("prefill0", Role.PREFILL, 0, 1),
    "d": Expected("decode0", Role.DECODE, 0, 1),
    "s": Expected("single0", Role.SINGLE, 0, 1),
}


def _hello(incarnation: str, geometry: Geometry = GEOMETRY, wire: int = WIRE_VERSION) -> Hello:
    engine, role, rank, ranks = EXPECTED[incarnation]
    return Hello(wire, engine, role, rank, ranks, incarnation, 1, "http://127.0.0.1:1", 0, geometry)


def test_a_started_rank_is_let_in() -> None:
    assert refusal(_hello("d"), EXPECTED, [_hello("p")]) is None


def test_the_wire_version_is_judged_before_anything_else_is_believed() -> None:
    """A frame of another version may have other fields: only `wire` is read."""
    body = msgspec.msgpack.encode({"type": "Hello", "wire": WIRE_VERSION + 1, "of the future": True})
    with pytest.raises(ValueError, match=f"{WIRE_VERSION + 1} on the rank, {WIRE_VERSION} on the control plane"):
        decode_hello(body)


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode({"type": "Progress", "wire": WIRE_VERSION})])
def test_the_first_frame_is_hello(body: bytes) -> None:
    with pytest.raises(ValueError, match="first frame of a rank is Hello"):
        decode_hello(body)


def test_hello_survives_its_encoding() -> None:
    assert decode_hello(msgspec.msgpack.encode(_hello("p"))) == _hello("p")


def test_an_unknown_or_fenced_incarnation_is_refused() -> None:
    assert "incarnation p is unknown" in (refusal(_hello("p"), {}, []) or "")


def test_a_rank_that_claims_to_be_another_is_refused() -> None:
    liar = msgspec.structs.replace(_hello("p"), engine="decode0")
    reason = refusal(liar, EXPECTED, []) or ""
    assert "prefill0" in reason
    assert "decode0" in reason


def test_an_incarnation_connects_once() -> None:
    assert "connected already" in (refusal(_hello("p"), EXPECTED, [_hello("p")]) or "")


def test_geometry_that_differs_from_the_peers_is_refused_with_both_figures() -> None:
    other = msgspec.structs.replace(GEOMETRY, index_k_dtype="fp8")
    reason = refusal(_hello("d", other), EXPECTED, [_hello("p")]) or ""
    assert "decode0 against prefill0" in reason
    assert "'fp8' here, 'bf16' on the peer" in reason


def test_page_counts_may_differ_and_a_single_engine_needs_no_peer() -> None:
    fewer = msgspec.structs.replace(GEOMETRY, pages={"full": 1})
    assert refusal(_hello("d", fewer), EXPECTED, [_hello("p")]) is None
    other = msgspec.structs.replace(GEOMETRY, layers=9)
    assert refusal(_hello("s", other), EXPECTED, [_hello("p")]) is None
