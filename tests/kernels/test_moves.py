from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4ctl.kernels import ops
from dsv4ctl.kernels.buffers import (
    Firsts,
    PageBuffers,
    Sealer,
    SpaceBuffers,
    Table,
    Tokens,
    check_numbers,
)
from dsv4ctl.kernels.digest import digest_numpy
from dsv4ctl.kernels.digest_rows_triton import SealerTriton
from dsv4ctl.kernels.moves_triton import ReaderTriton

CPU = torch.device("cpu")


def spaces() -> SpaceBuffers:
    """Four pages of two buffers, and four of another."""
    pages = torch.arange(4 * 3 * 8, dtype=torch.uint8).view(4, 24)
    return SpaceBuffers([[PageBuffers([pages, pages.flip(0)])], [PageBuffers([pages[:, :8].contiguous()])]])


def sealers() -> list[Sealer]:
    there = spaces()
    return [SealerTriton(there), ops.sealer(there)]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_digests_of_any_pages_go_with_them(data: st.DataObject) -> None:
    def tokens(pages: list[int]) -> Firsts | list[int]:
        """Their values, or every `step`-th of those that lie there."""
        first = [page * 7 + data.draw(st.integers(0, 6)) for page in pages]
        step = data.draw(st.integers(0, 3))
        if not step:
            return first
        whole = [token if at == 0 else -5 for token in first for at in range(step)]
        return Firsts(torch.tensor(whole, dtype=torch.int64), range(0, len(whole), step))

    buffers = data.draw(st.lists(st.sampled_from([1, 5, 32, 33, 65]), max_size=3))
    whole = [
        torch.arange(1000 * (at + 1), 1000 * (at + 1) + count * 6).view(count, 6) for at, count in enumerate(buffers)
    ]
    moves, expected = [], []
    for source in whole:
        froms = data.draw(st.lists(st.integers(0, 5), max_size=4))
        tos = data.draw(st.permutations(range(6)))[: len(froms)]
        moves.append((Table(source), tokens(froms), Table(torch.zeros_like(source)), tokens(tos), 7))
        expected.append(torch.zeros_like(source))
        for page, to in zip(froms, tos, strict=True):
            expected[-1][:, to] = source[:, page]
    for sealer in sealers():
        for _, _, target, _, _ in moves:
            target.numbers.zero_()
        sealer.seal(moves, ())
        assert [target.numbers.tolist() for _, _, target, _, _ in moves] == [one.tolist() for one in expected]


@pytest.mark.parametrize("there", [False, True])
def test_digests_of_what_is_no_page_stay_where_they_are(there: bool) -> None:
    source, whole = Table(torch.arange(1, 9).view(2, 4)), torch.zeros(4, 3, dtype=torch.int64)
    froms, tos = [0, 16, -1, 9, 5, 4], [4, 0, 0, 12, -4, 8]  # 0 to 1 and 1 to 2 are pages

    def told(tokens: list[int]) -> Firsts | list[int]:
        return Firsts(torch.tensor(tokens), range(len(tokens))) if there else tokens

    for sealer in sealers():
        whole.zero_()
        sealer.seal([(source, told(froms), Table(whole[1:3]), told(tos), 4)], ())
        assert whole.tolist() == [[0, 0, 0], [0, 1, 2], [0, 5, 6], [0, 0, 0]]


@pytest.mark.parametrize("pages", [1, 2, 300])  # of 300 the numbers are copied
def test_digests_move_before_their_page_is_sealed_anew(pages: int) -> None:
    expected = digest_numpy(spaces().pools[0][0].layers[0].numpy()).view(np.int64).tolist()
    for sealer in sealers():
        sealed, kept = torch.arange(8).view(2, 4), torch.zeros(2, pages, dtype=torch.int64)
        tokens, table = Firsts(torch.tensor([2] * pages), range(pages)), Table(sealed)
        sealer.seal([(table, tokens, Table(kept), range(pages), 1)], [(0, tokens, 1, table)])
        assert kept.tolist() == [[2] * pages, [6] * pages]
        assert sealed[0].tolist() == [0, 1, expected[2], 3]


