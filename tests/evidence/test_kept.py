"""What is kept, of whom, and that keeping it hurts nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4ctl.controlplane.config.schema import DeadlinesConfig, EvidenceConfig
from dsv4ctl.controlplane.telemetry.events import Event
from fake_engine import FakeRank
from running import PATIENCE, Stage, ask, pair_config, post, stage, until

pytestmark = pytest.mark.asyncio


def config(tmp_path: Path, folder: Path, **changes: Any) -> Any:
    return pair_config(tmp_path, evidence=EvidenceConfig(folder=str(folder)), **changes)


async def kept(running: Stage, number: int, kind: str, room: str | None = None) -> list[dict[str, Any]]:
    """The files of one kind, of one room or of any, once there are so many."""
    found: list[dict[str, Any]] = []

    def enough() -> bool:
        files = [Path(record["file"]) for record in running.telemetry.of(Event.EVIDENCE_KEPT)]
        told = [json.loads(file.read_text()) for file in files]
        found[:] = [one for one in told if one["kind"] == kind and room in (None, one.get("room"))]
        return len(found) >= number

    await until(enough)
    return found


async def test_of_a_mismatch_every_rank_of_the_room_is_asked(tmp_path: Path) -> None:
    async with stage(config(tmp_path, tmp_path / "evidence")) as running:
        await post(running, "/generate", ask("a very secret prompt", decode={"mismatch": True}))
        room = str(running.telemetry.of(Event.ROOM_OPENED)[0]["room"])
        first = await kept(running, 2, "mismatch", room)
        assert sorted((one["engine"], one["rank"]) for one in first) == [("decode0", 0), ("prefill0", 0)]
        for one in first:
            assert one["answer"] == {"what": f"evidence {room}"}
            assert (one["cause"], one["about"][0]["source"]) == ("index_k differs", "integrity")
        assert "very secret" not in "".join(path.read_text() for path in (tmp_path / "evidence").iterdir())


async def test_of_a_wedge_and_of_a_fence_too(tmp_path: Path) -> None:
    deadlines = DeadlinesConfig(wedge=2.0, ack=PATIENCE)
    async with stage(config(tmp_path, tmp_path / "evidence", deadlines=deadlines)) as running:
        await post(running, "/generate", ask(decode={"wedge": True}))
        (one,) = await kept(running, 1, "wedge")
        assert (one["engine"], one["stacks"]) == ("decode0", {"answer": "File fake_engine.py, in _leg"})

    def deaf(rank: FakeRank) -> None:
        rank.acks = rank.role.value == "decode"

    folder = tmp_path / "fences"
    async with stage(config(tmp_path, folder, deadlines=DeadlinesConfig(ack=1.0)), deaf) as running:
        await post(running, "/generate", ask(prefill={"silent": True}, decode={"status": 400}))
        found = await kept(running, 2, "fence")
        assert {one["engine"] for one in found} == {"prefill0", "decode0"}
        assert all("no abort-ack within" in one["cause"] for one in found)


async def test_a_folder_that_cannot_be_written_is_said_once_and_hurts_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    async with stage(config(tmp_path, tmp_path / "file" / "evidence")) as running:
        for _ in range(3):
            await post(running, "/generate", ask(decode={"mismatch": True}))
        status, _, _ = await post(running, "/generate", ask())
        assert status == 200
        await until(lambda: bool(running.telemetry.of(Event.EVIDENCE_FAILED)))
        assert len(running.telemetry.of(Event.EVIDENCE_FAILED)) == 1


async def test_without_a_folder_nothing_is_asked(tmp_path: Path) -> None:
    async with stage(pair_config(tmp_path)) as running:
        await post(running, "/generate", ask(decode={"mismatch": True}))
        await until(lambda: bool(running.telemetry.of(Event.ROOM_ABORTED)))
        assert running.telemetry.of(Event.EVIDENCE_KEPT) == running.telemetry.of(Event.EVIDENCE_FAILED) == []
