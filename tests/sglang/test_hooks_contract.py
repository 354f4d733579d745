"""The hooks on SGLang's real classes, release by release: each check holds with them, and fails without."""

from __future__ import annotations

from typing import Any

import pytest

import sglang_env
from dsv4ctl.engine_adapters.sglang.releases import VERIFIED, hooks_of


@pytest.fixture(scope="module", params=VERIFIED)
def answer(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, sglang_env.run(request.param, "sglang_contract", request.param)


def test_every_hook_is_in_place(answer: tuple[str, dict[str, Any]]) -> None:
    release, outcomes = answer
    assert outcomes["problems"] == []
    assert outcomes["hooks"] == len(hooks_of(release)) > 20


def test_each_check_holds_with_the_hooks(answer: tuple[str, dict[str, Any]]) -> None:
    checks = answer[1]["checks"]
    assert {name: outcome["with"] for name, outcome in checks.items()} == dict.fromkeys(checks, "holds")


def test_each_check_fails_without_the_hooks(answer: tuple[str, dict[str, Any]]) -> None:
    without = {name: o["without"] for name, o in answer[1]["checks"].items() if o["without"] is not None}
    assert without
    assert {name: outcome for name, outcome in without.items() if not outcome.startswith("fails: ")} == {}


def test_two_ranks_act_alike_with_the_hooks_and_apart_without(answer: tuple[str, dict[str, Any]]) -> None:
    outcomes = answer[1]["two ranks"]
    assert len(outcomes) >= 2
    assert {name: outcome["with"] for name, outcome in outcomes.items()} == dict.fromkeys(outcomes, "holds")
    assert {name: o["without"] for name, o in outcomes.items() if not o["without"].startswith("fails: ")} == {}
