"""Two generations of an answer as one stream: nothing twice, nothing missing, however the events are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4ctl.controlplane.gateway.seam import SeamError, Told

DONE = b"data: [DONE]\n\n"
TEXT = "größer, 大きい, and so on"


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def decoded(events: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(one[6:]) for one in events if one != DONE]


def pieces(text: str, cuts: list[int]) -> list[str]:
    ends = [*sorted(cuts), len(text)]
    return [text[since:until] for since, until in zip([0, *ends], ends, strict=False)]


def chat(text: str, cuts: list[int], call: str) -> list[bytes]:
    """The role, the text in pieces (some empty), the reason, the usage, the end."""

    def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
        return event({"id": call, "created": len(call), "choices": [{"delta": delta, "finish_reason": reason}]})

    told = [chunk({"content": piece}) for piece in pieces(text, cuts)]
    usage = event({"id": call, "created": len(call), "choices": [], "usage": {"completion_tokens": len(text)}})
    return [chunk({"role": "assistant", "content": ""}), *told, chunk({}, "length"), usage, DONE]


def completion(text: str, cuts: list[int], call: str) -> list[bytes]:
    def chunk(piece: str, reason: str | None = None) -> bytes:
        return event({"id": call, "created": 1, "choices": [{"text": piece, "finish_reason": reason}]})

    return [*(chunk(piece) for piece in pieces(text, cuts)), chunk("", "length"), DONE]


def generate(text: str, cuts: list[int], call: str) -> list[bytes]:
    """Every event holds the whole answer so far."""
    bodies: list[dict[str, Any]] = []
    for until in [*sorted(cuts), len(text)]:
        ids = [ord(one) for one in text[:until]]
        bodies.append({"text": text[:until], "output_ids": ids, "meta_info": {"id": call, "finish_reason": None}})
    last = {**bodies[-1], "meta_info": {"id": call, "finish_reason": {"type": "length"}}}
    return [*map(event, bodies[:-1]), event(last), DONE]


ROUTES = {"/v1/chat/completions": chat, "/v1/completions": completion, "/generate": generate}
CUTS = st.lists(st.integers(0, len(TEXT)), max_size=8)


def seen(path: str, events: list[bytes]) -> str:
    """What a client makes of the whole stream."""
    bodies = decoded(events)
    if path == "/generate":
        return str(bodies[-1]["text"])
    choices = [body["choices"][0] for body in bodies if body["choices"]]
    return "".join(c.get("text", "") + c.get("delta", {}).get("content", "") for c in choices)


@given(path=st.sampled_from(sorted(ROUTES)), cuts=st.lists(CUTS, min_size=3, max_size=3), data=st.data())
def test_a_client_sees_no_seam(path: str, cuts: list[list[int]], data: st.DataObject) -> None:
    """Retracted twice, each time after any number of events."""
    told, client = Told(path), list[bytes]()
    for number, cut in enumerate(cuts):
        stream = ROUTES[path](TEXT, cut, f"call-{number}")
        if number < 2:
            stream = stream[: data.draw(st.integers(0, len(cut)))]
        seam = told.seam()
        for one in stream:
            rest = seam.rest(one)
            if rest is not None:
                told.add(rest)
                client.append(rest)
    assert seen(path, client) == TEXT
    assert client[-1] == DONE
    bodies = decoded(client)
    assert (
        len({body["meta_info"]["id"] if path == "/generate" else (body["id"], body["created"]) for body in bodies}) == 1
    )
    roles = [body for body in bodies if body.get("choices") and "role" in body["choices"][0].get("delta", {})]
    assert len(roles) == (path == "/v1/chat/completions")
    if path == "/generate":
        lengths = [len(body["output_ids"]) for body in bodies]
        assert lengths == sorted(lengths)


@pytest.mark.parametrize("path", sorted(ROUTES))
@pytest.mark.parametrize("other", ["größer, 小さい", "grö", "x"], ids=["other", "shorter", "other from the first"])
def test_another_answer_than_before_is_an_error(path: str, other: str) -> None:
    told = Told(path)
    for one in ROUTES[path](TEXT, [5, 12], "call")[:3]:
        told.add(one)
    with pytest.raises(SeamError, match=r"differently|earlier"):
        list(map(told.seam().rest, ROUTES[path](other, [1], "again")))


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_an_end_before_what_was_told_is_an_error(path: str) -> None:
    told = Told(path)
    for one in ROUTES[path](TEXT, [5, 12], "call")[:3]:
        told.add(one)
    with pytest.raises(SeamError, match="earlier"):
        told.seam().rest(DONE)


def test_comments_and_strange_events_pass() -> None:
    told = Told("/generate")
    told.add(generate(TEXT, [3], "call")[0])
    assert told.seam().rest(b": ping\n\n") == b": ping\n\n"
    assert told.seam().rest(b"data: none of ours\n\n") == b"data: none of ours\n\n"
