"""Prompts are rendered and tokenised exactly as by transformers, without transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.domain.ids import new_request_id, sequence_id
from gateway.requests.chat_template import ChatTemplate
from gateway.requests.fields.own_answer import template_tools
from gateway.requests.prompt import EstimatedRenderer, PromptRefused, PromptRenderer, TokenizerMissing
from tests.models.tokenizers import byte_level

CHATML = (
    "{%- if messages[0]['role'] == 'system' -%}\n"
    "    {{- bos_token + 'SYSTEM: ' + messages[0]['content'] + '\\n' -}}\n"
    "{%- endif -%}\n"
    "{% for message in messages %}\n"
    "    {%- if message.role == 'system' %}{% continue %}{% endif %}\n"
    "    {%- if message.role not in ['user', 'assistant'] -%}\n"
    "        {{ raise_exception('Only user and assistant roles are supported') }}\n"
    "    {%- endif -%}\n"
    "  {{ '<|user|>' if message.role == 'user' else '</s>' }}{{ message.content | trim }}\n"
    "{% endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|user|>assistant: ' }}{{ {'a': [1, 'ü']} | tojson }}{% endif %}"
)
EOS = {"__type": "AddedToken", "content": "</s>", "special": True}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Hello, wörld 👍🏽 \n"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Bye"},
]


def model_dir(path: Path, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    byte_level().save(str(path / "tokenizer.json"))
    values = {"bos_token": "<s>", "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(values | config))
    return path


@pytest.mark.parametrize("where", ["config", "named", "file"])
def test_a_conversation_becomes_the_tokens_that_transformers_makes_of_it(tmp_path: Path, where: str) -> None:
    from transformers import AutoTokenizer

    config: dict[str, Any] = {}
    if where == "config":
        config = {"chat_template": CHATML}
    elif where == "named":
        config = {
            "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
        }
    path = model_dir(tmp_path / "model", **config)
    if where == "file":
        (path / "chat_template.jinja").write_text(CHATML)
    reference = AutoTokenizer.from_pretrained(path)
    ours = PromptRenderer(path)
    assert ours.has_chat_template
    assert ours.render(CONVERSATION) == reference.apply_chat_template(
        CONVERSATION, add_generation_prompt=True, tokenize=False
    )
    expected = reference.apply_chat_template(CONVERSATION, add_generation_prompt=True)["input_ids"]
    assert ours.chat_tokens(CONVERSATION) == list(expected)
    closed = reference.apply_chat_template(CONVERSATION, add_generation_prompt=False)["input_ids"]
    assert ours.chat_tokens(CONVERSATION, is_opened=False) == list(closed) != list(expected)
    assert ours.text_of(closed) == reference.decode(closed)
    assert ours.token_texts(closed) == reference.convert_ids_to_tokens(closed)
    for has_frame in (True, False):
        ids = reference("Hello, wörld </s>", add_special_tokens=has_frame)["input_ids"]
        allowing = PromptRenderer(path, "allow")
        assert allowing.text_tokens("Hello, wörld </s>", has_frame=has_frame) == ids
    assert ours.text_tokens("Hello, wörld") == reference("Hello, wörld")["input_ids"]


def test_tools_and_effort_are_written_as_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = (
        "{% for t in tools or [] %}{{ t | tojson(indent=2) }} {{ t.function.parameters.properties | list }}"
        "{% endfor %}{{ reasoning_effort }}{{ messages[0].content }}"
    )
    path = model_dir(tmp_path / "model", chat_template=template)
    now = {"parameters": None, "strict": True, "description": "wörld", "name": "now"}
    add = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "x"}}}}
    tools = template_tools({"tools": [{"function": now}, {"function": add}]})
    reference = AutoTokenizer.from_pretrained(path)
    for said, effort in ((tools, "low"), ([], None)):
        named = {} if effort is None else {"reasoning_effort": effort}
        expected = reference.apply_chat_template(
            CONVERSATION, tools=said or None, add_generation_prompt=True, **named
        )["input_ids"]
        assert PromptRenderer(path).chat_tokens(CONVERSATION, tools=said, effort=effort) == list(expected)
    assert list(tools[0]["function"]) == ["name", "description", "parameters"]
    assert PromptRenderer(path).template_reads("tools")
    assert not PromptRenderer(path).template_reads("documents")


def test_whether_a_template_reads_tools() -> None:
    redefined = "{% if custom is defined %}{% set tools = custom %}{% endif %}{{ tools }}"
    assert ChatTemplate(redefined, {}).reads("tools")
    assert not ChatTemplate("{{ 'your tools' }}{# tools #}", {}).reads("tools")


def test_a_conversation_that_the_template_refuses_is_refused_in_its_words(tmp_path: Path) -> None:
    renderer = PromptRenderer(model_dir(tmp_path / "model", chat_template=CHATML))
    with pytest.raises(PromptRefused, match="Only user and assistant roles"):
        renderer.render([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append('x') }}", "{% for i in range(10000000000) %}x{% endfor %}",
        "{{ messages[0].nothing.nothing }}", "{{ 1 / 0 }}",
    ],
)  # fmt: skip
def test_a_template_is_held_in_a_sandbox_and_its_faults_are_refusals(tmp_path: Path, template: str) -> None:
    renderer = PromptRenderer(model_dir(tmp_path / "model", chat_template=template))
    with pytest.raises(PromptRefused):
        renderer.render(CONVERSATION)


def test_without_a_template_only_text_works(tmp_path: Path) -> None:
    renderer = PromptRenderer(model_dir(tmp_path / "model"))
    assert not renderer.has_chat_template
    assert renderer.text_tokens("abc")
    with pytest.raises(PromptRefused, match="/v1/completions"):
        renderer.chat_tokens(CONVERSATION)


def test_a_prompt_is_judged_by_its_bytes_before_it_is_tokenised_and_by_its_tokens_before_it_has_ids(
    tmp_path: Path,
) -> None:
    renderer = PromptRenderer(model_dir(tmp_path / "model", chat_template=CHATML))
    told: list[tuple[int, bool]] = []
    for make in (
        lambda: renderer.text_tokens("Hello, wörld " * 9, lambda *each: told.append(each)),
        lambda: renderer.chat_tokens(CONVERSATION, lambda *each: told.append(each)),
    ):
        told.clear()
        ids = make()
        (least, is_exact), exact = told
        assert not is_exact
        assert 0 < least <= len(ids)
        assert exact == (len(ids), True)


def test_an_estimate_is_judged_by_what_it_comes_to() -> None:
    renderer, told = EstimatedRenderer(), list[tuple[int, bool]]()
    ids = renderer.chat_tokens(CONVERSATION, lambda *each: told.append(each))
    ids += renderer.text_tokens("Hëllo", lambda *each: told.append(each))
    assert [is_exact for _, is_exact in told] == [False, True, False, True]
    assert sum(tokens for tokens, is_exact in told if is_exact) == len(ids)


def test_a_directory_without_a_usable_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissing, match=r"tokenizer\.json"):
        PromptRenderer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerMissing, match="cannot be read"):
        PromptRenderer(tmp_path)
    with pytest.raises(TokenizerMissing, match="chat template"):
        PromptRenderer(model_dir(tmp_path / "model", chat_template="{% if %}"))


def test_the_gateway_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, gateway.app, gateway.upstream.local_engine, "
        "gateway.upstream.openai.upstream, gateway.cluster.recovery\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'torch', 'transformers', 'numpy', 'triton', 'kernels'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_request_ids_sort_by_time_and_name_their_sequences() -> None:
    early, late = new_request_id(1_000.0), new_request_id(1_000.002)
    assert early < late
    assert len({new_request_id(1.0) for _ in range(1000)}) == 1000
    assert sequence_id(early, 3) == f"{early}.3"


def test_a_copy_of_the_process_names_its_requests_otherwise() -> None:
    script = (
        "import os, sys\n"
        "from gateway.domain.ids import new_request_id\n"
        "new_request_id(1.0)\n"
        "child = os.fork() == 0\n"
        "os.write(1, new_request_id(1.0).encode() + b' ')\n"
        "child or os.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    assert len(set(done.stdout.split())) == 2
