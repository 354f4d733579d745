"""A room that is aborted in the step that computes its last token: its forward ends once, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsv4ctl.controlplane.config.schema import EngineConfig, HiCacheConfig, ReferenceConfig
from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.engine_adapters.reference.decode import Decode
from dsv4ctl.engine_adapters.reference.sequences import Sequence
from single import Single


@pytest.fixture
def single() -> Iterator[Single]:
    config = EngineConfig(
        name="s", role="single", hicache=HiCacheConfig(enabled=False), reference=ReferenceConfig(device_pages=8)
    )
    engine = Single(config)
    yield engine
    engine.stop()


@pytest.mark.parametrize("new", [1, 4], ids=["at the prompt's end", "decoding"])
def test_an_abort_in_the_last_step_loses_nothing(single: Single, monkeypatch: pytest.MonkeyPatch, new: int) -> None:
    last = Decode.over

    def over(decode: Decode, sequence: Sequence) -> str | None:
        reason = last(decode, sequence)
        if reason is not None:
            single.engine._agent.abort(sequence.key, AbortSource.CLIENT, "left")
        return reason

    ids = list(range(200))
    wanted, _ = single.answer(single.ask(ids, new)[1])
    with monkeypatch.context() as patched:
        patched.setattr(Decode, "over", over)
        _, finished = single.answer(single.ask(ids, new)[1])
        assert (finished.reason, finished.source) == ("abort", AbortSource.CLIENT)
        single.settle()
    assert single.answer(single.ask(ids, new)[1])[0] == wanted
    single.settle()
    assert single.engine._agent.rooms() == []
    assert single.engine.gate.totals()["tickets"] == 0
    assert single.ended == []
