"""Clients of agents as they come, by Responses and Messages: Codex CLI, Claude Code, SDKs and frameworks.

The server behind the gateway answers by rule (`tests/support/rule_server.py`); text alone is also asked of
our own engine. The clients are looked for in directories of their own, as `make test-sdks` fills them.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import node_clients, python_clients
from tests.support.rule_server import MODEL, PARAGRAPH
from tests.support.sdk_scripts import SCRIPT_S, SDKS, require_sdk, run_script
from tests.support.server_process import MODEL as OWN_MODEL
from tests.support.server_process import Server

# Decided before a server is started for nothing.
pytestmark = pytest.mark.skipif(not SDKS.is_dir(), reason="no FAIRGATE_TEST_SDKS: make test-sdks")
ANTHROPIC_TEXT = """
import json, sys
from anthropic import Anthropic

client = Anthropic(base_url=sys.argv[1].removesuffix("/v1"), api_key=sys.argv[2], max_retries=0)
messages = [{"role": "user", "content": "Hello"}]
asked = {"model": sys.argv[3], "messages": messages, "max_tokens": 8, "extra_body": {"temperature": 0}}
answer = client.messages.create(**asked)
with client.messages.stream(**asked) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
counted = client.messages.count_tokens(model=sys.argv[3], messages=messages).input_tokens
for usage in (answer.usage, final.usage):
    assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert usage.output_tokens == 8
print(json.dumps([answer.content[0].text, final.content[0].text, text]))
"""
STORED = """
const { generateText } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const [url, key, name] = process.argv.slice(1);
const model = createOpenAI({ baseURL: url, apiKey: key })(name);
(async () => {
  const said = await generateText({ model, prompt: "Hi" });
  const messages = [...(await said.response).messages, { role: "user", content: "Hello" }];
  const refused = await generateText({ model, messages, maxRetries: 0 }).catch((error) => error.message);
  const stateless = await generateText({ model, messages, providerOptions: { openai: { store: false } } });
  console.log(JSON.stringify([refused.includes("'store': false"), stateless.text]));
})();
"""
CLIENTS: dict[str, tuple[str, str, int]] = {
    "anthropic": ("anthropic", python_clients.ANTHROPIC, 7),
    "openai-agents": ("agents", python_clients.AGENTS, 14),
    "haystack": ("haystack", python_clients.HAYSTACK, 4),
    "instructor": ("instructor", python_clients.INSTRUCTOR, 7),
    "langgraph": ("langgraph", python_clients.LANGGRAPH, 4),
    "litellm": ("litellm", python_clients.LITELLM, 11),
    "llama-index": ("llama_index", python_clients.LLAMA_INDEX, 5),
    "pydantic-ai": ("pydantic_ai", python_clients.PYDANTIC_AI, 8),
    "openai-node": ("node", node_clients.OPENAI, 7),
    "ai-sdk": ("node", node_clients.AI_SDK, 10),
}
"""By client: its directory, its script, and how many cases that has."""
BY_RULE: Any = [
    {"name": "word", "age": 36},
    [[[3, 3]], "It says: 6"],
    [[[3, 3]], "6"],
    'It says: {"assistant": "helper"}',
]
"""What the server that answers by rule can have been asked."""
UNRULY = {
    "free JSON",
    "free MD_JSON",
    "free OpenAIChatModel PromptedOutput",
    "free OpenAIResponsesModel PromptedOutput",
}
"""Of a form that only the prompt asks for, the rule knows nothing."""
CODEX = """
model = "{model}"
model_provider = "fairgate"
[model_providers.fairgate]
name = "Fairgate"
base_url = "{url}/v1"
env_key = "FAIRGATE_KEY"
wire_api = "responses"
"""


@pytest.fixture(scope="module")
def agents_key(gateway: Server) -> str:
    return gateway.tenant("agents")


def answers(client: str, gateway: Server, key: str, model: str) -> Any:
    sdk, script, cases = CLIENTS[client]
    prelude = node_clients.PRELUDE if sdk == "node" else python_clients.PRELUDE
    said = run_script(sdk, prelude + script, gateway, key, model)
    assert len(said) == cases
    return said


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_has_its_types_and_tools_of_another_server(
    gateway: Server, agents_key: str, client: str
) -> None:
    for case, answer in answers(client, gateway, agents_key, MODEL).items():
        assert case in UNRULY or answer in BY_RULE, (case, answer)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_has_its_types_and_tools_of_our_own_engine(shipped: Server, client: str) -> None:
    """Where it forces a form; where it does not, it has an answer of the model's, whatever that says."""
    for case, answer in answers(client, shipped, shipped.tenant(client), OWN_MODEL).items():
        match answer:
            case {"name": str(), "age": int()} | [[[int(), int()]], str()] | str():
                assert "" not in (answer, answer[-1] if isinstance(answer, list) else None), case
            case _:
                assert case.startswith("free "), (case, answer)
                assert "Error code" not in str(answer), (case, answer)


