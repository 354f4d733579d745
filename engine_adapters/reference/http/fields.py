"""Reads fields of a JSON body. Each function raises AnswerError (400) naming the field and what is expected."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsv4ctl.engine_adapters.reference.http.errors import invalid

Body = Mapping[str, Any]

_SHOWN = 80


def parse(raw: bytes) -> Body:
    """A body as the JSON object it must be."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, an absurd number; or nested too deep
        raise invalid(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise invalid(f"the body is {shown(body)}: a JSON object expected")
    return body


def shown(value: object) -> str:
    """A value for an error message, cut short."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def flag(body: Body, name: str) -> bool:
    """A boolean, false when absent or null."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise invalid(f"{name} is {shown(value)}: true or false expected", name)
    return value


def integer(body: Body, name: str, low: int, high: int | None = None) -> int | None:
    """An integer from `low` up to and including `high`, None when absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"from {low} to {high}" if high is not None else f"of at least {low}"
        batch = " (one request at a time: lists are not served)" if isinstance(value, list) else ""
        raise invalid(f"{name} is {shown(value)}: an integer {allowed} expected{batch}", name)
    return value


def string(body: Body, name: str, longest: int) -> str | None:
    """A text of 1 to `longest` characters, None when absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        batch = " (one request at a time: lists are not served)" if isinstance(value, list) else ""
        raise invalid(f"{name} is {shown(value)}: a text of 1 to {longest} characters expected{batch}", name)
    return value


def mapping(body: Body, name: str) -> Body:
    """A JSON object, empty when absent or null."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(f"{name} is {shown(value)}: a JSON object expected", name)
    return value


def ignored_numbers(body: Body, names: Iterable[str]) -> None:
    """Sampling numbers that change nothing, because decoding is greedy; they must still be numbers."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise invalid(f"{name} is {shown(value)}: a number expected", name)


def only_neutral(body: Body, neutral: Mapping[str, Sequence[object]]) -> None:
    """Refuses parameters that would change the answer and are not served, unless set to change nothing."""
    for name, values in neutral.items():
        value = body.get(name)
        if value is not None and value not in values:
            allowed = " or ".join(shown(one) for one in values)
            hint = f"only {allowed} is accepted" if values else "leave it out"
            raise invalid(f"{name} {shown(value)} is not supported by the reference engine: {hint}", name)


def token_ids(value: list[Any], name: str, vocab: int) -> tuple[int, ...]:
    """One prompt as token ids, each below `vocab`."""
    if any(isinstance(one, (list, str)) for one in value):
        raise invalid(f"{name} is a batch: one prompt a request is served, as one list of token ids", name)
    for place, one in enumerate(value):
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < vocab:
            raise invalid(f"{name}[{place}] is {shown(one)}: a token id from 0 to {vocab - 1} expected", name)
    return tuple(value)


def unicode_text(value: str, name: str) -> str:
    """A text that can be written as UTF-8: JSON can escape half a surrogate pair, which cannot."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid(f"{name} holds an unpaired surrogate at character {error.start}", name) from error
    return value
