"""What the measurements on GPUs say is computed by these: distances, wrong sends, ranks that part."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from sglang_bench.ask import Reply
from sglang_bench.compare import distance, summary
from sglang_bench.cost import ratios
from sglang_bench.early_send import sends
from sglang_bench.equality import against, ruled, ruled_bf16
from sglang_bench.ranks import Notes, divergence
from sglang_bench.results import Results, spread
from sglang_bench.steps import BESIDE, CALLS, GROUPS, plan, usual


def test_a_distance_is_of_what_both_said() -> None:
    one, other = Reply(ids=[1, 2, 3], logprobs=[-1.0, -2.0, -9.0]), Reply(ids=[1, 2, 4], logprobs=[-1.0, -2.25, -1.0])
    assert distance(one, other) == (False, 2, 0.25, False)
    assert distance(one, one) == (True, 3, 0.0, True)
    assert not distance(Reply(), Reply()).equal  # two errors agree on nothing
    found = summary([(one, one), (one, other), (Reply(error="no"), one)])
    assert (found["asked"], found["answered"], found["ids_equal"], found["errors"]) == (3, 2, 1, ["no"])


def test_a_send_is_wrong_if_a_page_arrived_as_something_else() -> None:
    source = [
        {"k": "load", "t0": 5, "pages": [7, 8], "gpu_ms": 12.0},
        {"k": "send", "room": 1, "early": True, "load": 5, "pages": [8, 9], "pos": 0, "ck": [[1], [2]]},
        {"k": "send", "room": 1, "early": False, "load": None, "pages": [3], "pos": 2, "ck": [[3]]},
        {"k": "send", "room": 2, "early": True, "load": 5, "pages": [1], "pos": 0, "ck": [[1]]},
    ]
    sink = [{"k": "dck", "room": 1, "n": 3, "ck": [[1], [9], [3]]}]
    table = sends(source, sink, {1: "busy", 2: "busy"})["table"]["busy"]
    assert table["early_sends"] == 2
    assert table["early_sends_of_loading_pages"] == 1
    assert (table["early_sends_wrong"], table["early_pages_wrong"], table["early_pages_compared"]) == (1, 1, 2)
    assert (table["last_sends"], table["last_sends_wrong"]) == (1, 0)


def test_ranks_that_part_are_found_where_they_do(tmp_path: Path) -> None:
    for rank, second in ((0, "b"), (1, "x")):
        lines = [json.dumps(entry) for entry in ("a", second, "c")][: 3 - rank]
        (tmp_path / f"decode.1.{rank}.99.jsonl").write_text("\n".join(lines) + "\n")
    found = divergence(tmp_path)["decode 1"]
    assert found["first_difference"] == 1
    assert found["entries"] == {"0": 3, "1": 2}


def test_results_are_merged_by_key(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    Results(file).put("step", one=1, two=1)
    Results(file).put("step", two=2)
    assert json.loads(file.read_text()) == {"step": {"one": 1, "two": 2}}


def test_an_earlier_call_counts_only_for_one_that_resumes_it(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert Results(file, resume=True).found("steps") == {}
    Results(file).put("steps", lengths={"outcome": "done"})
    assert Results(file).found("steps") == {}
    assert Results(file, resume=True).found("steps") == {"lengths": {"outcome": "done"}}


def test_a_run_that_resumes_nothing_forgets_what_its_steps_found_before(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    for key in ("s1.lengths.hooks_on", "s1.lengthsome", "tp.aborts.on"):
        Results(file).put(key, waves=[1])
    Results(file).put("steps", **{"s1.lengths": 1, "drain": 1})
    before = json.loads(file.read_text())
    Results(file, resume=True).begin(["s1.lengths", "tp.aborts.on"])
    assert json.loads(file.read_text()) == before
    Results(file).begin(["s1.lengths", "tp.aborts.on"])
    assert json.loads(file.read_text()) == {"s1.lengthsome": {"waves": [1]}, "steps": {"drain": 1}}


def test_every_call_fits_in_ten_minutes_with_time_to_spare() -> None:
    assert {group for call in CALLS for group, _ in call} == set(GROUPS)
    for name, group in GROUPS.items():
        assert usual(name) + 90.0 < group.seconds <= 560.0
        assert set(group.steps) >= {step for step in BESIDE if step in group.steps}
        assert all(step.usual <= step.seconds for step in group.steps.values())
        assert all(step in plan() for step in group.steps)


def test_hooks_hold_if_their_answers_are_no_further_away_than_two_runs_without() -> None:
    def run(logprob: float, ids: tuple[int, ...] = (1, 2)) -> dict[tuple[int, int], Reply]:
        return {(0, at): Reply(ids=list(ids), logprobs=[-1.0, -2.0 - logprob]) for at in range(10)}

    off = run(0.0), run(0.1)
    assert ruled(off, (run(0.05), run(0.1)))["holds"]
    assert not ruled(off, (run(0.05), run(0.3)))["holds"]
    assert not ruled(off, (run(0.05), run(0.05, (1, 9))))["holds"]
    stock = [against(run(0.05), run(0.0)), against(run(0.1), run(0.0))]
    assert ruled_bf16((run(0.1), run(0.0)), run(0.0), stock)["holds"]
    assert not ruled_bf16((run(0.1), run(0.3)), run(0.0), stock)["holds"]
    assert not ruled_bf16((run(0.1), run(0.0, (1, 9))), run(0.0), stock)["holds"]


def test_a_fault_is_seen_by_the_rank_that_was_told_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = ModuleType("sglang.srt.disaggregation.base")
    base.KVPoll = SimpleNamespace(Success=4, Failed=0)  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    (tmp_path / "fault.1").write_text("failed")
    polls: dict[int, list[list[int]]] = {}
    for rank in (0, 1, 1):
        notes = Notes(tmp_path)
        server = SimpleNamespace(disaggregation_mode="decode", port=1)
        scheduler = SimpleNamespace(server_args=server, tp_rank=rank, forward_ct=3)
        notes.abort(scheduler, SimpleNamespace(rid="r"))
        polls.setdefault(rank, []).append([3, 4])
        notes.gate(polls[rank][-1], [None, SimpleNamespace()], None)
    assert polls == {0: [[3, 4]], 1: [[3, 0], [3, 4]]}
    assert divergence(tmp_path)["decode 1"]["first_difference"] is None


@pytest.mark.parametrize(("values", "median"), [([3.0, 1.0, 2.0], 2.0), ([1.0], 1.0)])
def test_a_spread_has_a_median(values: list[float], median: float) -> None:
    found = spread(values)
    assert found is not None
    assert found["median"] == median
    assert spread([]) is None


def test_a_mean_ratio_has_its_error() -> None:
    found = ratios([[100.0, 200.0, 50.0], [90.0, 220.0, 50.0]])
    assert found["ratios"] == [0.9, 1.1, 1.0]
    assert found["mean_ratio"] == [1.0286, 0.0674]
    assert ratios([[100.0], [90.0]]) == {}
