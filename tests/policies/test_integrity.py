from __future__ import annotations

import pytest

from dsv4ctl.policies.integrity import Off, OnMismatch, Read, on_mismatch


def test_read_waits_for_the_verdict() -> None:
    assert Read().compares_digests()
    assert Read().verdict_before_first_read()


def test_off_compares_nothing() -> None:
    assert not Off().compares_digests()
    assert not Off().verdict_before_first_read()


@pytest.mark.parametrize(
    ("bytes_to_client", "attempts", "what"),
    [(0, 1, OnMismatch.RE_PREFILL), (0, 2, OnMismatch.ERROR), (1, 1, OnMismatch.ERROR)],
)
def test_one_new_prefill_and_only_before_the_first_byte(bytes_to_client: int, attempts: int, what: OnMismatch) -> None:
    assert on_mismatch(bytes_to_client=bytes_to_client, attempts=attempts) is what
