"""The whole control plane in virtual time: fresh seeds in each run, every plan that ever failed, seeded faults."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from simulation.__main__ import find, main
from simulation.mutants import MUTANTS, Mutant, seeded
from simulation.plan import HARSH, MILD, Client, Deployment, Fault, Plan, small
from simulation.shrink import shrink
from simulation.world import Found, Violation, simulate

#: Fresh seeds of one run.
FRESH = 25
BASE = secrets.randbelow(1_000_000_000)
#: Plans that found a fault once, as small as they could be made.
FAILED = sorted(Path(__file__).with_name("failed").glob("*.json"))


def _told(found: Found) -> str:
    story = [line[:300] for line in found.story[-60:]]
    return "\n".join([*story, str(found.plan), *map(str, found.violations)])


@pytest.mark.parametrize("seed", range(BASE, BASE + FRESH))
def test_a_fresh_seed_holds(seed: int) -> None:
    """`scripts/simulate --seed N` shows it again."""
    found = simulate(small(seed))
    assert not found.violations, _told(found)
    assert found.leaked == 0
    assert found.slowest <= 1.0


@pytest.mark.parametrize("path", FAILED, ids=lambda path: path.stem)
def test_what_failed_once_holds(path: Path) -> None:
    found = simulate(msgspec.json.decode(path.read_bytes(), type=Plan))
    assert not found.violations, _told(found)


def test_a_machine_that_is_suspended_while_rooms_are_aborted_costs_no_engine() -> None:
    """The acks wait in the sockets while every deadline passes: they are read before anybody is fenced."""
    clients = tuple(Client(number, 2.0 + number / 100, pages=2, tokens=40, stream=True) for number in range(12))
    faults = (Fault("abort_wave", 2.5, amount=0.9), Fault("clock_jump", 2.5004, seconds=10.0))
    found = simulate(Plan(0, Deployment(2, 2, ranks=1, pages=40), 4.0, clients, faults))
    assert not found.violations, _told(found)
    assert found.events["room.aborted"] > 5
    assert found.events["engine.restarting"] == 0


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_a_seeded_fault_is_found(mutant: Mutant) -> None:
    found = find(mutant, [mutant.seed])
    assert found is not None
    assert not simulate(small(mutant.seed)).violations, "it is the fault that is found"


def test_the_same_seed_is_the_same_run_whatever_the_hashes() -> None:
    """Twice in one process, and in two whose strings have other hashes and whose objects have other addresses."""
    digests = {simulate(small(7)).digest, simulate(small(7)).digest}
    code = "from simulation.plan import small; from simulation.world import simulate; print(simulate(small(7)).digest)"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        told = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
        assert told.returncode == 0, told.stderr
        digests.add(told.stdout.strip())
    assert len(digests) == 1


def test_a_failing_plan_is_shrunk_to_what_it_takes() -> None:
    """Of a plan that fails if client 3 and any kill are in it, these two are left."""

    def run(plan: Plan) -> Found:
        numbers, kinds = {client.number for client in plan.clients}, {fault.kind for fault in plan.faults}
        violations = whole.violations if 3 in numbers and "kill" in kinds else []
        return whole._replace(plan=plan, violations=violations)

    plan = next(plan for plan in map(small, range(100)) if any(fault.kind == "kill" for fault in plan.faults))
    empty = simulate(msgspec.structs.replace(plan, clients=(), faults=()))
    whole = empty._replace(plan=plan, violations=[Violation("S3", "seeded", 0.0)])
    smallest = shrink(whole, run=run).plan
    assert [client.number for client in smallest.clients] == [3]
    assert [fault.kind for fault in smallest.faults] == ["kill"]


def test_a_violation_is_told_with_the_plan_that_shows_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mutant = next(mutant for mutant in MUTANTS if mutant.fault == "a client that leaves aborts nothing")
    with seeded(mutant):
        assert main(["--base", str(mutant.seed), "--seeds", "1"]) == 1
        told = capsys.readouterr().out
        assert f"again: scripts/simulate --replay simulate-{mutant.seed}.json" in told
        assert main(["--replay", f"simulate-{mutant.seed}.json"]) == 1
    assert main(["--replay", f"simulate-{mutant.seed}.json"]) == 0
    assert "no violation" in capsys.readouterr().out


def test_every_kind_of_fault_happens() -> None:
    """Among the first few hundred seeds, none is forgotten by the generator."""
    seen = {fault.kind for seed in range(300) for fault in small(seed).faults}
    assert seen == {*MILD, *HARSH}
