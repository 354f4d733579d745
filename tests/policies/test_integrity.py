from __future__ import annotations

import pytest

from dsv4ctl.policies.integrity import OnMismatch, Verdict, on_mismatch
from dsv4ctl.policies.registry import load


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("read", Verdict.BEFORE_READ),
        ("emit", Verdict.BEFORE_OUTPUT),
        ("off", Verdict.NONE),
        ("sample:1", Verdict.BEFORE_READ),
    ],
)
def test_what_waits_for_the_verdict(name: str, verdict: Verdict) -> None:
    policy = load("integrity", name)()
    assert {policy.verdict(room) for room in (0, 7, 2**63 - 1)} == {verdict}
    assert policy.compares_digests() is (verdict is not Verdict.NONE)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_a_sample_is_that_share_of_any_numbers_and_the_same_for_whoever_asks(share: float) -> None:
    """Numbers in a row, and far apart: neither their size nor their low bits decide."""
    policies = [load("integrity", f"sample:{share}")() for _ in range(2)]
    for rooms in (range(10_000), range(0, 2**63, 2**63 // 10_000)):
        chosen = [[policy.verdict(room) for room in rooms] for policy in policies]
        assert chosen[0] == chosen[1]
        assert chosen[0].count(Verdict.BEFORE_READ) / len(rooms) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(
    ("bytes_to_client", "attempts", "what"),
    [(0, 1, OnMismatch.RE_PREFILL), (0, 2, OnMismatch.ERROR), (1, 1, OnMismatch.ERROR)],
)
def test_one_new_prefill_and_only_before_the_first_byte(bytes_to_client: int, attempts: int, what: OnMismatch) -> None:
    assert on_mismatch(bytes_to_client=bytes_to_client, attempts=attempts) is what
