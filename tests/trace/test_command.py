"""`dsv4ctl trace`: what is asked of the control plane, exit codes, and the other formats."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from click.testing import CliRunner, Result

import dsv4ctl.controlplane.cli.trace as trace
from dsv4ctl.controlplane.cli.main import cli
from dsv4ctl.controlplane.tickets.types import Consumer, Guard
from dsv4ctl.controlplane.trace.file import Writer
from dsv4ctl.controlplane.trace.format import Header, encode, page
from fake_plane import FakePlane, served_from_thread
from small_gate import LAYERS, SmallGate
from trace_story import D, P, Story, rank

Dsv4ctl = Callable[..., Result]


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[FakePlane]:
    plane = FakePlane()
    with served_from_thread(plane, tmp_path / "s"):
        yield plane


@pytest.fixture
def dsv4ctl(tmp_path: Path) -> Dsv4ctl:
    def call(*words: str) -> Result:
        return CliRunner().invoke(cli, ["--socket", str(tmp_path / "s"), "trace", *words], prog_name="dsv4ctl")

    return call


def traced(off: bool) -> dict[str, Any]:
    """What a rank with the indexer's guard on, or off, has to tell."""
    gate = SmallGate()
    gate.set_guards_off([Guard.INDEXER] if off else [])
    load = gate.load(LAYERS - 1)
    ticket = gate.request(Consumer.INDEXER, load.extents, room="7.1")
    gate.read(ticket, "index_k", LAYERS - 1 if off else 0)
    part = page(gate.trace, rank("me", LAYERS), 0)
    return {"engine": "me", "rank": 0, "incarnation": "me", "identity": part.rank, "events": part.events}


@pytest.mark.parametrize(("off", "code", "said"), [(True, 1, "indexer"), (False, 0, "no race")])
def test_record_then_check(plane: FakePlane, dsv4ctl: Dsv4ctl, tmp_path: Path, off: bool, code: int, said: str) -> None:
    plane.traced = [traced(off), {"engine": "decode0", "rank": 0, "incarnation": "d", "error": "not connected"}]
    file = str(tmp_path / "run.trace")
    recorded = dsv4ctl("record", file)
    assert (recorded.exit_code, recorded.stdout) == (0, f"{file}: me/0\n")
    assert "decode0/0: not connected" in recorded.stderr
    assert plane.asked == [("trace", False)]
    checked = dsv4ctl("check", file)
    assert checked.exit_code == code
    assert said in checked.stdout
    answer = json.loads(dsv4ctl("check", file, "--json").stdout)
    assert answer["accesses"] == int(off)
    assert answer["consumers"] == ({"7.1": ["indexer"]} if off else {})
    assert [race["missing"] for race in answer["races"]] == (
        ["landed (hicache, layer 2) -> grant (indexer) -> read"] if off else []
    )


