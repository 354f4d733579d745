"""Bodies and event streams, taken apart without a server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from dsv4ctl.controlplane.gateway.errors import RequestError, message_in, of_abort
from dsv4ctl.controlplane.gateway.events import MAX_EVENT_BYTES, EventCutter, EventError, error_in, is_done
from dsv4ctl.controlplane.gateway.parsing import Parsed, parse
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey
from dsv4ctl.controlplane.scheduler.live import RoomAbortedError


def _parse(path: str, body: Any, headers: dict[str, str] | None = None) -> Parsed:
    return parse(path, msgspec.json.encode(body), headers or {}, "m", "new")


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/generate", {"text": "abc"}, 3),
        ("/generate", {"text": "é"}, 2),
        ("/generate", {"input_ids": [1, 2, 3, 4]}, 4),
        ("/generate", {"input_ids": [[1, 2]]}, 2),
        ("/generate", {"input_ids": [7]}, 1),
        ("/generate", {"input_ids": []}, 0),
        ("/generate", {"input_ids": None, "text": "abc"}, 3),
        ("/v1/completions", {"model": "m", "prompt": ["abc"]}, 3),
        ("/v1/completions", {"model": "m", "prompt": [1, 2, 3]}, 3),
    ],
)
def test_a_prompts_length_is_estimated_by_its_kind(path: str, body: dict[str, Any], tokens: int) -> None:
    assert _parse(path, body).tokens == tokens


def test_the_body_is_kept_as_it_came() -> None:
    body = {"model": "m", "prompt": "x", "stream": True, "unknown": {"to": ["us"]}}
    parsed = _parse("/v1/completions", body)
    assert msgspec.json.decode(parsed.with_fields({"bootstrap_room": 7})) == {**body, "bootstrap_room": 7}
    assert parsed.stream


def test_the_engines_get_the_clients_own_words() -> None:
    raw = b' {"input_ids": [1,\t-2 , 3],  "n": 1.50, "n": 0.10E1}\r\n'
    parsed = parse("/generate", raw, {}, "m", "new")
    assert parsed.tokens == 3
    assert parsed.with_fields({"a": 1}) == b' {"input_ids": [1,\t-2 , 3],  "n": 1.50, "n": 0.10E1,"a":1}'


def test_the_request_id_comes_from_the_header_then_the_body_then_us() -> None:
    assert _parse("/generate", {"text": "x", "rid": "b"}, {"x-request-id": "h"}).request_id == "h"
    assert _parse("/generate", {"text": "x", "rid": "b"}).request_id == "b"
    assert _parse("/generate", {"text": "x"}).request_id == "new"
    with pytest.raises(RequestError, match="printable ASCII"):
        _parse("/generate", {"text": "x", "rid": "line\nbreak"})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize(
    ("limit", "found"), [(-1, "-1"), (0, "0"), (1.5, "number"), (True, "boolean"), ("8", "string")]
)
def test_a_limit_that_no_answer_can_have_is_refused(path: str, name: str, limit: Any, found: str) -> None:
    body = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    for good in (1, None):
        assert _parse(path, {**body, name: good}).tokens
    with pytest.raises(RequestError, match=f"^{name} is an integer of at least 1, found {found}$") as refused:
        _parse(path, {**body, name: limit})
    assert (refused.value.status, refused.value.param) == (400, name)


@pytest.mark.parametrize(
    ("limit", "found"), [(-1, "-1"), (1.0, "number"), (True, "boolean"), ("8", "string"), ([8], "array")]
)
def test_what_no_engine_takes_as_max_new_tokens_is_refused(limit: Any, found: str) -> None:
    """How many are too many, and whether 0 is too few, is the engine's to say: SGLang takes 0, the embedded one not."""
    for good in (0, 1, 2**70, None):
        body = {"text": "x", "sampling_params": {"max_new_tokens": good}}
        assert _parse("/generate", body).tokens
    with pytest.raises(RequestError, match=f"^max_new_tokens is an integer of at least 0, found {found}$") as refused:
        _parse("/generate", {"text": "x", "sampling_params": {"max_new_tokens": limit}})
    assert (refused.value.status, refused.value.param) == (400, "max_new_tokens")


