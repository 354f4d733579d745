"""Policy `emit` with the sender's ticket off: stale bytes land, are decoded, and no token of them reaches a client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployment import DECODE, PAGE, Client, deployed, expected, prompt

pytestmark = pytest.mark.asyncio

NEW = 6
#: Slow enough that a load is under way when its pages are sent; and the other prompt drives a prefix to the host.
PREFILL_CONFIG = "reference = { device_pages = 14, state_slots = 24 }\nhicache = { pages = 64, h2d_gbps = 0.05 }"


async def ask(client: Client, shared: list[int], tail: int, *, stream: bool) -> None:
    """A prompt whose prefix was computed before, after another one that needs its pages."""
    for ids in (prompt(900 + tail, 11 * PAGE), shared + prompt(1000 + tail, 40)):
        reply = await client.generate(ids, NEW, stream=stream)
        assert reply.tokens == expected(ids, NEW), reply


async def test_no_wrong_token_reaches_a_client_and_the_evidence_is_kept(tmp_path: Path) -> None:
    tables = (
        '[policies]\nintegrity = "emit"\n[unsafe]\noff = ["sender_ticket"]\n'
        f'[evidence]\nfolder = "{tmp_path / "evidence"}"\nmax_bytes = 3000000\n'
    )
    with deployed(tables, prefill=PREFILL_CONFIG) as deployment:
        async with deployment.client() as client:
            shared, tail = prompt(1, 6 * PAGE), 0
            while not deployment.events("digest.mismatch"):  # a load that was quicker than the send proves nothing
                tail += 1
                await ask(client, shared, tail, stream=tail % 2 == 0)

            async def both() -> bool:
                return len(deployment.events("evidence.kept")) >= 2

            await client.until("both ranks' evidence is kept", both)
            counters = (await client.live(DECODE))["counters"]
            assert counters["digest_mismatches"] > 0
            await client.until_at_rest()
        files = {body["engine"]: body for body in map(json.loads, _texts(tmp_path / "evidence"))}
        assert sum(len(text) for text in _texts(tmp_path / "evidence")) <= 3_000_000
        (mismatch, *_) = files["decode0"]["answer"]["mismatches"]
        sealed = files["prefill0"]["answer"]["sealed"][mismatch["where"]]
        wrong = mismatch["differing"][0]
        assert wrong["expected"] != wrong["found"]
        assert len(wrong["found_by_page"]) <= len(sealed) == 7
        assert files["decode0"]["answer"]["trace"]


def _texts(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.iterdir()]
