from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dsv4ctl.engine_adapters.sglang.digests import Check, Noted
from dsv4ctl.engine_adapters.sglang.fetched import Fetched
from dsv4ctl.engine_adapters.sglang.loads import Pages
from dsv4ctl.kernels.buffers import Firsts


class Event:
    def __init__(self) -> None:
        self.over, self.waited = False, 0

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True
        self.waited += 1


def test_what_was_once_there_is_not_asked_for_again() -> None:
    event = Event()
    fetched = Fetched(np.arange(3, dtype=np.uint64), event)
    assert not fetched.ready()
    event.over = True
    assert fetched.ready()
    event.over = False  # of a later use
    assert fetched.ready()
    assert fetched.get().tolist() == [0, 1, 2]
    assert not event.waited


def test_parts_wait_for_the_whole() -> None:
    event = Event()
    parts = Fetched(np.arange(5, dtype=np.uint64), event).split([2, 0, 3])
    assert not any(part.ready() for part in parts)
    assert [part.get().tolist() for part in parts] == [[0, 1], [], [2, 3, 4]]
    assert event.over


def test_pages_of_a_copy_are_known_once_their_tokens_were_read() -> None:
    event, asked = Event(), []

    class Reader:
        def tokens(self, listed: Sequence[Firsts]) -> Any:
            asked.extend(listed)
            return np.array([int(one.tokens[at]) for one in listed for at in one.at], dtype=np.uint64), event

    def tokens(page_tokens: int, *pages: int) -> torch.Tensor:
        return torch.cat([torch.arange(page * page_tokens, (page + 1) * page_tokens) for page in pages])

    sides = {"full": (tokens(4, 7, 2), tokens(4, 0, 1)), "swa": (tokens(2, 5).int(), tokens(2, 9))}
    reader: Any = Reader()
    pages = Pages(sides, {"full": 4, "swa": 2}, reader)
    assert [list(one.at) for one in asked] == [[0, 4], [0]]
    assert all(one.tokens.dtype is torch.int64 for one in asked)
    assert not pages.ready()
    assert pages.get() == {"full": ((7, 2), (0, 1)), "swa": ((5,), (9,))}
    assert pages.ready()
    assert event.waited == 1


def test_a_check_is_known_once_both_sides_are() -> None:
    def fetched(values: list[int]) -> tuple[Fetched, Event]:
        event = Event()
        return Fetched(np.array(values, dtype=np.uint64), event), event

    (expected, noted), (found, computed) = fetched([1, 2, 3, 0]), fetched([1, 5, 3, 4])
    check = Check(Noted((), expected), found)
    assert not check.ready()
    noted.over = True
    assert not check.ready()
    noted.over, computed.over = False, True
    early, late = fetched([1]), fetched([1])
    late[1].over = True
    assert not Check(Noted((), early[0]), late[0]).ready()
    assert check.ready()
    assert check.differences() == 2
