"""Which of the plugin's hooks a release has a place for, and which holes that closes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4ctl.engine_adapters.sglang import environment
from dsv4ctl.engine_adapters.sglang.audit import report, sources
from dsv4ctl.engine_adapters.sglang.audit.hooks import hooked
from dsv4ctl.engine_adapters.sglang.audit.questions import FACTS
from dsv4ctl.engine_adapters.sglang.audit.sources import Sources
from dsv4ctl.engine_adapters.sglang.environment import Installed
from dsv4ctl.engine_adapters.sglang.releases import HOOKS, VERIFIED
from sglang_wheels import Copy, released


@pytest.fixture(scope="module")
def verified() -> Sources:
    return released("0.5.16")


def test_every_hook_of_a_verified_release_finds_its_target(verified: Sources) -> None:
    found = hooked(verified)
    assert len(found) >= len([hook for hook in HOOKS if verified.release in hook.releases])
    assert [hook.target for hook in found if not hook.applies] == []


def test_every_hook_that_closes_a_hole_is_in_the_table() -> None:
    assert {target for fact in FACTS for target in fact.closed_by} <= {hook.target for hook in HOOKS}


def test_all_holes_of_a_verified_release_are_closed(verified: Sources) -> None:
    audited = report.audit(verified)
    assert audited.verified
    assert audited.ok
    assert [hole.key for hole in audited.holes if not hole.closed_by] == []


def test_a_hook_without_its_target_leaves_its_holes_open(verified: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Copy(verified, "srt/disaggregation/nixl/conn.py", "def transfer_worker(", "def moved(")
    copy.release = verified.release
    monkeypatch.setattr(report, "consumers", lambda _: [])
    audited = report.audit(copy)
    assert {hole.key for hole in audited.holes if not hole.closed_by} == {"early_send_skips_loads"}
    assert not audited.ok
    assert any("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX=0" in text for text in audited.hazards)


def test_an_unverified_release_is_not_well_whatever_the_hooks_find(
    verified: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "consumers", lambda _: [])
    unknown = Copy(verified, "srt/environ.py", "import os\n", "import os\n")
    unknown.release = "0.5.17"
    assert unknown.release not in VERIFIED
    audited = report.audit(unknown)
    assert all(hole.closed_by for hole in audited.holes)
    assert not audited.ok


def test_an_environment_without_the_plugin_is_not_well(verified: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Installed((3, 11), verified.release, "/env/sglang", nixl=True, plugins=())
    monkeypatch.setattr(environment, "ask", lambda python, env: bare)
    copy = Copy(verified, "srt/environ.py", "import os\n", "import os\n")
    copy.release = verified.release
    monkeypatch.setattr(sources, "folder", lambda package, release: copy)
    monkeypatch.setattr(report, "consumers", lambda _: [])
    audited = report.audit(sources.interpreter(Path("/env/bin/python")))
    assert all(hole.closed_by for hole in audited.holes)
    assert not audited.ok
    line = report.table(audited).splitlines()[-1]
    assert line.startswith("dsv4ctl is not installed in the environment of /env/bin/python")
