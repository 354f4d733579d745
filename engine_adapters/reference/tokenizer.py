"""Byte-level tokenizer: 256 bytes, then special tokens. The model's text is gibberish (random weights)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BOS, EOS, SYSTEM, USER, ASSISTANT, TOOL = range(256, 262)
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
PRINTABLE = range(32, 127)


def encode(text: str) -> list[int]:
    """UTF-8 bytes of a text, with no special token."""
    return list(text.encode("utf-8"))


def encode_prompt(text: str) -> list[int]:
    """A completion prompt: BOS and the text."""
    return [BOS, *encode(text)]


def encode_chat(messages: Iterable[tuple[str, str]]) -> list[int]:
    """(role, content) pairs as a prompt that ends where the assistant is to speak.

    A conversation grown by a reply keeps its earlier tokens as a prefix.
    Raises ValueError for an unknown role.
    """
    ids = [BOS]
    for role, content in messages:
        if role not in ROLES:
            raise ValueError(f"role {role!r} is unknown; known: {', '.join(ROLES)}")
        ids += [ROLES[role], *encode(content)]
    return [*ids, ASSISTANT]


def decode(ids: Sequence[int]) -> str:
    """Text of the byte tokens; special tokens are left out, broken UTF-8 becomes U+FFFD."""
    return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")
