"""Report 23: what one rank of four knows, all four act on in the same round; each by itself, they part."""

from __future__ import annotations

import random

import pytest

from dsv4ctl.controlplane.config.schema import EngineConfig, HiCacheConfig, ReferenceConfig
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey
from dsv4ctl.engine_adapters.reference.sequences import Sequence
from ranks import ENDLESS, HURRIED, Ranks

#: One prompt of three pages.
IDS = [random.Random(1).randrange(256) for _ in range(600)]
Drop = tuple[int, RoomKey, AbortSource]


def four(off: tuple[str, ...] = ()) -> Ranks:
    config = EngineConfig(
        name="s",
        role="single",
        ranks=4,
        hicache=HiCacheConfig(enabled=False),
        reference=ReferenceConfig(device_pages=20),
    )
    return Ranks(config, off)


def note_drops(ranks: Ranks) -> list[list[Drop]]:
    """By rank: in which round each sequence was dropped, and for what."""
    drops: list[list[Drop]] = [[] for _ in ranks.engines]
    for engine, mine in zip(ranks.engines, drops, strict=True):
        loop, plain = engine._loop, engine._loop._drop

        def drop(sequence: Sequence, source: AbortSource, loop=loop, plain=plain, mine=mine) -> None:  # type: ignore[no-untyped-def]
            mine.append((loop.rounds, sequence.key, source))
            plain(sequence, source)

        loop._drop = drop  # type: ignore[method-assign]
    return drops


def test_one_of_four_fails_and_all_act_alike_in_one_round() -> None:
    """sglang#37909, #31030, #28039; TRT#13902, #14020, #14560: a rank-local branch enters another collective."""
    ranks = four()
    try:
        drops = note_drops(ranks)
        key, outputs = ranks.ask(IDS, ENDLESS)
        ranks.until("decoding", lambda: bool(ranks.engines[2]._loop.decoding))
        ranks.engines[2]._agent.abort(key, AbortSource.INTEGRITY, "grammar failed on this rank")
        _, finished = ranks.answer(outputs)
        assert (finished.reason, finished.source) == ("abort", AbortSource.INTEGRITY)
        ranks.until("at rest", ranks.at_rest)
        assert drops[0] == drops[1] == drops[2] == drops[3]
        assert [(room, source) for _, room, source in drops[0]] == [(key, AbortSource.INTEGRITY)]
        assert ranks.ended == []
    finally:
        ranks.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_without_agreement_the_one_parts_from_the_three() -> None:
    ranks = four(("rank_agreement",))
    try:
        drops = note_drops(ranks)
        key, _ = ranks.ask(IDS, ENDLESS)
        ranks.until("decoding", lambda: bool(ranks.engines[2]._loop.decoding))
        ranks.meeting.timeout = HURRIED
        ranks.engines[2]._agent.abort(key, AbortSource.INTEGRITY, "grammar failed on this rank")
        ranks.until("an engine that ended", lambda: bool(ranks.ended))
        assert [len(mine) for mine in drops] == [0, 0, 1, 0]
    finally:
        ranks.stop()
