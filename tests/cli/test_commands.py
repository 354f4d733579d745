"""Every command against a served plane: what it prints, what it asks for, and its exit code."""

from __future__ import annotations

import dataclasses
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import click
import pytest
from click.testing import CliRunner

from dsv4ctl.controlplane.admin.registry import VERBS
from dsv4ctl.controlplane.cli.main import cli
from dsv4ctl.controlplane.cli.verbs import command
from dsv4ctl.controlplane.config.schema import Config, DeadlinesConfig, EngineConfig, UnsafeConfig
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.policies.drain import Action, Rooms
from fake_plane import FakePlane, served_from_thread


def fault(result: Any, code: int) -> str:
    """The one line a failed command prints."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return str(result.stderr).removeprefix("dsv4ctl: ").rstrip("\n")


def test_status_for_people(plane: FakePlane, dsv4ctl: Any) -> None:
    result = dsv4ctl("status")
    assert result.exit_code == 0
    assert result.output == (
        "state    ready\n"
        "version  0.1.0\n"
        "pid      4241\n"
        "up       3m07s\n"
        "gateway  http://127.0.0.1:30000\n"
        "engines  prefill0=ready decode0=ready\n"
        "rooms    sending=1 decoding=1\n"
    )


def test_status_shows_guards_that_are_off(socket_path: Path, dsv4ctl: Any) -> None:
    engine = EngineConfig(name="one", role="single")
    plane = FakePlane(Config(engines=[engine], unsafe=UnsafeConfig(off=["quiesce"])))
    with served_from_thread(plane, socket_path):
        assert "UNSAFE   off: quiesce; output will be corrupted\n" in dsv4ctl("status").output
        assert dsv4ctl("guards").output == "OFF: quiesce; output will be corrupted\n"


def test_engines_rooms_and_tickets_as_tables(plane: FakePlane, dsv4ctl: Any) -> None:
    engines = dsv4ctl("engines").output.splitlines()
    assert engines[0].split() == [
        *("engine", "role", "state", "pid", "url", "restarts", "tickets", "leased", "quarantined", "queues")
    ]
    assert engines[2].split()[:3] == ["decode0", "decode", "ready"]
    assert engines[2].endswith("transferring=3")

    rooms = dsv4ctl("rooms").output.splitlines()
    assert rooms[1].split() == ["7.1", "sending", "0.25s", "prefill0", "decode0", "req-7", "-"]

    tickets = dsv4ctl("tickets").output.splitlines()
    assert tickets[1].split() == ["prefill0", "0", "indexer", "7.1", "granted", "4/6", "full=3-5,9"]
    assert tickets[2] == "decode0 rank 0: not connected"


def test_a_paused_engine_is_seen(plane: FakePlane, dsv4ctl: Any) -> None:
    plane.paused = ["decode0"]
    assert "engines  prefill0=ready decode0=ready (paused)\n" in dsv4ctl("status").output
    states = [line.split()[2:4] for line in dsv4ctl("engines").output.splitlines()[1:]]
    assert states == [["ready", "4242"], ["ready", "(paused)"]]


def test_nothing_in_flight(plane: FakePlane, dsv4ctl: Any) -> None:
    plane.live = []
    assert dsv4ctl("rooms").output == "no rooms in flight\n"
    assert dsv4ctl("abort", "--all").output == "no rooms in flight\n"


@pytest.mark.parametrize("name", ["7", "7.1"])
def test_the_story_of_one_room(plane: FakePlane, dsv4ctl: Any, name: str) -> None:
    lines = dsv4ctl("rooms", name).output.splitlines()
    assert lines[0].split() == ["key", "7.1"]
    assert ["cached_tokens", "512"] in [line.split() for line in lines]
    assert lines[-2:] == ["     0.0000s  allocated", "     0.0125s  sending"]


@pytest.mark.parametrize("words", [["status"], ["engines"], ["rooms"], ["rooms", "7"], ["tickets"]])
def test_json_is_what_the_api_says(plane: FakePlane, dsv4ctl: Any, words: list[str]) -> None:
    async def answer() -> Any:
        calls = {"status": plane.status, "engines": plane.engines, "tickets": plane.tickets}
        if words[0] == "rooms":
            return await plane.rooms(int(words[1]) if len(words) > 1 else None)
        return await calls[words[0]]()

    result = dsv4ctl(*words, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == anyio.run(answer)


def test_every_reading_command_has_json() -> None:
    for verb in VERBS:
        if verb.name != "metrics":  # a text format of its own
            assert "--json" in [option for one in command(verb).params for option in one.opts], verb.name


def test_metrics(plane: FakePlane, dsv4ctl: Any) -> None:
    assert 'dsv4ctl:rooms{state="sending"} 1.0' in dsv4ctl("metrics").output


def test_abort(plane: FakePlane, dsv4ctl: Any) -> None:
    assert dsv4ctl("abort", "7", "--reason", "test").output == "aborting 1 room(s): 7.1\n"
    assert dsv4ctl("abort", "--all").output == "aborting 2 room(s): 7.1 8.1\n"
    assert plane.asked == [("abort", 7, "test"), ("abort", None, "operator")]
    assert fault(dsv4ctl("abort", "9"), 5).startswith("no room 9: ")
    assert fault(dsv4ctl("abort"), 2) == "expected one room, or `--all` (in JSON: `all`) for every room in flight"
    plane.live[0]["state"] = "aborted"
    assert fault(dsv4ctl("abort", "7"), 4) == "room 7 has already ended: aborted"


def test_drain_names_what_was_left(plane: FakePlane, dsv4ctl: Any) -> None:
    result = dsv4ctl("drain", "prefill0", "--deadline", "2.5")
    assert (result.exit_code, result.output) == (0, "drained: prefill0\n")
    plane.left = ["7.1", "8.1"]
    result = dsv4ctl("drain")
    assert result.exit_code == 1
    assert result.output == "drained: prefill0 decode0\naborted at the deadline, 2 room(s): 7.1 8.1\n"
    assert plane.asked == [("drain", ["prefill0"], 2.5), ("drain", [], None)]


def test_help_and_manual_say_when_a_drain_aborts(dsv4ctl: Any) -> None:
    """The figures are the rule's, with the default deadlines."""
    shown = " ".join(dsv4ctl("drain", "--help").output.split())
    assert "aborted when `deadlines.ack` + `deadlines.fence` of it remain, or half of it if that is less" in shown
    given = DeadlinesConfig()

    def finish(budget: float) -> float:
        steps = Rooms(budget=budget, ack=given.ack, fence=given.fence).steps()
        return next(step.until for step in steps if step.action is Action.FINISH)

    manual = " ".join((Path(__file__).parents[2] / "docs/operations.md").read_text().split())
    assert (
        f"By default rooms have {finish(given.drain):g} s of {given.drain:g}, with `--deadline 60` they have "
        f"{finish(60.0):g}, with `--deadline 10` they have {finish(10.0):g}:"
    ) in manual


