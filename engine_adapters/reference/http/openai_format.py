"""OpenAI's dialect: /v1/chat/completions, /v1/completions and /v1/models.

Chat template (`tokenizer.encode_chat`): BOS, then for each message its role's token and its UTF-8
bytes, then the assistant's token.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from dsv4ctl.engine_adapters.reference.http import ask
from dsv4ctl.engine_adapters.reference.http.answer import Answer, Step
from dsv4ctl.engine_adapters.reference.http.ask import Ask, Role
from dsv4ctl.engine_adapters.reference.http.errors import AnswerError, invalid
from dsv4ctl.engine_adapters.reference.http.fields import (
    Body,
    flag,
    ignored_numbers,
    integer,
    mapping,
    only_neutral,
    shown,
    token_ids,
    unicode_text,
)
from dsv4ctl.engine_adapters.reference.tokenizer import encode_chat, encode_prompt

#: SGLang's defaults: OpenAI's for completions, its sampling default for chat.
DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_CHAT_TOKENS = 128

_IGNORED = ("temperature", "top_p", "top_k", "min_p", "seed")
#: Would change the answer's shape or content; a list says which values change nothing.
_NOT_SERVED: dict[str, list[object]] = {
    "n": [1],
    "best_of": [1],
    "stop": [[], ""],
    "stop_token_ids": [[]],
    "min_tokens": [0],
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "repetition_penalty": [1],
    "logit_bias": [{}],
    "top_logprobs": [0],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "response_format": [{"type": "text"}],
    "regex": [],
    "ebnf": [],
    "json_schema": [],
    "modalities": [["text"]],
    "audio": [],
    "echo": [False],
    "suffix": [""],
}


def parse_chat(body: Body, role: Role, model: str) -> Ask:
    """Raises AnswerError: 400, or 404 for a model that is not served."""
    only_neutral(body, {"logprobs": [False]})
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    limit = integer(body, name, 1) or DEFAULT_CHAT_TOKENS
    return _ask(body, role, model, limit, _chat_prompt(body))


def parse_completion(body: Body, role: Role, model: str, vocab: int) -> Ask:
    """Raises AnswerError: 400, or 404 for a model that is not served."""
    only_neutral(body, {"logprobs": []})
    limit = integer(body, "max_tokens", 1) or DEFAULT_COMPLETION_TOKENS
    return _ask(body, role, model, limit, _completion_prompt(body, vocab))


def _ask(body: Body, role: Role, model: str, limit: int, input_ids: tuple[int, ...]) -> Ask:
    asked = body.get("model")
    if not isinstance(asked, str):
        raise invalid(f"model is {shown(asked)}: {model!r} expected", "model")
    if asked != model:
        raise AnswerError(
            HTTPStatus.NOT_FOUND,
            f"model {shown(asked)} is not served here; served: {model!r}",
            param="model",
            code="model_not_found",
        )
    only_neutral(body, _NOT_SERVED)
    ignored_numbers(body, _IGNORED)
    stream, options = flag(body, "stream"), mapping(body, "stream_options")
    if options and not stream:
        raise invalid("stream_options is only allowed with stream: true", "stream_options")
    return Ask(
        input_ids=input_ids,
        max_new_tokens=limit,
        ignore_eos=flag(body, "ignore_eos"),
        stream=stream,
        rid=ask.rid(body),
        bootstrap=ask.bootstrap(body, role),
        include_usage=flag(options, "include_usage"),
    )


def _completion_prompt(body: Body, vocab: int) -> tuple[int, ...]:
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return token_ids(prompt, "prompt", vocab)
    if not isinstance(prompt, str):
        raise invalid(f"prompt is {shown(prompt)}: a text or a list of token ids expected", "prompt")
    return tuple(encode_prompt(unicode_text(prompt, "prompt")))


def _chat_prompt(body: Body) -> tuple[int, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid(f"messages is {shown(messages)}: a list of at least one message expected", "messages")
    pairs = [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    try:
        return tuple(encode_chat(pairs))
    except ValueError as error:
        raise invalid(f"messages: {error}", "messages") from error


def _message(message: object, name: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise invalid(f"{name} is {shown(message)}: an object with role and content expected", name)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise invalid(f"{name}.role is {shown(role)}: a text expected", f"{name}.role")
    for unserved in ("tool_calls", "function_call", "audio"):
        if message.get(unserved):
            raise invalid(f"{name}.{unserved} is not supported: text only", f"{name}.{unserved}")
    return role, unicode_text(_content(content, f"{name}.content"), f"{name}.content")


def _content(content: object, name: str) -> str:
    """A message's text: given whole, or as text parts, which are joined with nothing between them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{name} is {shown(content)}: a text or a list of text parts expected", name)
    texts: list[str] = []
    for place, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise invalid(
                f'{name}[{place}] is {shown(part)}: {{"type": "text", "text": "..."}} expected',
                f"{name}[{place}]",
            )
        texts.append(text)
    return "".join(texts)


@dataclass(frozen=True, slots=True)
class OpenAIReply:
    """Whole answers and chunks of one request; the two routes differ in how a choice is told."""

    request_id: str
    model: str
    created: int  #: Unix seconds
    chat: bool
    include_usage: bool

    def whole(self, answer: Answer) -> dict[str, Any]:
        told = {"message": {"role": "assistant", "content": answer.text}} if self.chat else {"text": answer.text}
        choice = self._choice(told, answer)
        kind = "chat.completion" if self.chat else "text_completion"
        return self._frame(kind, [choice]) | {"usage": _usage(answer)}

    def chunks(self, answer: Answer, step: Step) -> list[dict[str, Any]]:
        """None while a character is incomplete; the last step adds the finish reason and the usage."""
        told: list[dict[str, Any]] = []
        if step.first and self.chat:
            told.append(self._chunk({"delta": {"role": "assistant", "content": ""}}, None))
        if step.text:
            told.append(self._chunk(self._delta(step.text), None))
        if step.last:
            told.append(self._chunk({"delta": {}} if self.chat else {"text": ""}, answer))
            if self.include_usage:
                told.append(self._frame(self._chunk_kind, []) | {"usage": _usage(answer)})
        return told

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self.chat else {"text": text}

    def _chunk(self, told: dict[str, Any], ended: Answer | None) -> dict[str, Any]:
        frame = self._frame(self._chunk_kind, [self._choice(told, ended)])
        return frame | {"usage": None} if self.include_usage else frame

    def _choice(self, told: dict[str, Any], ended: Answer | None) -> dict[str, Any]:
        reason = ended.finished.reason if ended is not None and ended.finished is not None else None
        return {"index": 0, **told, "logprobs": None, "finish_reason": reason}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def _usage(answer: Answer) -> dict[str, Any]:
    cached = answer.finished.cached_tokens if answer.finished is not None else 0
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.ids),
        "total_tokens": answer.prompt_tokens + len(answer.ids),
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def models(model: str, created: int) -> dict[str, Any]:
    """The body of /v1/models: the one model there is."""
    entry = {"id": model, "object": "model", "created": created, "owned_by": "dsv4ctl"}
    return {"object": "list", "data": [entry]}
