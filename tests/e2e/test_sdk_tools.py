"""Tools and schemas through the gateway, by the SDKs openai, LangChain, instructor and pydantic-ai, and
requests as the applications LibreChat and Open WebUI send them.

The server behind it answers by rule (`tests/support/rule_server.py`). What the suite does not install is
looked for in a directory of its own, as `make test-sdks` fills it; LangChain's own tests are run as they are.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.support.rule_server import MODEL
from tests.support.sdk_scripts import SCRIPT_S, require_sdk
from tests.support.server_process import MODEL as OWN_MODEL
from tests.support.server_process import Server

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
                "required": ["a", "note"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
ASKED: Any = [{"role": "user", "content": "Call add with 3 and 'three'."}]
LANGCHAIN_TESTS = 40
"""Of its tests at least so many are run; the others need what a text server has not, or the network."""

# ---- What two applications send to "an endpoint like OpenAI's", by their own code; written anew.

USER: Any = {"role": "user", "content": "Hello"}
STREAMED: Any = {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}
PIXEL = "iVBORw0KGgo="
EPHEMERAL = {"type": "ephemeral"}
FUNCTION: Any = {
    "name": "weather",
    "description": "Of a town",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
CALL: Any = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
TITLE: Any = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}


def history(assistant: Any, **tool: Any) -> Any:
    """A conversation in which a tool was called."""
    said = {"role": "assistant", "content": "", "tool_calls": [CALL]} | assistant
    return [USER, said, {"role": "tool", "tool_call_id": "call_1", "content": "rain"} | tool]


def asked(*parts: Any) -> Any:
    """One message of a text and more."""
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}]


APPLICATIONS: dict[str, tuple[Any, str]] = {
    # danny-avila/LibreChat: packages/api/src/endpoints/openai/llm.ts; its models are of danny-avila/agents:
    # src/llm/openai/index.ts, messages of utils/index.ts beside it.
    "librechat chat": (STREAMED | {"user": "64f0c0", "n": 1, "temperature": 0.8, "top_p": 1,
        "presence_penalty": 0, "frequency_penalty": 0, "max_tokens": 16}, ""),
    "librechat agent": (STREAMED | {"user": "64f0c0", "parallel_tool_calls": True,
        "tools": [{"type": "function", "function": FUNCTION}]}, ""),
    "librechat after a call": (STREAMED | {"messages": history({}, name="weather")}, ""),
    "librechat effort": (STREAMED | {"reasoning_effort": "low"}, "reasoning_effort"),
    # src/llm/openrouter/, src/messages/cache.ts: where prompts are cached, and reasoning goes back.
    "librechat cached": (STREAMED | {"messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be kind.", "cache_control": EPHEMERAL}]},
        {"role": "user", "content": [
            {"type": "text", "text": "Hi", "cache_control": EPHEMERAL | {"ttl": "1h"}}]}]}, ""),
    "librechat cached tools": (STREAMED | {"include_reasoning": True, "reasoning": {"effort": "low"},
        "tools": [{"type": "function", "function": FUNCTION, "cache_control": EPHEMERAL}]}, "reasoning"),
    "librechat thoughts": (STREAMED | {"messages": [USER, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}, {"type": "text", "text": "Hi"}]},
        USER]}, ""),
    "librechat reasoning details": (STREAMED | {"messages": history({"reasoning_details": [
        {"type": "reasoning.text", "text": "Hm.", "format": "unknown", "index": 0}]})}, ""),
    # api/server/services/Files/images/encode.js, packages/api/src/files/encode/document.ts
    "librechat image": (STREAMED | {"messages": asked({"type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{PIXEL}", "detail": "auto"}})}, "messages"),
    "librechat document": (STREAMED | {"messages": asked({"type": "file",
        "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}})}, "messages"),
    # danny-avila/agents: src/utils/title.ts, by completion, function and schema.
    "librechat title": ({"messages": [USER], "user": "64f0c0", "temperature": 0.8, "stream": False}, ""),
    "librechat title by function": ({"messages": [USER], "stream": False,
        "tools": [{"type": "function", "function": {"name": "extract", "parameters": TITLE}}],
        "tool_choice": {"type": "function", "function": {"name": "extract"}}}, ""),
    "librechat title by schema": ({"messages": [USER], "stream": False, "response_format": {
        "type": "json_schema", "json_schema": {"name": "extract", "schema": TITLE | {
            "$schema": "http://json-schema.org/draft-07/schema#", "additionalProperties": False}}}},
        ""),
    # open-webui/open-webui: backend/open_webui/utils/payload.py and routers/openai.py
    "open webui chat": (STREAMED | {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "top_k": 40,
        "max_tokens": 16, "frequency_penalty": 0.1, "presence_penalty": 0.1, "seed": 7, "stop": ["\n\n"],
        "logit_bias": {"65": -100}}, ""),
    "open webui effort": (STREAMED | {"reasoning_effort": "medium"}, "reasoning_effort"),
    "open webui pipeline": (STREAMED | {"user": {
        "name": "Ada", "id": "6f1c", "email": "ada@example.com", "role": "user"}}, ""),
    "open webui image": (STREAMED | {"messages": asked({"type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{PIXEL}"}})}, "messages"),
    # utils/middleware.py: tools that the model calls itself; utils/misc.py: reasoning goes back.
    "open webui native tools": (STREAMED | {"tools": [{"type": "function", "function": FUNCTION}]}, ""),
    "open webui after a call": (STREAMED | {"messages": history({"tool_calls": [{"index": 0} | CALL]}),
        "tools": [{"type": "function", "function": FUNCTION}]}, ""),
    "open webui reasoning": (STREAMED | {"messages": [
        USER, {"role": "assistant", "content": "Hi", "reasoning_content": "Hm."}, USER]}, ""),
    # routers/tasks.py: titles, tags, queries
    "open webui title": ({"messages": [USER], "stream": False, "max_tokens": 1000}, ""),
}  # fmt: skip
"""By application and occasion: the body, and the field that our own engine cannot take; empty: none."""
FORWARDED = {
    "X-OpenWebUI-User-Name": "Ada", "X-OpenWebUI-User-Id": "6f1c", "X-OpenWebUI-User-Email": "ada@a.example",
    "X-OpenWebUI-User-Role": "user", "X-OpenWebUI-Chat-Id": "c-9", "X-Title": "Open WebUI",
}  # fmt: skip

LANGCHAIN = """
import os, pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestThroughTheGateway(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict:
        return {
            "base_url": os.environ["GATEWAY"], "api_key": os.environ["KEY"], "model": os.environ["MODEL"],
            "max_retries": 0, "stream_usage": True, "temperature": 0,
        }

    has_tool_calling = True
    has_tool_choice = True
    has_structured_output = True
    supports_json_mode = True
    supports_anthropic_inputs = True


# These judge what the model says: the keys of a free JSON object, and Chinese that it copies.
if os.environ["MODEL"] != "by-rule":
    for name in ("test_json_mode", "test_unicode_tool_call_integration"):
        marked = pytest.mark.xfail(reason="the small model's words")(getattr(TestThroughTheGateway, name))
        setattr(TestThroughTheGateway, name, marked)
"""


class Person(BaseModel):
    """What the SDK parses an answer into."""

    name: str
    age: int


@pytest.fixture(scope="module")
def key(gateway: Server) -> str:
    return gateway.tenant("acme")


@pytest.fixture(scope="module")
def own_key(shipped: Server) -> str:
    return shipped.tenant("applications")


@pytest.fixture
def client(gateway: Server, key: str) -> Iterator[OpenAI]:
    with OpenAI(api_key=key, base_url=f"{gateway.url}/v1", max_retries=0) as made:
        yield made


def test_an_answer_is_parsed_into_a_type(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "The person 'Ada' is 36."}]
    answer = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    with client.chat.completions.stream(model=MODEL, messages=messages, response_format=Person) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Person(name="Ada", age=36)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_loop_of_tools_ends_with_an_answer(client: OpenAI, is_stream: bool) -> None:
    messages = list(ASKED)
    for _ in range(3):
        if is_stream:
            with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
                answer: Any = stream.get_final_completion()
        else:
            answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        if not message.tool_calls:
            break
        assert answer.choices[0].finish_reason == "tool_calls"
        assert not message.content
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 3, "note": "three"})
        messages.append(message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "seven"})
    assert message.content == "It says: seven"


def test_tool_arguments_are_parsed_into_their_type(client: OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=ASKED, tools=TOOLS)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == {"a": 3, "note": "three"}


def complete(server: Server, key: str, body: Any) -> httpx.Response:
    with server.http(key) as client:
        answer = client.post("/v1/chat/completions", json=body, headers=FORWARDED)
    if answer.is_success and body["stream"]:
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text
    return answer


@pytest.mark.parametrize(("body", "refused"), APPLICATIONS.values(), ids=APPLICATIONS)
def test_what_applications_send_is_taken(
    gateway: Server, key: str, shipped: Server, own_key: str, body: Any, refused: str
) -> None:
    """By a server that can do it, and by our own engine where that can; it names what it cannot do."""
    answer = complete(gateway, key, {"model": MODEL} | body)
    assert answer.status_code == 200, answer.text
    answer = complete(shipped, own_key, {"model": OWN_MODEL, "max_tokens": 8} | body)
    if refused:
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["param"].startswith(refused), error
    else:
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("fixture", ["gateway", "shipped"])
def test_langchains_own_tests_pass(fixture: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Before a server that answers by rule, and on our own engine."""
    langchain = require_sdk("langchain")
    asked: Server = request.getfixturevalue(fixture)
    (tmp_path / "test_chat.py").write_text(LANGCHAIN)
    where = {"GATEWAY": f"{asked.url}/v1", "KEY": asked.tenant("langchain")}
    where |= {"MODEL": MODEL if fixture == "gateway" else OWN_MODEL}
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rfE",
            "-p",
            "no:cacheprovider",
            "-o",
            "asyncio_mode=auto",
            "-o",
            "asyncio_default_test_loop_scope=session",
            "test_chat.py",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(langchain)} | where,
        capture_output=True,
        text=True,
        timeout=SCRIPT_S,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    run = re.findall(r"(\d+) x?(?:pass|fail)ed", ended.stdout)
    assert sum(map(int, run)) >= LANGCHAIN_TESTS, ended.stdout[-4000:]
