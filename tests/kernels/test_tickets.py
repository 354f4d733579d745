import pytest
import torch

from dsv4ctl.kernels.tickets import Tickets, missing_reference, release_reference
from dsv4ctl.kernels.tickets_triton import release


def test_release_sets_the_listed_words_alone() -> None:
    words, expected = torch.arange(300), torch.arange(300)
    groups = torch.arange(0, 300, 2, dtype=torch.int32)
    generations = torch.arange(1000, 1150)
    release(words, groups, generations)
    release_reference(expected, groups, generations)
    assert torch.equal(words, expected)


def test_a_page_is_missing_until_its_group_carries_its_generation() -> None:
    expected = torch.tensor([[2, 0, 3]])
    tickets = Tickets(torch.tensor([2, 2]), expected, torch.zeros(1, dtype=torch.int32), deadline_us=1, group_pages=2)
    assert missing_reference(tickets, torch.tensor([[0, 1, 3]])).tolist() == [[False, False, True]]


def test_words_of_another_dtype_are_refused() -> None:
    words = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"failed: torch\.int64"):
        Tickets(words, words, words, deadline_us=1)
    with pytest.raises(ValueError, match="deadline_us: positive"):
        Tickets(words, words, words.int(), deadline_us=0)
