"""Every event file goes as it says on the real machines, and fails, in its own words, without the guard it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import event_file
from event_rank import Unmet
from removals import REMOVALS

FILES = sorted(Path(__file__).parent.glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_ends_as_it_must(path: Path) -> None:
    event_file.play(event_file.load(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_fails_without_its_guard(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = event_file.load(path)
    REMOVALS[file.removed](monkeypatch)
    with pytest.raises(Unmet, match=re.escape(file.fails)):
        event_file.play(file)


def test_every_removal_is_shown_by_a_file() -> None:
    assert {event_file.load(path).removed for path in FILES} == set(REMOVALS)


def test_a_line_that_means_nothing_is_an_error_of_the_file_and_no_failure() -> None:
    file = event_file.EventFile(0, "", "", "", "", "rank P0 prefill\nP0 fly 7.1")
    with pytest.raises(ValueError, match="no event 'fly'; there are abort, "):
        event_file.play(file)
