"""A request's body and headers as the gateway understands them: pure, and only what it needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from dsv4ctl.controlplane.gateway.errors import RequestError

#: Fields that only the gateway may set.
_RESERVED = "bootstrap_"
#: OpenAI's two names for how many tokens an answer has at most.
_LIMITS = ("max_tokens", "max_completion_tokens")
#: Where lists of token ids may stand, and what these consist of beside their brackets.
_IDS = ("input_ids", "prompt")
_OF_IDS = b"0123456789-, \t\r\n"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Parsed(NamedTuple):
    raw: bytes  #: the body, an object with a field at least
    stream: bool
    tokens: int  #: an estimate of the prompt's length
    request_id: str
    session: str | None

    def with_fields(self, fields: Mapping[str, Any]) -> bytes:
        """The body in the client's words, and `fields`, none of which it has, at its end."""
        return self.raw.rstrip()[:-1] + b"," + msgspec.json.encode(fields)[1:]


def parse(path: str, raw: bytes, headers: Mapping[str, str], model: str, new_id: str) -> Parsed:
    """The request, or RequestError (400) naming the field that is wrong.

    `model` is the only one served; `new_id` is the request's id if the client gave none.
    """
    try:
        body, ids = _decoded(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, "invalid_json", f"the body is no JSON object: {error}") from error
    for name in body:
        if name.startswith(_RESERVED):
            raise RequestError(400, "reserved_field", f"{name} is set by the gateway alone", param=name)
    if path == "/generate":
        _check_sglang(body)
    else:
        _check_openai(body, model)
    stream = body.get("stream", False)
    if not isinstance(stream, bool | None):
        raise RequestError(400, "invalid_type", "stream is true or false", param="stream")
    return Parsed(
        raw=raw,
        stream=bool(stream),
        tokens=_tokens(path, body, ids),
        request_id=_request_id(body, headers, new_id),
        session=headers.get("x-session-id"),
    )


def _decoded(raw: bytes) -> tuple[dict[str, Any], dict[str, int]]:
    """The body's fields; of lists of token ids, which may be long and are the engines' to read, only their lengths."""
    fields = _fields.decode(raw)
    ids = {name: length for name in _IDS if name in fields and (length := _length(bytes(fields[name])))}
    return {name: msgspec.json.decode(field) for name, field in fields.items() if name not in ids}, ids


def _length(field: bytes) -> int:
    """Of a flat list of integers, two at least; 0 of any other JSON value."""
    return field.count(b",") + 1 if b"," in field and field.translate(None, _OF_IDS) == b"[]" else 0


def _check_openai(body: dict[str, Any], model: str) -> None:
    """What an engine could only refuse after a room was opened for it."""
    asked = body.get("model")
    if asked is None:
        raise RequestError(400, "invalid_type", f"model is missing; served is {model!r}", param="model")
    if asked != model:
        raise RequestError(400, "model_not_found", f"no model {asked!r}; served is {model!r}", param="model")
    for name in _LIMITS:
        _check_limit(body, name, 1)


def _check_sglang(body: dict[str, Any]) -> None:
    """What no engine takes; 0 new tokens SGLang does, and answers with no text."""
    sampling = body.get("sampling_params")
    if isinstance(sampling, list) and len(sampling) == 1:  # as a list of one prompt is one
        (sampling,) = sampling
    if not isinstance(sampling, dict | None):
        found = f"sampling_params is an object, found {_kind(sampling)}"
        raise RequestError(400, "invalid_type", found, param="sampling_params")
    _check_limit(sampling or {}, "max_new_tokens", 0)


def _check_limit(fields: dict[str, Any], name: str, low: int) -> None:
    limit = fields.get(name)
    if limit is not None and (type(limit) is not int or limit < low):
        found = limit if type(limit) is int else _kind(limit)
        raise RequestError(400, "invalid_value", f"{name} is an integer of at least {low}, found {found}", param=name)


def _tokens(path: str, body: dict[str, Any], ids: dict[str, int]) -> int:
    """Prompt tokens, at most: of text, its bytes (the engines count exactly, and refuse what is too long)."""
    if path == "/v1/chat/completions":
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RequestError(400, "invalid_type", "messages is a list with at least one", param="messages")
        return sum(len(msgspec.json.encode(message)) for message in messages)
    if path == "/v1/completions":
        name = "prompt"
    else:
        name = "input_ids" if "input_ids" in ids or body.get("input_ids") is not None else "text"
    return ids[name] if name in ids else _prompt_tokens(name, body.get(name))


def _prompt_tokens(name: str, prompt: Any) -> int:
    """One prompt: a string, a list of token ids, or a list of one of these."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return len(prompt.encode("utf-8", "surrogatepass"))
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return len(prompt)
    if isinstance(prompt, list):
        raise RequestError(400, "one_prompt", f"{name} holds {len(prompt)} prompts, one is expected", param=name)
    expected = "a list of token ids" if name == "input_ids" else "a string or a list of token ids"
    raise RequestError(400, "invalid_type", f"{name} is {expected}, found {_kind(prompt)}", param=name)


def _request_id(body: dict[str, Any], headers: Mapping[str, str], new_id: str) -> str:
    """The header's, or SGLang's `rid`, or a new one."""
    given = headers.get("x-request-id", body.get("rid"))
    if given is None:
        return new_id
    if not isinstance(given, str) or not _REQUEST_ID.fullmatch(given):
        raise RequestError(
            400, "invalid_request_id", "a request id is 1 to 128 printable ASCII characters", param="rid"
        )
    return given


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")
