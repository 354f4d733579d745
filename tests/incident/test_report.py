"""What is printed, and the file that a deployment is started with."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from dsv4ctl.controlplane.config import installed
from dsv4ctl.controlplane.config.load import load
from dsv4ctl.controlplane.incident.configuration import MIN_SESSIONS, SETTINGS, device_pages, toml
from dsv4ctl.controlplane.incident.drive import STRUCK
from dsv4ctl.controlplane.incident.evaluate import Asked, Expected, Measured, evaluate
from dsv4ctl.controlplane.incident.progress import Progress, bar
from dsv4ctl.controlplane.incident.report import Pacing, Report, as_json, as_text
from dsv4ctl.controlplane.incident.rows import THERE, by_deployment, full_rows, quick_rows
from dsv4ctl.controlplane.incident.workload import FULL_WORK, GROUP, PAGE_TOKENS, QUICK_WORK, Size, Work, conversations

COST = {
    "on_to_off_landed": 0.97,
    "on_to_off_landed_goal": 0.98,
    "layers_to_whole": 1.5,
    "layers_to_whole_goal": 1.0,
    "ungated_to_layers": 1.4,
    "repeats": 101,
    "loading_repeats": 31,
}


def report(**more: Any) -> Report:
    row = quick_rows()[1]
    requests = [Asked(0, 0, 1024, (9,), None, "1.1")]
    rooms = {"1.1": {"state": "closed", "source": None, "detail": {"sealed": {"index_k": [2]}}}}
    edges = {"indexer read index_k before hicache landed": 3}
    measured = Measured(requests, rooms, [], 0, edges, 2048, 1.0)
    result = evaluate(row, 16, {(0, 0): Expected((1,), {"index_k": [1]}, {})}, measured)
    fields: dict[str, Any] = {
        "rows": [result], "comparisons": [], "seed": 7, "sessions": 16, "rounds": 4, "index_topk": 32,
        "pacing": Pacing({"pd-bf16-hicache-on": 0.0123}), "cost": None, "versions": {"dsv4ctl": "0.1.0"},
        "seconds": 40.0, "problems": [],
    }  # fmt: skip
    return Report(**(fields | more))


def test_json_is_one_object_with_the_rows() -> None:
    told = json.loads(as_json(report()))
    (row,) = told["rows"]
    for name in (
        "index_k", "hicache", "topology", "guards", "sessions", "corrupted", "stuck", "digest_mismatches",
        "transfer_timeouts", "retractions", "cached_share", "tokens_per_s",
    ):  # fmt: skip
        assert name in row
    assert (row["guards"], row["corrupted"], row["pools"]) == ("indexer_ticket", 1, {"index_k": 1})
    assert told["seed"] == 7
    assert "paced_gbps" in told["pacing"]["source"]
    assert told["pacing"]["h2d_gbps"] == {"pd-bf16-hicache-on": 0.0123}


def test_text_says_what_was_seen_and_where_the_pacing_comes_from() -> None:
    text = as_text(report(cost=COST, problems=["indexer-off: nothing"]))
    assert "16 sessions x 4 rounds, seed 7, 40 s" in text
    assert "gibberish; top-32" in text
    assert "indexer_ticket off  1/16" in text
    assert "damage: 1 of 16 conversations wrong; digests name index_k:1" in text
    assert "indexer-off  indexer read index_k before hicache landed=3" in text
    assert "paced at 12.3 MB/s (pd-bf16-hicache-on)" in text
    assert "all loads landed: 0.970 (goal 0.98: missed)" in text
    assert "waiting for the whole load: 1.500 (goal 1: reached)" in text
    assert "NOT SHOWN: indexer-off: nothing" in text


def test_a_progress_bar_is_drawn_on_a_terminal_alone() -> None:
    file = io.StringIO()
    progress = Progress(file, 10)
    progress.label("on")
    progress.step()
    progress.clear()
    assert file.getvalue() == ""
    assert bar(5, 10, "on") == f"[{'#' * 15}{'.' * 15}] 5/10 on"


@pytest.mark.parametrize("deployment", [deployment for deployment, _ in by_deployment(full_rows())], ids=str)
def test_every_deployment_s_file_is_a_valid_configuration(deployment: Any, tmp_path: Path) -> None:
    file = tmp_path / "deployment.toml"
    file.write_text(toml(deployment, str(tmp_path / "s"), 64, 5))
    config = load(file, installed.facts())
    roles = {engine.role: engine for engine in config.engines}
    assert set(roles) == ({"prefill", "decode"} if deployment.topology == "pd" else {"single"})
    assert config.unsafe.runtime
    assert config.unsafe.off == (["rank_agreement"] if deployment.setting == "ranks-alone" else [])
    for engine in config.engines:
        assert engine.hicache.enabled is (deployment.hicache and engine.role != "decode")
        assert engine.reference.index_k_dtype == deployment.index_k
        assert engine.reference.seed == 5
        assert engine.ranks == (2 if deployment.setting.startswith("ranks") else 1)


@pytest.mark.parametrize(
    ("size", "sessions"), [(Size(), MIN_SESSIONS), (Size(), 64), (QUICK_WORK[""].size, QUICK_WORK[""].sessions)]
)
def test_the_device_holds_every_request_and_not_every_prefix(size: Size, sessions: int) -> None:
    longest = size.prefix_pages * PAGE_TOKENS + size.rounds * (size.turn_tokens[1] + size.new_tokens)
    turns = size.rounds * size.turn_tokens[0] // PAGE_TOKENS
    every_prefix = sessions // 2 * size.prefix_pages + sessions * turns
    for role in ("prefill", "decode"):
        assert 2 * (longest // PAGE_TOKENS + 1) < device_pages(THERE, role, sessions) < every_prefix
    without = THERE._replace(hicache=False)
    assert device_pages(without, "decode", sessions) == device_pages(THERE, "decode", sessions)
    assert device_pages(without, "prefill", sessions) > every_prefix


@pytest.mark.parametrize("work", [FULL_WORK["crowd"], QUICK_WORK["crowd"]])
def test_what_grows_holds_the_small_pool_and_eight_others_fit(work: Work) -> None:
    pages = SETTINGS["small-pool"].decode_pages
    held = last = 0
    for conversation in conversations(0, work.sessions, work.size):
        prompt, answered = len(conversation.prompt([])), len(conversation.prompt([])) + conversation.new_tokens
        if conversation.new_tokens > PAGE_TOKENS:
            held += prompt // PAGE_TOKENS + 2
            last = -(-answered // PAGE_TOKENS)
            assert last == prompt // PAGE_TOKENS + 3, "it outgrows the page that it has to grow into"
        else:
            assert answered <= PAGE_TOKENS
    assert held == pages == 8
    assert last < pages, "alone it fits"


@pytest.mark.parametrize("work", [FULL_WORK["ranks"], QUICK_WORK["ranks"]])
def test_a_struck_request_finds_no_other_group_s_prefix_on_the_device(work: Work) -> None:
    """So the first one that follows another group loads from the host: what strikes loads does strike."""
    for turn in work.size.turn_tokens:
        prompt = work.size.prefix_pages * PAGE_TOKENS + 2 * turn + work.size.new_tokens
        for setting in ("ranks-agreed", "ranks-alone"):
            assert -(-(prompt + work.size.new_tokens) // PAGE_TOKENS) == SETTINGS[setting].device_pages
    assert MIN_SESSIONS // GROUP // STRUCK >= 2, "one group alone may follow itself"