def test_sampling_params_of_several_requests_are_refused() -> None:
    one = {"max_new_tokens": 1}
    for good in (None, one, [one]):
        assert _parse("/generate", {"text": ["x"], "sampling_params": good}).tokens == 1
    with pytest.raises(RequestError, match=r"^sampling_params is an object, found array$"):
        _parse("/generate", {"text": "x", "sampling_params": [one, one]})
    with pytest.raises(RequestError, match=r"^max_new_tokens is"):
        _parse("/generate", {"text": ["x"], "sampling_params": [{"max_new_tokens": -1}]})


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"model": None, "prompt": "x"}])
def test_a_missing_model_is_named_with_the_one_served(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^model is missing; served is 'm'$") as refused:
        _parse("/v1/completions", body)
    assert (refused.value.status, refused.value.param) == (400, "model")


@pytest.mark.parametrize("raw", [b"", b"[1]", b"null", b"\xff", b'{"a": 1} trailing', b'{"text": ' + b"[" * 100_000])
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        parse("/generate", raw, {}, "m", "new")
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("prompt", [None, 7, True, [True, False], {"a": 1}, [1.5], [1, 2.5], [1, [2]], [[1, 2], [3]]])
def test_a_prompt_of_no_kind_is_refused(prompt: Any) -> None:
    for path, name in (("/generate", "text"), ("/v1/completions", "prompt")):
        with pytest.raises(RequestError) as refused:
            _parse(path, {"model": "m", name: prompt})
        assert refused.value.param == name


_LINE = some.binary(min_size=1).filter(lambda line: not {10, 13} & set(line))


@given(some.lists(some.tuples(some.lists(_LINE, min_size=1), some.sampled_from([b"\n", b"\r\n"]))), some.data())
def test_events_come_out_whole_however_they_arrive(
    sent: list[tuple[list[bytes], bytes]], data: some.DataObject
) -> None:
    """Of one line or several, by either way to end a line."""
    events = [b"".join(b"data: " + line + end for line in lines) + end for lines, end in sent]
    raw = b"".join(events) + b"data: half\n"
    cutter, found, at = EventCutter(), [], 0
    while at < len(raw):
        step = data.draw(some.integers(1, len(raw)))
        found += cutter.feed(raw[at : at + step])
        at += step
    assert found == events


def test_a_line_end_too_many_is_no_event() -> None:
    assert EventCutter().feed(b"data: a\n\n\ndata: b\n\n") == [b"data: a\n\n", b"\ndata: b\n\n"]


def test_an_event_without_end_is_given_up() -> None:
    with pytest.raises(EventError):
        EventCutter().feed(b"x" * (MAX_EVENT_BYTES + 1))


def test_done_and_errors_are_told_from_text_about_them() -> None:
    assert is_done(b"data: [DONE]\n\n")
    assert not is_done(b'data: {"text": "[DONE]"}\n\n')
    assert error_in(b'data: {"error": {"message": "x"}}\n\n') == b'{"error": {"message": "x"}}'
    assert error_in(b'data: {"text": "\\"error\\""}\n\n') is None
    assert error_in(b'data: {"error": null, "text": ""}\n\n') is None


@pytest.mark.parametrize(
    "raw", [b'{"error": {"message": "m"}}', b'{"error": "m"}', b'{"message": "m"}', b'{"detail": "m"}', b"m\n"]
)
def test_an_engines_message_is_found_in_any_shape(raw: bytes) -> None:
    assert message_in(raw) == "m"


@pytest.mark.parametrize("source", AbortSource)
def test_an_answer_says_whether_its_request_may_be_made_again(source: AbortSource) -> None:
    headers = of_abort(RoomAbortedError(RoomKey(7, 1), source, "why")).headers
    wanted = source in (AbortSource.ADMIN, AbortSource.DRAIN, AbortSource.DEADLINE)
    assert headers.get("x-should-retry") == ("false" if wanted else None)
