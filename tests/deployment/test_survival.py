"""Engines with `survive = true`: their control plane is killed, the next one goes on with the same processes."""

from __future__ import annotations

import os
import random
import signal

import anyio
import pytest

from deployment import DECODE, PAGE, PATIENCE, PREFILL, Client, Deployment, deployed, prompt
from kills import CLIENTS, CONTROL_PLANE, Victim, kill, serves
from storms import BEGUN

pytestmark = pytest.mark.asyncio

LINES = "survive = true"


async def lives(client: Client) -> dict[str, tuple[list[int], list[str], int]]:
    """Of each engine its pids, incarnations and restarts."""
    engines = (await client.engines()).items()
    return {name: (engine["pids"], engine["incarnations"], engine["restarts"]) for name, engine in engines}


async def killed_under_load(
    deployment: Deployment, numbers: random.Random
) -> dict[str, tuple[list[int], list[str], int]]:
    """Every client is told, and the engines live on."""
    async with deployment.client() as client:
        before = await lives(client)
        print(await kill(client, Victim(CONTROL_PLANE), numbers, await serves(client), survived=True))
    assert deployment.process.wait(PATIENCE) == -signal.SIGKILL
    assert set(deployment.pids()) == {pid for pids, _, _ in before.values() for pid in pids}
    return before


async def sending(client: Client) -> None:
    async def there() -> bool:
        return any(room["state"] in BEGUN for room in await client.rooms())

    await client.until("bytes are on their way", there)


async def gone(deployment: Deployment, pid: int) -> None:
    with anyio.fail_after(PATIENCE):
        while pid in deployment.pids():  # noqa: ASYNC110 - only /proc knows
            await anyio.sleep(0.01)


async def test_a_new_control_plane_goes_on_with_the_engines_of_the_old_one() -> None:
    numbers = random.Random(7)
    with deployed(prefill=LINES, decode=LINES) as deployment:
        before = await killed_under_load(deployment, numbers)
        deployment.start()
        assert len(deployment.events("engine.adopted")) == 2
        async with deployment.client() as client:
            assert await lives(client) == before
            await client.until_at_rest()
            await serves(client)

            # A process that is no child of this control plane is fenced all the same.
            (pid,), (incarnation,), _ = before[DECODE]
            os.kill(pid, signal.SIGSTOP)
            await client.ask("POST", "/drain", engines=[DECODE], deadline_s=1.0)
            await gone(deployment, pid)
            await client.ask("POST", "/resume", engines=[DECODE])
            await client.until_ready()
            assert (await lives(client))[DECODE][1] != [incarnation]

        # A writer dies with its control plane: the next one alone can say so, and the pages come back.
        async with deployment.client() as client:
            before = await lives(client)
            async with anyio.create_task_group() as clients:
                clients.start_soon(client.burst, [(prompt(900 + at, 6 * PAGE), 50) for at in range(CLIENTS)])
                await sending(client)
                deployment.process.kill()
                os.kill(before[PREFILL][0][0], signal.SIGKILL)
        deployment.process.wait(PATIENCE)
        deployment.start()
        async with deployment.client() as client:
            assert (await lives(client))[DECODE] == before[DECODE]
            assert (await lives(client))[PREFILL][1] != before[PREFILL][1]
            await serves(client)

        # Another configuration: what runs with the old one is not taken over.
        before = await killed_under_load(deployment, numbers)
        changed = deployment.file.read_text().replace(LINES, f"{LINES}\nmemory_bytes = 8_000_000_000", 1)
        deployment.file.write_text(changed)
        deployment.start()
        (refused,) = deployment.events("engine.not_adopted")
        assert (refused["engine"], refused["reason"]) == (PREFILL, "it was started with another configuration")
        async with deployment.client() as client:
            now = await lives(client)
            assert now[DECODE] == before[DECODE]
            assert now[PREFILL][1] != before[PREFILL][1]
            assert before[PREFILL][0][0] not in deployment.pids()
            await serves(client)
        deployment.process.terminate()
        assert deployment.process.wait(PATIENCE) == 0
        assert deployment.pids() == []
        assert sorted(path.name for path in deployment.folder.iterdir()) == ["cluster.toml", "log"]
