"""What the measurements on GPUs say is computed by these: distances, wrong sends, ranks that part."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from sglang_bench.ask import Reply
from sglang_bench.compare import distance, summary
from sglang_bench.early_send import sends
from sglang_bench.ranks import divergence
from sglang_bench.results import Results, spread


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


@pytest.mark.parametrize(("values", "median"), [([3.0, 1.0, 2.0], 2.0), ([1.0], 1.0)])
def test_a_spread_has_a_median(values: list[float], median: float) -> None:
    found = spread(values)
    assert found is not None
    assert found["median"] == median
    assert spread([]) is None
