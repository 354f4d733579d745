"""The official openai client against the real deployment: streaming, not streaming, and leaving in the middle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
import pytest_asyncio

from deployment import Client, Deployment, deployed

pytestmark = pytest.mark.asyncio
MESSAGES = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with deployed() as running:
        yield running


@pytest_asyncio.fixture
async def client(deployment: Deployment) -> AsyncIterator[Client]:
    async with deployment.client() as found:
        yield found


def official(client: Client) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{client.gateway}/v1", api_key="none", max_retries=0, timeout=60)


async def test_streamed_and_whole_are_the_same_text(client: Client) -> None:
    async with official(client) as api:
        model = (await api.models.list()).data[0].id
        whole = await api.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12)  # type: ignore[arg-type]
        stream = await api.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, stream=True)  # type: ignore[call-overload]
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        plain = await api.completions.create(model=model, prompt="Say something.", max_tokens=12)
    assert "".join(pieces) == whole.choices[0].message.content != ""
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert plain.choices[0].finish_reason == "length"


async def test_a_stream_that_is_left_ends_its_room(client: Client) -> None:
    async with official(client) as api:
        stream = await api.chat.completions.create(
            model="dsv4-reference",
            messages=MESSAGES,
            max_tokens=2000,
            stream=True,  # type: ignore[call-overload]
        )
        room = int(stream.response.headers["x-dsv4ctl-room"].partition(".")[0])
        async for _ in stream:
            break
        await stream.close()
        ended = await client.until_ended(room)
    assert ended["state"] == "aborted"
    assert ended["source"] == "client"
    await client.until_at_rest()


async def test_errors_are_the_clients_own_classes(client: Client) -> None:
    async with official(client) as api:
        with pytest.raises(openai.BadRequestError, match="nope"):
            await api.chat.completions.create(model="nope", messages=MESSAGES)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="16384"):
            await api.completions.create(model="dsv4-reference", prompt="a" * 17_000, max_tokens=1)
