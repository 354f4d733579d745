from __future__ import annotations

from dsv4ctl.policies.restart import Backoff, GiveUp, RestartIn

BACKOFF = Backoff(initial=0.5, cap=3.0, tries=4, window=100.0)


def test_waits_double_up_to_the_cap() -> None:
    waits = [BACKOFF.decide([0.0] * failures, now=0.0) for failures in range(1, 5)]
    assert waits == [RestartIn(0.5), RestartIn(1.0), RestartIn(2.0), RestartIn(3.0)]


def test_gives_up_above_the_limit_within_the_window() -> None:
    assert BACKOFF.decide([0, 25, 50, 75, 100], now=100.0) == GiveUp("ended 5 times within 100 s, limit 4")


def test_failures_outside_the_window_are_forgotten() -> None:
    assert BACKOFF.decide([0, 25, 50, 75, 101], now=101.0) == RestartIn(3.0)
    assert BACKOFF.decide([0, 1, 2, 3, 500], now=500.0) == RestartIn(0.5)
