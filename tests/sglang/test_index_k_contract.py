"""The hooks of bf16 index keys on SGLang's real classes, release by release: each check holds with them, and fails
without the one that it is about."""

from __future__ import annotations

from typing import Any

import pytest

import sglang_env
from dsv4ctl.engine_adapters.sglang.index_k.hooks import HOOKS


@pytest.fixture(scope="module", params=sorted(HOOKS))
def outcome(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"release": request.param, **sglang_env.run(request.param, "sglang_index_k", request.param)}


def test_every_hook_is_in_place(outcome: dict[str, Any]) -> None:
    assert outcome["problems"] == []


def test_each_check_holds_with_the_hooks(outcome: dict[str, Any]) -> None:
    checks = outcome["checks"]
    assert checks == dict.fromkeys(checks)
    assert len(checks) == 8


def test_a_check_fails_without_its_hook(outcome: dict[str, Any]) -> None:
    without = outcome["without"]
    assert [target for target, error in without.items() if error is None] == []
    targets = {target for target, _, _ in HOOKS[outcome["release"]]}
    assert {target.rpartition(".")[2] for target in targets - set(without)} == {"fp8_paged_mqa_logits_torch_sm120"}
