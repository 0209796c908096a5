"""Clients' texts spell special tokens none becomes one, and other texts' tokens stay as they are."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.requests.prompt import PromptRefused, PromptRenderer
from tests.models.tokenizers import KINDS, SPECIAL

FRAGMENTS = [
    *SPECIAL,
    "<",
    "<s",
    "<|",
    "|>",
    "s>",
    "user",
    "<|us",
    "er|>",
    ">",
    "/",
    " ",
    "\n",
    "a",
    "ü",
    "the end",
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)
names = st.sampled_from(["kim", "user", "s", "us"])
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": texts, "name": names}),
    min_size=1,
    max_size=4,
)
TEMPLATES = {
    "plain": "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}<s>assistant\n",
    "trims": "{% for m in messages %}<s>{{ m.role }}\n{{ m.content | trim }}</s>{% endfor %}",
    "names in markup": "{% for m in messages %}<|{{ m.name }}|>{{ m.content }}</s>{% endfor %}",
    "side by side": "{% for m in messages %}{{ m.content }}{{ m.name }}{% endfor %}</s>",
    "rewrites": "{% for m in messages %}<s>{{ m.content | replace('a', '') | lower }}</s>{% endfor %}",
    "twice": "{% for m in messages %}<s>{{ m.content }}</s>{{ m.content }}{% endfor %}",
    "looks": "{% for m in messages %}{{ '<s>' if '<s>' in m.content }}{{ m.content }}</s>{% endfor %}",
}


@cache
def tokenizer(kind: str) -> Tokenizer:
    return KINDS[kind]()


@cache
def renderers(kind: str, template: str) -> tuple[PromptRenderer, PromptRenderer]:
    """As by default, and as it is where special tokens are allowed."""
    with TemporaryDirectory() as directory:
        path = Path(directory)
        tokenizer(kind).save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATES[template]}))
        return PromptRenderer(path), PromptRenderer(path, "allow")


def specials(kind: str, ids: list[int]) -> list[int]:
    special = {tokenizer(kind).token_to_id(text) for text in SPECIAL}
    return [token_id for token_id in ids if token_id in special]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(conversation=messages)
def test_only_the_template_writes_special_tokens(
    kind: str, template: str, conversation: list[dict[str, Any]]
) -> None:
    safe, plain = renderers(kind, template)
    whole = plain.chat_tokens(conversation)
    harmless = plain.chat_tokens([{**each, "content": "x", "name": "x"} for each in conversation])
    is_spelled = any(token in each["content"] for each in conversation for token in SPECIAL)
    try:
        ids = safe.chat_tokens(conversation)
    except PromptRefused:
        # Not without need: something is spelled, or would be.
        assert is_spelled or specials(kind, whole) != specials(kind, harmless)
        return
    assert specials(kind, ids) == specials(kind, harmless)
    if not is_spelled and specials(kind, whole) == specials(kind, harmless):
        assert ids == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(prompt=texts)
def test_a_plain_prompt_has_no_special_token(kind: str, prompt: str) -> None:
    safe, plain = renderers(kind, "plain")
    ids = safe.text_tokens(prompt)
    assert specials(kind, ids) == []
    if not any(token in prompt for token in SPECIAL):
        assert ids == plain.text_tokens(prompt)


@settings(max_examples=60, deadline=None)
@given(conversation=messages)
def test_the_text_that_was_written_is_the_text_that_is_read(conversation: list[dict[str, Any]]) -> None:
    safe, _ = renderers("byte-level", "plain")
    read = tokenizer("byte-level").decode(safe.chat_tokens(conversation), skip_special_tokens=False)
    assert read == safe.render(conversation)
