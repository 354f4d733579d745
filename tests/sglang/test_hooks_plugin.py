"""The entry point: nothing where it was not asked for, and an end with one line where something is wrong."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import msgspec
import pytest

from dsv4ctl.engine_adapters.protocol import ENGINE_VARIABLE, LaunchRequest, encode_request
from dsv4ctl.engine_adapters.sglang import install, plugin
from dsv4ctl.engine_adapters.sglang.releases import VERIFIED, Hook, hooks_of, nearest

REQUEST = LaunchRequest({"name": "p", "role": "prefill"}, 0, "me", "group", "/nowhere", (), "off", "model")


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != ENGINE_VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_plugin_knows_the_variable_by_its_value() -> None:
    assert plugin.ENGINE_VARIABLE == ENGINE_VARIABLE


def test_without_the_variable_nothing_is_imported() -> None:
    done = _python(
        """
        import sys
        from dsv4ctl.engine_adapters.sglang import plugin
        before = set(sys.modules)
        plugin.register()
        print(sorted(set(sys.modules) - before), [name for name in sys.modules if "msgspec" in name or "torch" in name])
        """
    )
    assert done.stdout == "[] []\n", done.stderr


#: A scheduler's process, as far as the plugin looks: a child with the scheduler's module, and a release.
SCHEDULER = """
    import importlib.metadata, multiprocessing, sys, types
    multiprocessing.parent_process = lambda: object()
    sys.modules["sglang.srt.managers.scheduler"] = types.ModuleType("scheduler")
    importlib.metadata.version = lambda name: "{release}"
    from dsv4ctl.engine_adapters.sglang import plugin
    try:
        plugin.register()
    except Exception as error:
        print("SGLang would log this and go on:", error)
"""


def test_an_unverified_release_ends_the_process_with_one_line() -> None:
    done = _python(SCHEDULER.format(release="0.5.99"), **encode_request(REQUEST))
    assert done.returncode == 78
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "sglang 0.5.99 is not among the verified releases" in done.stderr


def test_hooks_that_cannot_be_loaded_end_the_process_with_one_line() -> None:
    done = _python(SCHEDULER.format(release=VERIFIED[0]), **encode_request(REQUEST))
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert "can't be loaded" in done.stderr


def test_a_request_that_cannot_be_read_ends_the_process_with_one_line() -> None:
    done = _python(SCHEDULER.format(release=VERIFIED[0]), **{ENGINE_VARIABLE: "{}"})
    assert done.returncode == 78
    assert "can't be read" in done.stderr


def test_a_process_that_is_no_scheduler_is_left_alone() -> None:
    done = _python("from dsv4ctl.engine_adapters.sglang import plugin; plugin.register()", **encode_request(REQUEST))
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unverified_release_is_treated_as_the_newest_verified_one_below_it() -> None:
    assert nearest("0.5.17") == "0.5.16"
    assert nearest("0.1.0") == VERIFIED[0]
    assert hooks_of("0.5.17") == hooks_of("0.5.16")


LOADING = {"load_back", "start_loading", "update_producer", "start_writing", "wait_layer_transfer"}


@pytest.mark.parametrize(
    ("role", "left_out"),
    [("decode", {"run_batch", "forward_batch_generation", *LOADING}), ("prefill", set()), ("single", {"run_batch"})],
)
def test_an_engine_is_not_hooked_where_its_role_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch, role: str, left_out: set[str]
) -> None:
    hooked: list[Hook] = []
    monkeypatch.setattr(install, "in_scheduler", lambda: True)
    monkeypatch.setattr(install, "_load", lambda module: SimpleNamespace(launched=lambda request: None))
    monkeypatch.setattr(install, "resolve", lambda hooks: hooked.extend(hooks) or [])
    monkeypatch.setattr(install, "register", lambda placed: {})
    monkeypatch.setattr(install, "verify_after_apply", lambda functions: None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.16")
    install.install(
        encode_request(msgspec.structs.replace(REQUEST, engine={"name": "e", "role": role}))[ENGINE_VARIABLE]
    )
    missing = {hook.target.rpartition(".")[2] for hook in hooks_of("0.5.16") if hook not in hooked}
    assert missing == left_out
