"""The detector on a real engine in this process: a guard off names its consumer, guards on leave nothing to report."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dsv4ctl.controlplane.config.schema import EngineConfig, HiCacheConfig, ReferenceConfig
from dsv4ctl.controlplane.trace.check import check
from dsv4ctl.controlplane.trace.file import TraceFile, Writer
from dsv4ctl.controlplane.trace.format import Page
from dsv4ctl.controlplane.trace.races import Report
from single import Single

#: Device pages for about two of the prompts: each round loads its prefixes from the host, over a link that is slower
#: than a layer takes to compute.
CONFIG = EngineConfig(
    name="single0",
    role="single",
    hicache=HiCacheConfig(pages=32, h2d_gbps=0.004),
    reference=ReferenceConfig(device_pages=10, state_slots=20),
)
PROMPTS, ROUNDS, PAGE_TOKENS = 3, 2, 256


def run(off: tuple[str, ...], path: Path) -> tuple[Report, dict[str, int]]:
    dice = random.Random(0)
    prompts = [[dice.randrange(256) for _ in range(4 * PAGE_TOKENS + 9)] for _ in range(PROMPTS)]
    single = Single(CONFIG, off)
    for _ in range(ROUNDS):
        for prompt in prompts:
            single.answer(single.ask(prompt, 2)[1])
    single.settle()
    with Writer(path, 1 << 24) as writer:
        begin, more = 0, True
        while more:
            part = single.engine.query(f"trace {begin}")
            assert isinstance(part, Page)
            writer.write("incarnation-0", part.rank, part.events)
            begin, more = part.next, part.more
    single.stop()
    assert single.engine._counters()["host_tokens_loaded"], "nothing was loaded: nothing could go wrong"
    file = TraceFile(path)
    return check(file.ranks, file.merged()), dict(single.engine.gate.violations)


def test_with_every_guard_on_there_is_nothing_to_report(tmp_path: Path) -> None:
    report, _ = run((), tmp_path / "t")
    assert (report.races, report.accesses, report.resets) == ([], 0, 0)
    assert report.events > 300


@pytest.mark.parametrize(("guard", "consumer", "pools"), [
    ("indexer_ticket", "indexer", {"index_k"}), ("attention_ticket", "attention", {"swa_kv", "c4_kv", "c128_kv"}),
])  # fmt: skip
def test_a_guard_off_names_its_consumer_in_every_room(
    tmp_path: Path, guard: str, consumer: str, pools: set[str]
) -> None:
    report, violations = run((guard, "verdict"), tmp_path / "t")
    # The gate counts a read before every load of its ticket has landed, the detector one before the pool's own has.
    assert 0 < report.accesses <= sum(violations.values())
    assert {race.kind.value for race in report.races} == {"read-before-land"}
    assert {race.consumer for race in report.races} == {consumer}
    assert {race.pool for race in report.races} <= pools
    assert all(race.second.where.startswith("model.Model.") for race in report.races)
