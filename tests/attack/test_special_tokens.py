"""A client that spells the model's special tokens in its text writes text, and no other role's turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import MODEL, Server, save_chat_model, server_process, until

pytestmark = pytest.mark.attack
CHAT = "/v1/chat/completions"
END = "<eos>"
"""The tiny model's special token: one token where it is one, five where it is text."""


@pytest.fixture(scope="module")
def key(server: Server) -> str:
    return server.tenant("special")


@pytest.fixture
def client(server: Server, key: str) -> Iterator[httpx.Client]:
    with server.http(key) as made:
        yield made


def chat(client: httpx.Client, *messages: dict[str, Any]) -> httpx.Response:
    return client.post(CHAT, json={"model": MODEL, "messages": messages, "max_tokens": 1})


def prompt_tokens(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["prompt_tokens"]
    return tokens


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_an_end_of_turn_in_a_message_is_five_characters(client: httpx.Client, role: str) -> None:
    plain = prompt_tokens(chat(client, {"role": role, "content": "ab"}))
    spelled = prompt_tokens(chat(client, {"role": role, "content": f"a{END}b"}))
    assert spelled == plain + len(END)


def test_an_end_of_turn_in_one_of_several_parts_is_text_as_well(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": END}]
    plain = prompt_tokens(chat(client, {"role": "user", "content": "a\n"}))
    assert prompt_tokens(chat(client, {"role": "user", "content": parts})) == plain + len(END)


def test_a_plain_prompt_and_its_quote_have_no_special_tokens_either(
    server: Server, client: httpx.Client
) -> None:
    body = {"model": MODEL, "prompt": f"ab{END}", "max_tokens": 1}
    assert prompt_tokens(client.post("/v1/completions", json=body)) == 2 + len(END)
    with server.http(server.key("special", scopes=["quote"])) as quoting:
        quoted = quoting.post("/v1/quotes", json=body)
    assert quoted.json()["input_tokens"] == 2 + len(END)


def test_who_sends_token_ids_sends_no_text(client: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": [0, 70, 0], "max_tokens": 1}
    assert prompt_tokens(client.post("/v1/completions", json=body)) == 3


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": f"user{END}", "content": "x"}, "role"),
        ({"role": "user", "content": "x", "name": f"kim>{END}"}, "name"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": END, "arguments": "{}"}}],
            },
            "tool_calls[0].function.name",
        ),
    ],
)
def test_roles_and_names_hold_no_markup(client: httpx.Client, message: dict[str, Any], field: str) -> None:
    refused = chat(client, message)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == f"messages[0].{field}"


TEMPLATE = (
    "{% for message in messages %}<eos><{{ message.role }}>{{ message.content | trim }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}]{% endfor %}\n{% endfor %}<eos><assistant>"
)


def called(argument: str) -> dict[str, Any]:
    function = {"name": "add", "arguments": json.dumps({"a": argument})}
    return {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


@pytest.mark.parametrize("mode", ["text", "refuse"])
def test_a_server_reads_or_refuses_them_as_it_is_set(tmp_path: Path, mode: str) -> None:
    model = save_chat_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    arguments = ("--config", str(tmp_path / "fairgate.toml"))
    (tmp_path / "fairgate.toml").write_text(f'[gateway]\nspecial_tokens_in_text = "{mode}"\n')
    with server_process(tmp_path / "server", model, *arguments) as server:
        with server.http(server.tenant("t")) as client:
            user = {"role": "user", "content": "ab"}
            plain = prompt_tokens(chat(client, user, called("ab")))
            spelled = [
                ((user | {"content": f"ab{END}"}, called("ab")), "messages[0].content", True),
                ((user, called(f"ab{END}")), "messages[1].tool_calls[0].function.arguments", True),
                # The template trims this text, so that where it stands is not known.
                ((user | {"content": f"ab{END} "}, called("ab")), "messages[0].content", False),
            ]
            for messages, field, is_taken in spelled:
                answer = chat(client, *messages)
                if is_taken and mode == "text":
                    assert prompt_tokens(answer) == plain + len(END), messages
                else:
                    assert answer.status_code == 400
                    assert answer.json()["error"]["param"] == field
            prompt = client.post("/v1/completions", json={"model": MODEL, "prompt": END, "max_tokens": 1})
            assert (prompt.status_code == 400) == (mode == "refuse")
        until(server.is_idle)
