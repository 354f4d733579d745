import json
import subprocess
import sys

import numpy as np
import pytest

from dsv4ctl.engine_adapters.reference.digests import PageDigests, digest_pages, fold_pages
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.oracle import Oracle, answer_line
from dsv4ctl.engine_adapters.reference.pools import DevicePools
from dsv4ctl.engine_adapters.reference.tokenizer import EOS

SMALL = Geometry(compress_ratios=(0, 4, 128), context_tokens=1024)


def test_another_process_answers_the_same_and_survives_bad_lines() -> None:
    ids = [32 + at * 7 % 95 for at in range(530)]
    lines = [
        json.dumps({"id": "a", "input_ids": ids, "max_new_tokens": 6}),
        "{",
        json.dumps({"id": 2, "input_ids": [], "max_new_tokens": 6}),
        json.dumps({"id": 3, "input_ids": ids, "max_new_tokens": 600}),
        json.dumps({"id": 4, "input_ids": ids, "max_new_tokens": 6}),
    ]
    program = [sys.executable, "-m", "dsv4ctl.engine_adapters.reference.oracle", "--seed", "5"]
    geometry = json.dumps({"compress_ratios": [0, 4, 128], "context_tokens": 1024})
    done = subprocess.run(
        [*program, "--geometry", geometry], input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, broken, empty, long, again = map(json.loads, done.stdout.splitlines())
    here = Oracle(SMALL, 5).generate(ids, 6)
    assert first == {
        "id": "a",
        "output_ids": here.tokens,
        "digests": [page.to_builtins() for page in here.pages],
        "folded": fold_pages(here.pages).to_builtins(),
        "folded_full_pages": fold_pages(here.pages[:2]).to_builtins(),
    }
    assert again == {**first, "id": 4}
    assert broken["id"] is None
    assert "bad line" in broken["error"]
    assert empty == {"id": 2, "error": "the prompt is empty: at least one token expected"}
    assert long == {"id": 3, "error": "530 + 600 tokens: at most 1024 fit the context"}


def test_a_geometry_that_is_none_is_a_usage_error() -> None:
    program = [sys.executable, "-m", "dsv4ctl.engine_adapters.reference.oracle", "--geometry"]
    done = subprocess.run([*program, '{"heads": 0}'], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "heads 0: a number above 0 expected" in done.stderr


def test_digests_travel_as_json_without_loss() -> None:
    page = Oracle(SMALL, 5).generate(list(range(32, 100)), 1).pages[0]
    back = PageDigests.from_builtins(json.loads(json.dumps(page.to_builtins())))
    assert back.differences(page) == []
    other = PageDigests({**page.values, "swa_kv": page.values["swa_kv"] ^ np.uint64(4)})
    assert page.differences(other) == [("swa_kv", 0), ("swa_kv", 1), ("swa_kv", 2)]


def test_rings_are_digested_where_the_sequence_ends_only() -> None:
    pages = Oracle(SMALL, 5).generate([65] * 600, 1).pages
    assert all("c4_state" in page.values for page in pages)
    folded = fold_pages(pages)
    assert set(folded.values) == set(pages[0].values)
    assert folded.differences(fold_pages(pages[::-1])) != []


def test_bytes_behind_the_valid_rows_do_not_count() -> None:
    pools = DevicePools(Geometry(index_k_dtype="fp8"), {"full": 2, "swa": 1, "state": 1})
    pools.layer_bytes("index_k", 1).random_(0, 128)
    before = digest_pages(pools, "index_k", 1, [0, 1], valid_rows=10)
    whole = digest_pages(pools, "index_k", 1, [0, 1])
    pools.layer_bytes("index_k", 1)[0, 10 * 128 : 64 * 128] = 7
    pools.layer_bytes("index_k", 1)[0, 8192 + 40 :] = 7
    assert np.array_equal(digest_pages(pools, "index_k", 1, [0, 1], valid_rows=10), before)
    assert digest_pages(pools, "index_k", 1, [0])[0] != whole[0]
    assert digest_pages(pools, "index_k", 1, [1])[0] == whole[1]
    pools.layer_bytes("index_k", 1)[0, 8192 + 36] ^= 1
    assert digest_pages(pools, "index_k", 1, [0], valid_rows=10)[0] != before[0]


@pytest.mark.parametrize(
    ("ids", "count", "message"),
    [
        ([], 1, "prompt is empty"),
        ([1], 0, "max_new_tokens 0: 1 or more"),
        ([1, 264], 1, "token 264 is unknown: 0 to 263"),
        ([1] * 1000, 25, "1000 [+] 25 tokens: at most 1024 fit"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(ids: list[int], count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Oracle(SMALL, 5).generate(ids, count)


def test_eos_ends_an_answer_unless_ignored() -> None:
    oracle = Oracle(SMALL, 5)
    oracle.model.weights.head_bias[EOS] = 1e9
    assert oracle.generate([65], 4, ignore_eos=False).tokens == [EOS]
    assert oracle.generate([65], 4).tokens == [EOS] * 4
    assert json.loads(answer_line(oracle, b'{"id":1,"input_ids":[65],"max_new_tokens":3}', False))["output_ids"] == [
        EOS
    ]