@pytest.mark.parametrize("words", [["--deadline={}"], ["prefill0", "--deadline", "{}"]], ids=["one word", "two words"])
@pytest.mark.parametrize("deadline", ["0", "-3", "nan", "inf", "soon"])
def test_a_deadline_that_is_none_drains_nothing(
    plane: FakePlane, dsv4ctl: Any, deadline: str, words: list[str]
) -> None:
    result = dsv4ctl("drain", *(word.format(deadline) for word in words))
    assert result.exit_code == 2
    assert f"'--deadline': expected a number of seconds above 0, found '{deadline}'" in result.stderr
    assert plane.asked == []


def test_an_unknown_engine_is_answered_with_the_nearest(plane: FakePlane, dsv4ctl: Any) -> None:
    expected = 'unknown engine "prefil0". Did you mean prefill0? Expected one of: decode0, prefill0'
    assert fault(dsv4ctl("drain", "prefil0"), 2) == expected
    assert fault(dsv4ctl("resume", "prefil0"), 2) == expected
    assert plane.asked == []


def test_resume_and_flush(plane: FakePlane, dsv4ctl: Any) -> None:
    assert dsv4ctl("resume", "prefill0").output == "resumed: prefill0\n"
    assert dsv4ctl("flush").output == "flushed: prefill0 decode0\n"


def test_guards_are_fixed_unless_the_configuration_says_otherwise(socket_path: Path, dsv4ctl: Any) -> None:
    plane = FakePlane()
    with served_from_thread(plane, socket_path):
        assert dsv4ctl("guards").output == "every guard is on\n"
        assert "`unsafe.runtime = true`" in fault(dsv4ctl("guards", "--off", "quiesce"), 4)
        assert "Did you mean quiesce?" in fault(dsv4ctl("guards", "--off", "quiese"), 2)
    engine = EngineConfig(name="one", role="single")
    plane = FakePlane(Config(engines=[engine], unsafe=UnsafeConfig(runtime=True)))
    with served_from_thread(plane, socket_path):
        shown = dsv4ctl("guards", "--off", "quiesce", "--off", "indexer_ticket").output
        assert shown == "OFF: quiesce, indexer_ticket; output will be corrupted\n"
        assert dsv4ctl("guards", "--all-on").output == "every guard is on\n"
    assert plane.asked == [("set_guards", ["quiesce", "indexer_ticket"]), ("set_guards", [])]