@pytest.mark.parametrize("numbers", [torch.tensor([0, 1], dtype=torch.int32), torch.arange(4)[::2]])
def test_numbers_of_other_kinds_are_refused(numbers: torch.Tensor) -> None:
    table, tokens = Table(torch.zeros(2, 4, dtype=torch.int64)), Firsts(numbers, [0, 1])
    for sealer in sealers():
        with pytest.raises(ValueError, match="on cpu: contiguous int64 on cpu expected"):
            sealer.seal((), [(0, tokens, 1, table)])
        for both in ((tokens, [0, 1]), ([0, 1], tokens)):
            with pytest.raises(ValueError, match="on cpu: contiguous int64 on cpu expected"):
                sealer.seal([(table, both[0], table, both[1], 1)], ())
    for sealer in sealers():
        for wrong in (lambda: sealer.move((), [(table, tokens, 1)]), lambda: sealer.digests([(0, tokens, 1)])):  # noqa: B023
            with pytest.raises(ValueError, match="on cpu: contiguous int64 on cpu expected"):
                wrong()
    for reader in (ReaderTriton(CPU), ops.reader(CPU)):
        with pytest.raises(ValueError, match=r"on cpu: contiguous int64 .*expected"):
            reader.tokens([tokens])
    with pytest.raises(ValueError, match="on cpu: contiguous int64 expected"):
        Table(numbers)
    with pytest.raises(ValueError, match="on cpu: contiguous int64 on meta expected"):
        check_numbers(torch.tensor([0]), torch.device("meta"))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_digests_of_any_pages_are_read(data: st.DataObject) -> None:
    def drawn() -> tuple[tuple[Table, Tokens, int], list[int]]:
        count, size, page_tokens = data.draw(st.sampled_from([1, 2, 32, 33])), data.draw(st.integers(1, 9)), 3
        around = torch.randint(-(2**62), 2**62, (count, size + 2))
        pages = data.draw(st.lists(st.integers(0, size - 1), max_size=30))
        first = [page * page_tokens + data.draw(st.integers(0, 2)) for page in pages]
        if data.draw(st.booleans()):
            return (Table(around[:, 1:-1]), first, page_tokens), pages
        every = torch.tensor([token for one in first for token in (one, -1)], dtype=torch.int64)
        return (Table(around[:, 1:-1]), Firsts(every, range(0, len(every), 2)), page_tokens), pages

    made = [drawn() for _ in range(data.draw(st.integers(0, 3)))]
    expected = [int(row[page]) for (table, *_), pages in made for row in table.numbers for page in pages]
    for sealer in sealers():
        values, there = sealer.move((), [read for read, _ in made])
        assert values.view(np.int64).tolist() == expected
        assert there is None


@pytest.mark.parametrize("there", [False, True])
def test_of_what_is_no_page_nothing_is_read(there: bool) -> None:
    asked = [3, -1, 8, 100, 0, -(2**40), 2**62]
    tokens: Tokens = Firsts(torch.tensor(asked), range(len(asked))) if there else asked
    around = torch.arange(1, 9)
    for sealer in sealers():
        for _ in range(3):
            assert sealer.move((), [(Table(around[2:6]), tokens, 2)])[0].tolist() == [4, 0, 0, 0, 3, 0, 0]
            assert sealer.move((), [(Table(torch.zeros(1, 0, dtype=torch.int64)), tokens, 2)])[0].tolist() == [0] * 7


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_digests_are_moved_and_others_read_at_once(data: st.DataObject) -> None:
    number = st.integers(0, 3)
    for sealer in sealers():
        source, target = (torch.arange(at, at + 8).view(2, 4) for at in (0, 100))
        moves, reads, expected, after = [], [], list[int](), target.clone()
        for to in data.draw(st.permutations(range(4)))[: data.draw(number)]:
            one = data.draw(number)
            moves.append((Table(source), [one * 5], Table(target), [to * 5 + 4], 5))
            after[:, to] = source[:, one]
        for _ in range(data.draw(number)):
            pages = data.draw(st.lists(number, max_size=3))
            reads.append((Table(source), [page * 2 + 1 for page in pages], 2))
            expected += source[:, pages].reshape(-1).tolist()
        values, there = sealer.move(moves, reads)
        assert values.tolist() == expected
        assert target.tolist() == after.tolist()
        assert there is None


def test_one_number_is_contiguous_wherever_it_is_from() -> None:
    check_numbers(torch.arange(512)[::256][:1])
    check_numbers(torch.zeros(4, 0, dtype=torch.int64))


def test_digests_go_to_as_many_pages() -> None:
    table = Table(torch.zeros(2, 4, dtype=torch.int64))
    for sealer in sealers():
        for move in (sealer.seal, sealer.move):
            with pytest.raises(ValueError, match="digests of 2 pages to 1"):
                move([(table, [0, 1], table, [2], 1)], ())


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_any_tokens_are_read(data: st.DataObject) -> None:
    def drawn() -> Firsts:
        size, step = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 9))
        return Firsts(torch.randint(0, 2**62, (size + 1,))[1:], range(0, size, step))

    listed = [drawn() for _ in range(data.draw(st.integers(0, 4)))]
    expected = [int(tokens[one]) for tokens, at in listed for one in at]
    for reader in (ReaderTriton(CPU), ops.reader(CPU)):
        values, there = reader.tokens(listed)
        assert values.tolist() == expected
        assert there is None


def test_what_was_read_stays_when_more_is_read() -> None:
    for sealer in sealers():
        numbers = Table(torch.arange(40))
        found = [sealer.move((), [(numbers, [column], 1)])[0] for column in range(40)]
        assert [one.tolist() for one in found] == [[column] for column in range(40)]


def test_nothing_to_seal_is_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    sealer = SealerTriton(spaces())
    monkeypatch.setattr(sealer, "_rows", None)
    table = Table(torch.zeros(2, 4, dtype=torch.int64))
    sealer.seal((), ())
    sealer.seal([(table, [], table, [], 1)], [(0, Firsts(torch.tensor([1]), []), 1, table)])
