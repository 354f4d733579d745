"""Files of evidence: bounded, the oldest first to go, nobody else's touched, never half of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4ctl.controlplane.telemetry.evidence import EvidenceFolder, Kept, to_remove


def name(number: int) -> str:
    return f"20261129T170000.000000Z-{number:06d}-mismatch-decode0-0.json"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 60), st.integers(60, 200))
def test_no_more_goes_than_must_and_the_oldest_first(sizes: list[int], more: int, bound: int) -> None:
    kept = [Kept(name(number), size) for number, size in enumerate(sizes)]
    gone = to_remove(reversed(kept), more, bound)
    assert gone == [file.name for file in kept[: len(gone)]]
    assert sum(sizes[len(gone) :]) + more <= bound
    assert not gone or sum(sizes[len(gone) - 1 :]) + more > bound


def test_the_folder_is_made_and_stays_within_its_bound(tmp_path: Path) -> None:
    folder = EvidenceFolder(tmp_path / "a" / "evidence", 100)
    for number in range(5):
        path = folder.write(name(number), bytes(40))
        assert (path.stat().st_size, path.stat().st_mode & 0o777) == (40, 0o600)
    assert names(tmp_path / "a" / "evidence") == [name(3), name(4)]


def test_what_is_not_ours_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_bytes(bytes(1000))
    EvidenceFolder(tmp_path, 100).write(name(1), bytes(90))
    EvidenceFolder(tmp_path, 100).write(name(2), bytes(90))
    assert names(tmp_path) == [name(2), "notes.json"]


def test_one_too_large_removes_nothing(tmp_path: Path) -> None:
    folder = EvidenceFolder(tmp_path, 100)
    folder.write(name(1), bytes(90))
    with pytest.raises(OSError, match=r"has 101 bytes, .* max_bytes is 100"):
        folder.write(name(2), bytes(101))
    assert names(tmp_path) == [name(1)]


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, body: bytes) -> int:
        with path.open("wb") as file:
            file.write(body[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        EvidenceFolder(tmp_path, 100).write(name(1), bytes(50))
    assert names(tmp_path) == []
