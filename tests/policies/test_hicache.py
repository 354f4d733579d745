from __future__ import annotations

from dsv4ctl.policies.hicache import SealedPage, WriteThrough

PREFIX = [SealedPage(7, True), SealedPage(3, False), SealedPage(9, False)]


def test_backs_up_what_the_host_lacks_front_first() -> None:
    policy = WriteThrough(load_threshold_pages=1)
    assert policy.back_up(PREFIX, host_room=8) == (3, 9)
    assert policy.back_up(PREFIX, host_room=1) == (3,)


def test_a_full_host_pool_skips_the_backup() -> None:
    assert WriteThrough(load_threshold_pages=1).back_up(PREFIX, host_room=0) == ()


def test_loads_from_the_threshold_on() -> None:
    policy = WriteThrough(load_threshold_pages=2)
    assert [policy.loads(pages) for pages in (0, 1, 2, 3)] == [False, False, True, True]
    assert not WriteThrough(load_threshold_pages=0).loads(0)
