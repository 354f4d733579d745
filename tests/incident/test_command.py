"""The command itself: what it refuses, and one real run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from dsv4ctl.controlplane.cli.main import cli

POOLS = {"index_k", "c4_kv", "c128_kv", "swa_kv", "c4_state", "index_state", "c128_state"}
#: Seconds for a run that takes less than 50 on two cores of its own.
PATIENCE = 400
PROGRAM = [sys.executable, "-c", "from dsv4ctl.controlplane.cli.main import main; main()"]


def test_a_bad_row_is_refused_with_the_valid_ones() -> None:
    done = CliRunner().invoke(cli, ["incident", "--quick", "--only", "on,indexer"])
    assert done.exit_code == 2
    assert "no row 'indexer'; did you mean indexer-off? there are: on, indexer-off, attention-off" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [["--sessions", "4"], ["--seed", "-1"]])
def test_a_number_that_makes_no_experiment_is_refused(arguments: list[str]) -> None:
    done = CliRunner().invoke(cli, ["incident", *arguments])
    assert done.exit_code == 2
    assert arguments[0] in done.stderr


def test_without_the_engine_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4ctl.controlplane.incident.command.find_spec", lambda name: None)
    done = CliRunner().invoke(cli, ["incident", "--quick"])
    assert done.exit_code == 1
    assert "dsv4ctl[reference]" in done.stderr


def test_quick_shows_what_each_guard_prevents() -> None:
    """Real engines, real bytes: the slowest test of this folder."""
    done = subprocess.run(
        [*PROGRAM, "incident", "--quick", "--json"], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert (done.returncode, told["problems"]) == (0, []), done.stderr
    rows = {row["name"]: row for row in told["rows"]}
    assert len(rows) == 6
    for row in rows.values():
        assert row["stuck"] == row["failed"] == row["transfer_timeouts"] == 0
        assert row["requests"] == 64
        assert row["host_tokens"] > 0
    for name in ("on", "on-again"):
        assert (rows[name]["guards"], rows[name]["corrupted"], rows[name]["digest_mismatches"]) == ("on", 0, 0)
        assert rows[name]["edges"] == {}
    for name in ("indexer-off", "attention-off", "sender-off"):
        assert rows[name]["corrupted"] > 0
        assert rows[name]["digest_mismatches"] > 0
        assert rows[name]["pools"].keys() <= POOLS
        assert any(edge.startswith(rows[name]["guards"].removesuffix("_ticket")) for edge in rows[name]["edges"])
    assert rows["quiesce-off"]["aborts"] > 0
    assert rows["quiesce-off"]["edges"], "pages were reused before their writer was quiet"


def test_a_row_of_each_group() -> None:
    """Ranks that part, a short sidecar, and a crowd in a small pool."""
    rows = "clock-alone,sidecar-on,retraction"
    done = subprocess.run(
        [*PROGRAM, "incident", "--quick", "--only", rows, "--json"],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert (done.returncode, told["problems"]) == (0, []), done.stderr
    parted, sidecar, crowd = told["rows"]
    assert [row["group"] for row in told["rows"]] == ["ranks", "groups", "storms"]
    assert parted["stuck"] > 0
    assert parted["guards"] == "rank_agreement"
    for row, requests in ((sidecar, 24), (crowd, 40)):
        assert (row["corrupted"], row["stuck"], row["failed"], row["digest_mismatches"]) == (0, 0, 0, 0)
        assert row["requests"] % requests == 0
    assert sidecar["loads_differ"] == {}
    assert crowd["retractions"] > 0
    assert crowd["storm"]["pages_left"] == 0


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_it(ending: signal.Signals) -> None:
    """SIGTERM stops what it started; SIGKILL leaves that to the kernel."""
    incident = subprocess.Popen([*PROGRAM, "incident", "--quick", "--json"], stdout=subprocess.PIPE)
    family = psutil.Process(incident.pid)
    try:
        started = wait_until(lambda: len(family.children(recursive=True)) >= 5 and family.children(recursive=True))
        incident.send_signal(ending)
        out, _ = incident.communicate(timeout=PATIENCE)
        assert out == b""
        assert incident.returncode == (130 if ending == signal.SIGTERM else -signal.SIGKILL)
        assert psutil.wait_procs(started, timeout=PATIENCE)[1] == []
    finally:
        incident.kill()


def wait_until(seen: Callable[[], Any]) -> Any:
    """What `seen` says once it says anything."""
    deadline = time.monotonic() + PATIENCE
    while not (found := seen()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found
