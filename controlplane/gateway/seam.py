"""The stream of a room's next generation, laid over what its client already has: compared, and withheld.

Pure. Decoding is greedy, so the next generation repeats what the last one told; only where events are cut may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from dsv4ctl.controlplane.gateway.events import is_done

#: Of an OpenAI chunk, what must not change in mid-stream.
_CONSTANT = ("id", "created")


class SeamError(ValueError):
    """The next generation's answer is another one than the client's."""


class Seam(Protocol):
    def rest(self, event: bytes) -> bytes | None:
        """What of the next generation's event is new to the client, None if nothing. Raises SeamError."""


class Told:
    """The events that a client has, as few as the seam needs: of /generate, whose events hold all so far, the last."""

    def __init__(self, path: str) -> None:
        self._cumulative = path == "/generate"
        self._events: list[bytes] = []

    def add(self, event: bytes) -> None:
        if self._cumulative:
            self._events.clear()
        self._events.append(event)

    def seam(self) -> Seam:
        bodies = [body for event in self._events if (body := _body(event)) is not None]
        if not bodies:
            return _Beginning()
        return _Cumulative(bodies[-1]) if self._cumulative else _Deltas(bodies)


class _Beginning:
    """The client has nothing yet."""

    def rest(self, event: bytes) -> bytes | None:
        return event


class _Cumulative:
    """SGLang's /generate."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self._passed = False

    def rest(self, event: bytes) -> bytes | None:
        if is_done(event):
            return _end(event, self._passed)
        body = _body(event)
        if body is None:
            return event
        pairs: list[tuple[Any, Any]] = [
            (self._told[name], body.get(name)) for name in ("output_ids", "text") if name in self._told
        ]
        if not all(_agree(told, new) for told, new in pairs):
            raise SeamError("a retracted room's answer came out differently")
        meta = body.get("meta_info") or {}
        if all(len(new) <= len(told) for told, new in pairs) and meta.get("finish_reason") is None:
            return None
        if any(len(new) < len(told) for told, new in pairs):
            raise SeamError("a retracted room's answer ended earlier than before")
        self._passed = True
        told_id = (self._told.get("meta_info") or {}).get("id")
        return event if told_id is None else _encode({**body, "meta_info": {**meta, "id": told_id}})


class _Deltas:
    """OpenAI's two routes: each chunk holds what is new."""

    def __init__(self, told: Sequence[dict[str, Any]]) -> None:
        self._constant = {name: told[0][name] for name in _CONSTANT if name in told[0]}
        self._text = "".join(_text(body) for body in told)
        self._seen = 0

    def rest(self, event: bytes) -> bytes | None:
        if is_done(event):
            return _end(event, self._seen >= len(self._text))
        body = _body(event)
        if body is None:
            return event
        text = _text(body)
        known = self._text[self._seen : self._seen + len(text)]
        if not text.startswith(known):
            raise SeamError(f"character {self._seen} and on of a retracted room's answer came out differently")
        self._seen += len(text)
        choices = body.get("choices") or []
        finished = any(choice.get("finish_reason") is not None for choice in choices)
        if finished and self._seen < len(self._text):
            raise SeamError("a retracted room's answer ended earlier than before")
        if choices and not finished and len(text) == len(known):
            return None
        return _encode({**_cut(body, len(known)), **self._constant})


def _body(event: bytes) -> dict[str, Any] | None:
    """The event's JSON object, or None for a comment or the end."""
    if not event.startswith(b"data:") or is_done(event):
        return None
    try:
        body = msgspec.json.decode(event[5:].strip())
    except msgspec.DecodeError:
        return None
    return body if isinstance(body, dict) else None


def _encode(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _agree(told: Any, new: Any) -> bool:
    """One is the beginning of the other."""
    if type(told) is not type(new):
        return False
    shorter = min(len(told), len(new))
    return bool(told[:shorter] == new[:shorter])


def _text(body: dict[str, Any]) -> str:
    choices = body.get("choices") or [{}]
    told = choices[0].get("delta", choices[0])
    return str(told.get("content") or told.get("text") or "")


def _cut(body: dict[str, Any], known: int) -> dict[str, Any]:
    """The chunk without the first `known` characters of its text."""
    if not known:
        return body
    (choice,) = body["choices"]
    if "delta" in choice:
        delta = {**choice["delta"], "content": choice["delta"]["content"][known:]}
        return {**body, "choices": [{**choice, "delta": delta}]}
    return {**body, "choices": [{**choice, "text": choice["text"][known:]}]}


def _end(event: bytes, whole: bool) -> bytes:
    if not whole:
        raise SeamError("a retracted room's answer ended earlier than before")
    return event