def test_logs(plane: FakePlane, dsv4ctl: Any) -> None:
    plane.telemetry.emit(Event.LINK_LOST, "warning", engine="decode0", rank=0)
    last = dsv4ctl("logs").output.splitlines()[-1]
    assert last[12:] == " warning link.lost            engine=decode0 rank=0"
    records = [json.loads(line) for line in dsv4ctl("logs", "--json").output.splitlines()]
    assert [record["event"] for record in records] == ["admin.listening", "link.lost"]


def test_following_logs_ends_with_the_control_plane(socket_path: Path, dsv4ctl: Any) -> None:
    plane = FakePlane()
    with ThreadPoolExecutor(1) as threads:
        with served_from_thread(plane, socket_path) as portal:
            following = threads.submit(dsv4ctl, "logs", "--follow", "--json")
            portal.call(plane.followed.wait)
            plane.telemetry.emit(Event.LINK_LOST)
        result = following.result(60)
    assert result.exit_code == 0
    assert [json.loads(line)["event"] for line in result.stdout.splitlines()] == ["admin.listening", "link.lost"]


def test_no_socket(dsv4ctl: Any, socket_path: Path) -> None:
    expected = f"no control plane at {socket_path}: no such socket; begin with `dsv4ctl start`, or give --socket"
    assert fault(dsv4ctl("status"), 3) == expected
    assert fault(dsv4ctl("logs", "--follow"), 3) == expected


def test_a_dead_socket(dsv4ctl: Any, socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(socket_path))
    assert fault(dsv4ctl("drain"), 3) == (
        f"no control plane at {socket_path}: its owner is gone; `dsv4ctl start` replaces the dead socket"
    )


def test_a_file_that_is_no_socket(dsv4ctl: Any, socket_path: Path) -> None:
    socket_path.touch()
    assert fault(dsv4ctl("status"), 3) == (f"no control plane at {socket_path}: it is no socket; give another --socket")


@pytest.mark.parametrize("length", [108, 300], ids=["no socket", "no file"])
def test_a_path_that_no_socket_can_have(length: int) -> None:
    path = f"/tmp/{'s' * length}"
    assert fault(CliRunner().invoke(cli, ["--socket", path, "status"]), 3) == (
        f"no control plane at {path}: AF_UNIX path too long"
    )


def test_a_socket_without_a_name_is_not_the_default_one(plane: FakePlane) -> None:
    result = CliRunner().invoke(cli, ["--socket", "", "status"])
    assert (result.exit_code, "expected a path, found nothing" in result.stderr) == (2, True)


def test_another_users_socket(dsv4ctl: Any, plane: FakePlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4ctl.controlplane.admin.server.peer_credentials", lambda connected: (99, 65534))
    assert fault(dsv4ctl("status"), 4).startswith("uid 65534 may not call")


def test_a_fault_of_the_control_plane(dsv4ctl: Any, plane: FakePlane) -> None:
    plane.error = ZeroDivisionError("oops")
    assert fault(dsv4ctl("status"), 1) == "ZeroDivisionError: oops"


def test_an_answer_that_does_not_come(socket_path: Path) -> None:
    hurried = click.Group(commands=[command(dataclasses.replace(VERBS[0], timeout=0.05))])
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(socket_path))
        silent.listen()
        message = fault(CliRunner().invoke(hurried, ["status"], obj=str(socket_path)), 1)
    assert message == f"the control plane at {socket_path} gave no answer within 0.05 s"


@pytest.mark.parametrize("words", [["drain", "--deadline", "soon"], ["rooms", "x"], ["rooms", "7.x"], ["stauts"]])
def test_bad_usage(dsv4ctl: Any, words: list[str]) -> None:
    result = dsv4ctl(*words)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr


@pytest.mark.parametrize(
    ("wrong", "near"), [("bogus", None), ("stauts", "status"), ("lgos", "logs"), ("incidnt", "incident"), ("x", None)]
)
def test_a_wrong_command_is_answered_with_a_near_one_only(dsv4ctl: Any, wrong: str, near: str | None) -> None:
    result = dsv4ctl(wrong)
    hint = f" Did you mean {near!r}?" if near else ""
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"Error: No such command {wrong!r}.{hint}"


def test_help_lists_commands_exit_codes_and_examples(dsv4ctl: Any) -> None:
    text = dsv4ctl("--help").output
    for word in (
        *("start", "drain", "resume", "status", "engines", "rooms", "tickets", "abort", "logs", "incident"),
        *("config", "version", "3    no control plane at the socket", "dsv4ctl logs --follow"),
    ):
        assert word in text
    context = click.Context(cli)
    for name in cli.list_commands(context):
        help_of = dsv4ctl(name, "--help")
        assert help_of.exit_code == 0
        assert "Example" in help_of.output or name in ("incident", "config")
