import pytest

from dsv4ctl.engine_adapters.reference import tokenizer


def test_text_survives_and_special_tokens_are_silent() -> None:
    ids = tokenizer.encode_prompt("a déjà vu")
    assert ids[0] == tokenizer.BOS
    assert tokenizer.decode(ids) == "a déjà vu"
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_a_grown_conversation_keeps_its_prefix() -> None:
    first = [("system", "s"), ("user", "hi")]
    short = tokenizer.encode_chat(first)
    long = tokenizer.encode_chat([*first, ("assistant", "yo"), ("user", "more")])
    assert long[: len(short)] == short


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="role 'admin' is unknown; known: system, user, assistant, tool"):
        tokenizer.encode_chat([("admin", "x")])