def test_anthropics_sdk_counts_as_it_is_charged(server: Server) -> None:
    """At temperature 0 the text of our own engine is the same, whole and streamed."""
    said = run_script("anthropic", ANTHROPIC_TEXT, server, server.tenant("counted"), OWN_MODEL)
    assert said[0]
    assert len(set(said)) == 1


def test_a_text_that_the_ai_sdk_sends_back_needs_its_store_off(gateway: Server, agents_key: str) -> None:
    assert run_script("node", STORED, gateway, agents_key, MODEL) == [True, PARAGRAPH]


def run_agent(name: str, arguments: list[str], home: Path, **environment: str) -> list[dict[str, Any]]:
    """The events of an agent that was started with these alone, and nothing of this user's."""
    ended = subprocess.run(
        [require_sdk("node") / "node_modules" / ".bin" / name, *arguments], cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home)} | environment,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SCRIPT_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_claude_code_runs_a_command_to_its_last_message(
    gateway: Server, agents_key: str, tmp_path: Path
) -> None:
    arguments = ["-p", "Use Bash: 'echo ok'", "--tools", "Bash", "--allowedTools", "Bash"]
    (result,) = run_agent(
        "claude", [*arguments, "--output-format", "json"], tmp_path,
        ANTHROPIC_BASE_URL=gateway.url, ANTHROPIC_API_KEY=agents_key, ANTHROPIC_MODEL=MODEL,
        ANTHROPIC_SMALL_FAST_MODEL=MODEL, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )  # fmt: skip
    assert (result["subtype"], result["num_turns"], result["result"]) == ("success", 2, "It says: ok")


@pytest.mark.parametrize("is_limited", [False, True])
def test_codex_runs_a_command_to_its_last_message(gateway: Server, tmp_path: Path, is_limited: bool) -> None:
    """Limited: its second request is refused at first (429), and it comes back when it was asked to."""
    tenant = f"codex-{is_limited}"
    key = gateway.tenant(tenant)
    if is_limited:
        gateway.limit(tenant, "requests", 1, rate_per_s=0.25)
    (tmp_path / "config.toml").write_text(CODEX.format(model=MODEL, url=gateway.url))
    arguments = ["exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    events = run_agent(
        "codex", [*arguments, "run: 'echo ok'"], tmp_path, CODEX_HOME=str(tmp_path), FAIRGATE_KEY=key
    )
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    (command,) = (item for item in done if item["type"] == "command_execution")
    assert (command["exit_code"], command["aggregated_output"]) == (0, "ok\n")
    assert done[-1]["type"] == "agent_message"
    assert "ok" in done[-1]["text"]
    assert events[-1]["type"] == "turn.completed"
    refused = gateway.admin("GET", f"/refusals?tenant={tenant}")["data"]
    assert {each["code"] for each in refused} == ({"rate_limit_exceeded"} if is_limited else set())
