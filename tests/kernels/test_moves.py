from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4ctl.kernels import moves_triton, ops
from dsv4ctl.kernels.buffers import PageBuffers, Reads, Seal, SpaceBuffers, check_tokens, seal_torch
from dsv4ctl.kernels.digest import digest_numpy
from dsv4ctl.kernels.digest_rows_triton import SealTriton
from dsv4ctl.kernels.moves_triton import ReaderTriton

CPU = torch.device("cpu")


def spaces() -> SpaceBuffers:
    """Four pages of two buffers, and four of another."""
    pages = torch.arange(4 * 3 * 8, dtype=torch.uint8).view(4, 24)
    return SpaceBuffers([[PageBuffers([pages, pages.flip(0)])], [PageBuffers([pages[:, :8].contiguous()])]])


def seals() -> list[Seal]:
    there = spaces()
    return [SealTriton(there), lambda moves, places: seal_torch(there, moves, places)]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_digests_of_any_pages_go_with_them(data: st.DataObject) -> None:
    def tokens(pages: list[int], step: int) -> torch.Tensor:
        """Of every page the first that is there, of `step` of them."""
        first = [page * 7 + data.draw(st.integers(0, 6)) for page in pages]
        whole = [token if at == 0 else -5 for token in first for at in range(step)]
        return torch.tensor(whole, dtype=torch.int64)[::step]

    buffers = data.draw(st.lists(st.sampled_from([1, 5, 32, 33, 65]), max_size=3))
    whole = [
        torch.arange(1000 * (at + 1), 1000 * (at + 1) + count * 6).view(count, 6) for at, count in enumerate(buffers)
    ]
    moves, expected = [], []
    for source in whole:
        froms = data.draw(st.lists(st.integers(0, 5), max_size=4))
        tos = data.draw(st.permutations(range(6)))[: len(froms)]
        steps = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
        moves.append((source, tokens(froms, steps[0]), torch.zeros_like(source), tokens(tos, steps[1]), 7))
        expected.append(torch.zeros_like(source))
        for page, to in zip(froms, tos, strict=True):
            expected[-1][:, to] = source[:, page]
    for seal in seals():
        for _, _, target, _, _ in moves:
            target.zero_()
        seal(moves, ())
        assert [target.tolist() for _, _, target, _, _ in moves] == [one.tolist() for one in expected]


def told_by_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    here = moves_triton._tokens
    monkeypatch.setattr(moves_triton, "_tokens", lambda tokens, _: here(tokens, torch.device("cuda")))


def test_tokens_on_the_host_are_told_by_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.tensor([0, 9, 5])
    assert list(moves_triton._tokens(tokens, torch.device("cuda"))) == [~0, ~9, ~5]
    source, target = torch.arange(8).view(2, 4), torch.zeros(2, 4, dtype=torch.int64)
    told_by_their_values(monkeypatch)
    SealTriton(spaces())([(source, tokens, target, torch.tensor([3, 0, 6]), 3)], ())
    assert target.tolist() == [[3, 0, 1, 0], [7, 4, 5, 0]]


def test_digests_of_what_is_no_page_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    source, whole = torch.arange(1, 9).view(2, 4), torch.zeros(4, 3, dtype=torch.int64)
    froms, tos = torch.tensor([0, 16, -1, 9, 5, 4]), torch.tensor([4, 0, 0, 12, -4, 8])  # 0 to 1 and 1 to 2 are pages
    for afar in (False, True):
        if afar:
            told_by_their_values(monkeypatch)
        for seal in seals():
            whole.zero_()
            seal([(source, froms, whole[1:3], tos, 4)], ())
            assert whole.tolist() == [[0, 0, 0], [0, 1, 2], [0, 5, 6], [0, 0, 0]]


@pytest.mark.parametrize("pages", [1, 30])  # of 30 rows the numbers are copied
def test_digests_move_before_their_page_is_sealed_anew(pages: int) -> None:
    expected = digest_numpy(spaces().pools[0][0].layers[0].numpy()).view(np.int64).tolist()
    for seal in seals():
        sealed, kept = torch.arange(8).view(2, 4), torch.zeros(2, pages, dtype=torch.int64)
        tokens = torch.tensor([2] * pages)
        seal([(sealed, tokens, kept, torch.arange(pages), 1)], [(0, tokens, [0], 1, sealed)])
        assert kept.tolist() == [[2] * pages, [6] * pages]
        assert sealed[0].tolist() == [0, 1, expected[2], 3]


def test_tokens_of_other_kinds_are_refused() -> None:
    tokens, good = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 1])
    out = torch.zeros(2, 4, dtype=torch.int64)
    for seal in seals():
        with pytest.raises(ValueError, match=r"tokens torch\.int32 on cpu: int64 on cpu expected"):
            seal((), [(0, tokens, [0], 1, out)])
        for both in ((tokens, good), (good, tokens)):
            with pytest.raises(ValueError, match="on cpu: int64 expected"):
                seal([(out, both[0], out, both[1], 1)], ())
    with pytest.raises(ValueError, match="on cpu: int64 on meta expected"):
        check_tokens(good, torch.device("meta"))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_any_columns_are_read(data: st.DataObject) -> None:
    def drawn() -> tuple[torch.Tensor, list[int]]:
        count, size = data.draw(st.sampled_from([1, 2, 32, 33])), data.draw(st.integers(1, 9))
        around = torch.randint(-(2**62), 2**62, (count, size + 2))
        return around[:, 1:-1], data.draw(st.lists(st.integers(0, size - 1), max_size=30))

    reads: Reads = [drawn() for _ in range(data.draw(st.integers(0, 3)))]
    expected = [int(row[column]) for numbers, columns in reads for row in numbers for column in columns]
    for read in (ReaderTriton(CPU), ops.reader(CPU)):
        values, there = read(reads)
        assert values.view(np.int64).tolist() == expected
        assert there is None


def test_what_was_read_stays_when_more_is_read() -> None:
    for read in (ReaderTriton(CPU), ops.reader(CPU)):
        numbers = torch.arange(40).view(1, 40)
        found = [read([(numbers, [column])])[0] for column in range(40)]
        assert [one.tolist() for one in found] == [[column] for column in range(40)]


def test_nothing_to_seal_is_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = SealTriton(spaces())
    monkeypatch.setattr(seal, "_rows", None)
    digests, none = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    seal((), ())
    seal([(digests, none, digests, none, 1)], [(0, torch.tensor([1]), [], 1, digests)])
