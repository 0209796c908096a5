"""Tests of the shipped model: its files, its page, and how it follows instructions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from gateway.requests.chat_template import ChatTemplate
from ops.demo.prompts.instructions import FAMILIES, TEMPLATE_TOKENS
from ops.demo.training.evaluate import WANTED_PERCENT, answer_greedily, load
from ops.demo.training.streams import held_out_instructions
from ops.demo.training.train import CPU_MINUTES_ALLOWED, build_tokenizer

MODEL = Path(__file__).parents[4] / "ops" / "demo" / "model"
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": 'Spell "cat".'},
]


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MODEL / "config.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def render(messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
    """The conversation as a gateway without transformers renders it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((MODEL / "chat_template.jinja").read_text())
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt)


def test_it_is_small_and_within_the_size_it_promises() -> None:
    with safetensors.safe_open(MODEL / "model.safetensors", framework="pt") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
    assert 2_000_000 <= sum(torch.Size(shape).numel() for shape in shapes) <= 2_500_000
    assert sum(file.stat().st_size for file in MODEL.rglob("*") if file.is_file()) <= 10_000_000


def test_its_config_is_a_llama_with_grouped_queries_and_a_long_context(config: dict[str, Any]) -> None:
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 1024
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["tie_word_embeddings"] is True


def test_padding_begin_and_end_are_special_tokens_of_their_own(
    config: dict[str, Any], tokenizer: Tokenizer
) -> None:
    ids = [config["pad_token_id"], config["bos_token_id"], config["eos_token_id"]]
    assert len(set(ids)) == 3
    added = tokenizer.get_added_tokens_decoder()
    assert all(added[token_id].special for token_id in ids)
    assert added[config["eos_token_id"]].content == "<|im_end|>"
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert [generation[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")] == ids
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    # No text of a prompt turns into padding.
    assert config["pad_token_id"] not in tokenizer.encode(render(CONVERSATION), add_special_tokens=False).ids


def test_its_training_stayed_within_the_budget() -> None:
    record = json.loads((MODEL / "training_record.json").read_text())
    assert record["cpu_minutes"] <= CPU_MINUTES_ALLOWED


@pytest.mark.long
def test_its_tokenizer_comes_out_the_same_again() -> None:
    again = build_tokenizer(seed=20).backend_tokenizer
    assert again.get_vocab() == Tokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab()


def test_the_template_renders_in_the_sandbox() -> None:
    assert render(CONVERSATION) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        '<|im_start|>user\nSpell "cat".<|im_end|>\n'
        "<|im_start|>assistant\n"
    )
    assert not render(CONVERSATION, add_generation_prompt=False).endswith("assistant\n")


def test_the_template_shows_tools_and_calls_as_training_did() -> None:
    left_right = {"type": "object", "properties": {"left": {"type": "integer"}, "right": {"type": "integer"}}}
    any_of = {"properties": {"when": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": left_right}},
        {"type": "function", "function": {"name": "wait", "parameters": any_of}},
        {"type": "function", "function": {"name": "stop"}},
    ]
    calls = [
        {"function": {"name": "add", "arguments": {"left": 3, "right": "é<"}}},
        {"function": {"name": "stop", "arguments": {}}},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "7"},
    ]
    wanted = (
        "<|im_start|>system\nTools: add(left: integer, right: integer); wait(when: any); stop()<|im_end|>\n"
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name":"add","arguments":{"left":3,"right":"é<"}}</tool_call>\n'
        '<tool_call>{"name":"stop","arguments":{}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    rendered = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert rendered == wanted
    template = ChatTemplate.of_model(MODEL)
    assert template is not None
    assert not template.rewrites
    # The gateway's own environment, and the list that a request without tools gives.
    assert template.render(messages) == wanted.partition("<|im_end|>\n")[2]


def test_template_tokens_are_single_ids(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(render(CONVERSATION), add_special_tokens=False).tokens
    assert tokens.count("<|im_start|>") == 5
    assert tokens.count("<|im_end|>") == 4
    bare = tokenizer.encode("hello", add_special_tokens=False).ids
    message = [{"role": "user", "content": "hello"}]
    rendered = tokenizer.encode(render(message), add_special_tokens=False).ids
    assert len(rendered) - len(bare) == TEMPLATE_TOKENS


@pytest.mark.parametrize(
    "text",
    [
        "Count from 3 to 12, please.",
        '  two  spaces\tand a tab\r\n\n"quotes" , and , commas',
        "Zürich, naïve café, Ελλάδα, Привет, 東京, עברית, हिन्दी",
        "👩‍👩‍👧‍👦 \U0001f600 e\u0301 \u00a0 \u200b",
        "2+2=4; 10 % of 50 €",
    ],
)
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode([*ids, tokenizer.token_to_id("<|im_end|>")], skip_special_tokens=True) == text


def test_digits_and_spelled_letters_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("123", add_special_tokens=False).tokens == ["1", "2", "3"]
    assert tokenizer.encode('"house"', add_special_tokens=False).tokens == ['"', *"house", '"']


def test_it_answers_held_out_prompts_and_ends_by_itself() -> None:
    model, loaded_tokenizer = load(MODEL)
    # The first ones that are short enough for a test; `python -m ops.demo.training.evaluate` measures them
    # all.
    prompts = [
        prompt
        for family in FAMILIES
        for prompt in [row for row in held_out_instructions(family, 30, 5) if row.characters < 200][:5]
    ]
    replies = answer_greedily(model, loaded_tokenizer, prompts)
    right = [reply.text == prompt.answer for prompt, reply in zip(prompts, replies, strict=True)]
    assert all(reply.ended for reply in replies)
    # A family is allowed 5 % wrong answers, so this small sample is allowed two; JSON and calls more.
    strict = [
        is_right for is_right, row in zip(right, prompts, strict=True) if WANTED_PERCENT[row.family] >= 95
    ]
    assert sum(strict) >= len(strict) - 2
    assert sum(right) - sum(strict) >= (len(right) - len(strict)) // 2