def test_record_for_some_seconds(
    plane: FakePlane, dsv4ctl: Dsv4ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds are over once the first part is written, however long that took."""
    scopes: list[anyio.CancelScope] = []
    write = Writer.write

    def move_on_after(seconds: float) -> anyio.CancelScope:
        assert seconds == 0.2
        scopes.append(anyio.CancelScope())
        return scopes[0]

    def last(writer: Writer, *part: Any) -> None:
        write(writer, *part)
        scopes[0].cancel()

    monkeypatch.setattr(trace, "anyio", SimpleNamespace(run=anyio.run, move_on_after=move_on_after))
    monkeypatch.setattr(Writer, "write", last)
    plane.traced = [traced(False)]
    assert dsv4ctl("record", str(tmp_path / "t"), "--seconds", "0.2").exit_code == 0
    assert plane.asked == [("trace", True)]
    assert dsv4ctl("check", str(tmp_path / "t")).exit_code == 0


@pytest.mark.parametrize("seconds", ["nan", "0"])
def test_record_for_no_time(dsv4ctl: Dsv4ctl, tmp_path: Path, seconds: str) -> None:
    refused = dsv4ctl("record", str(tmp_path / "t"), "--seconds", seconds)
    assert (refused.exit_code, f"a number of seconds above 0, found '{seconds}'" in refused.stderr) == (2, True)


def test_record_without_ranks_or_a_place(plane: FakePlane, dsv4ctl: Dsv4ctl, tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_text("of yesterday")
    assert "no rank told its events" in dsv4ctl("record", str(file)).stderr
    assert file.read_text() == "of yesterday"
    plane.traced = [traced(False)]
    assert "can't be written: No such file" in dsv4ctl("record", str(tmp_path / "no" / "t")).stderr


def test_record_without_a_control_plane(dsv4ctl: Dsv4ctl, tmp_path: Path) -> None:
    assert dsv4ctl("record", str(tmp_path / "t")).exit_code == 3
    assert not (tmp_path / "t").exists()


def test_a_file_without_events_proves_nothing(dsv4ctl: Dsv4ctl, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(encode(Header()))
    result = dsv4ctl("check", str(tmp_path / "empty"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"dsv4ctl: {tmp_path / 'empty'} holds no event: nothing can be said of it\n"


def test_show_without_ranks_says_so(plane: FakePlane, dsv4ctl: Dsv4ctl) -> None:
    plane.traced = [{"engine": "decode0", "rank": 0, "incarnation": "d", "error": "not connected"}]
    result = dsv4ctl("show", "7")
    assert (result.exit_code, result.stderr) == (
        1, "dsv4ctl: decode0/0: not connected\ndsv4ctl: no rank told its events\n",
    )  # fmt: skip


@pytest.mark.parametrize("words", [["check"], ["export", "--perfetto"], ["show", "7"]])
def test_what_can_not_be_read(dsv4ctl: Dsv4ctl, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "other").write_bytes(encode(Header(version=99)))
    output = [str(tmp_path / "out")] if "export" in words else []
    for name, message in (("other", "has trace version 99"), ("missing", "can't be read: No such file")):
        result = dsv4ctl(*words, str(tmp_path / name), *output)
        assert result.exit_code == 2
        assert message in result.stderr


@pytest.fixture
def story(tmp_path: Path) -> Path:
    """A load that belongs to no room, and a room that waits for it, sends and closes."""
    story = Story(D, P)
    story.tell("lease", "hicache", on=P, subject=1, pages=(4,), generation=2, agent="step")
    story.tell("lease", "hicache", on=P, subject=3, pages=(9,), generation=2, agent="step")
    story.tell("room", on=P, room="7.1", note="loading")
    story.tell("request", "indexer", on=P, room="7.1", subject=2, pages=(4,), generation=2)
    story.tell("landed", "hicache", on=P, subject=1, pages=(4,), generation=2, value=1, agent="hicache-load")
    for layer in (0, 0, 1):
        story.tell(
            *("read", "indexer"), on=P, room="7.1", subject=2, pages=(4,), generation=2, pool="index_k",
            layer=layer, value=1,
        )  # fmt: skip
    story.tell("release", "indexer", on=P, room="7.1", subject=2)
    story.exposed(1, 4, generation=2)
    story.write(9, 4)
    story.complete(9)
    story.tell("room", on=P, room="7.1", note="closed")
    return story.save(tmp_path / "story")


def test_show_tells_what_a_room_did_and_waited_for(dsv4ctl: Dsv4ctl, story: Path) -> None:
    for room in ("7", "7.1"):
        lines = dsv4ctl("show", room, str(story)).stdout.splitlines()
        told = [line.split(maxsplit=4) for line in lines]
        assert [(words[0], words[2], " ".join(words[4].split())) for words in told] == [
            ("0.000", "prefill0/0", "lease hicache: full 4"),
            ("2.000", "prefill0/0", "room 7.1 loading"),
            ("3.000", "prefill0/0", "request indexer, 0 layers readable: full 4"),
            ("4.000", "prefill0/0", "landed hicache load, 1 layers: full 4"),
            ("5.000", "prefill0/0", "read indexer index_k layer 0 (2 reads)"),
            ("7.000", "prefill0/0", "read indexer index_k layer 1 <-- only 1 layers were granted"),
            ("8.000", "prefill0/0", "release indexer"),
            ("9.000", "decode0/0", "lease transfer: full 4"),
            ("10.000", "decode0/0", "sent destination to P"),
            ("11.000", "prefill0/0", "received destination from D"),
            ("12.000", "prefill0/0", "write chunk 0 to D: full 4"),
            ("14.000", "prefill0/0", "room 7.1 closed"),
        ]
    missing = dsv4ctl("show", "70", str(story))
    assert (missing.exit_code, missing.stdout) == (5, "")
    assert "no event of room 70 is in the trace" in missing.stderr


def test_show_asks_the_ranks_when_there_is_no_file(plane: FakePlane, dsv4ctl: Dsv4ctl) -> None:
    plane.traced = [traced(True)]
    assert "only 2 layers were granted" in dsv4ctl("show", "7").stdout


def test_export_draws_tracks_slices_and_flows(dsv4ctl: Dsv4ctl, story: Path, tmp_path: Path) -> None:
    assert dsv4ctl("export", "--perfetto", str(story), str(tmp_path / "t.json")).exit_code == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"]
    assert names == [(2, "step"), (2, "hicache-load"), (1, "step"), (2, "transfer")]
    begun = Counter(event["id"] for event in events if event["ph"] == "b")
    ended = Counter(event["id"] for event in events if event["ph"] == "e")
    assert set(ended) <= set(begun)
    assert {event["name"] for event in events if event["ph"] == "b"} >= {
        "load hicache", "ticket indexer room 7.1", "room 7.1 loading",
    }  # fmt: skip
    flows = [(event["ph"], event["id"]) for event in events if event["ph"] in "sf"]
    assert ("s", "destination:7.1:D:P") in flows
    assert ("f", "destination:7.1:D:P") in flows
    assert all(event["ph"] == "M" or event["ts"] > 0 for event in events)


def test_export_of_nothing_is_valid_and_the_format_must_be_named(dsv4ctl: Dsv4ctl, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(encode(Header()))
    assert dsv4ctl("export", "--perfetto", str(tmp_path / "empty"), str(tmp_path / "t.json")).exit_code == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []
    refused = dsv4ctl("export", str(tmp_path / "empty"), str(tmp_path / "t.json"))
    assert (refused.exit_code, "expected --perfetto" in refused.stderr) == (2, True)
