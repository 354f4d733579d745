"""SGLang's native dialect: POST /generate (shapes as of SGLang 0.5.15, entrypoints/http_server.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from dsv4ctl.engine_adapters.reference.http import ask
from dsv4ctl.engine_adapters.reference.http.answer import Answer, Step
from dsv4ctl.engine_adapters.reference.http.ask import Ask, Role
from dsv4ctl.engine_adapters.reference.http.errors import invalid
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
from dsv4ctl.engine_adapters.reference.requests import Finished
from dsv4ctl.engine_adapters.reference.tokenizer import EOS, encode_prompt

DEFAULT_NEW_TOKENS = 128

#: Would change the answer's shape or content; a list says which values change nothing.
_NOT_SERVED: dict[str, list[object]] = {
    "return_logprob": [False],
    "return_hidden_states": [False],
    "input_embeds": [],
    "image_data": [],
    "audio_data": [],
    "video_data": [],
    "lora_path": [],
    "session_params": [],
    "custom_logit_processor": [],
}
_SAMPLING_SERVED = ("max_new_tokens", "temperature", "ignore_eos")
_SAMPLING_IGNORED = ("temperature", "top_p", "top_k", "min_p", "sampling_seed")
_SAMPLING_NOT_SERVED: dict[str, list[object]] = {
    "n": [1],
    "stop": [[], ""],
    "stop_token_ids": [[]],
    "stop_regex": [[], ""],
    "min_new_tokens": [0],
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "repetition_penalty": [1],
    "logit_bias": [{}],
    "regex": [],
    "json_schema": [],
    "ebnf": [],
    "structural_tag": [],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True],
    "no_stop_trim": [False],
    "custom_params": [],
}
_SAMPLING_KNOWN = (*_SAMPLING_SERVED, *_SAMPLING_IGNORED, *_SAMPLING_NOT_SERVED)


def parse(body: Body, role: Role, vocab: int) -> Ask:
    """Decoding is greedy: temperature, top_p and their kin are checked to be numbers and change nothing.

    Raises AnswerError (400).
    """
    only_neutral(body, _NOT_SERVED)
    sampling = mapping(body, "sampling_params")
    for name in sampling:
        if name not in _SAMPLING_KNOWN:
            near = get_close_matches(name, _SAMPLING_KNOWN, 1)
            hint = f"did you mean {near[0]}?" if near else f"served: {', '.join(_SAMPLING_SERVED)}"
            raise invalid(f"sampling_params.{name} is unknown; {hint}", name)
    only_neutral(sampling, _SAMPLING_NOT_SERVED)
    ignored_numbers(sampling, _SAMPLING_IGNORED)
    return Ask(
        input_ids=_input_ids(body, vocab),
        max_new_tokens=integer(sampling, "max_new_tokens", 1) or DEFAULT_NEW_TOKENS,
        ignore_eos=flag(sampling, "ignore_eos"),
        stream=flag(body, "stream"),
        rid=ask.rid(body),
        bootstrap=ask.bootstrap(body, role),
    )


def _input_ids(body: Body, vocab: int) -> tuple[int, ...]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise invalid("exactly one of text and input_ids is expected", "text")
    if text is None:
        if not isinstance(ids, list):
            raise invalid(f"input_ids is {shown(ids)}: a list of token ids expected", "input_ids")
        return token_ids(ids, "input_ids", vocab)
    if not isinstance(text, str):
        batch = "one prompt a request is served, as one text" if isinstance(text, list) else "a text expected"
        raise invalid(f"text is {shown(text)}: {batch}", "text")
    return tuple(encode_prompt(unicode_text(text, "text")))


@dataclass(frozen=True, slots=True)
class GenerateReply:
    """Whole answers and chunks of /generate. Every chunk carries the text and tokens so far."""

    request_id: str
    elapsed: Callable[[], float]  #: seconds since the request came

    def whole(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text, "output_ids": list(answer.ids), "meta_info": self._meta(answer)}

    def chunks(self, answer: Answer, step: Step) -> list[dict[str, Any]]:
        return [self.whole(answer)]

    def _meta(self, answer: Answer) -> dict[str, Any]:
        """`cached_tokens` and `e2e_latency` are known, and told, at the end."""
        meta: dict[str, Any] = {
            "id": self.request_id,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": len(answer.ids),
            "finish_reason": None,
        }
        if answer.finished is not None:
            meta["finish_reason"] = _finish_reason(answer.finished, len(answer.ids))
            meta["cached_tokens"] = answer.finished.cached_tokens
            meta["e2e_latency"] = self.elapsed()
        return meta


def _finish_reason(finished: Finished, completion_tokens: int) -> dict[str, Any]:
    if finished.reason == "stop":
        return {"type": "stop", "matched": EOS}
    return {"type": "length", "length": completion_tokens}
