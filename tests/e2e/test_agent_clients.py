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

from tests.support.rule_server import MODEL, PARAGRAPH
from tests.support.sdk_scripts import SCRIPT_S, SDKS, require_sdk, run_script
from tests.support.server_process import MODEL as OWN_MODEL
from tests.support.server_process import Server

# Decided before a server is started for nothing.
pytestmark = pytest.mark.skipif(not SDKS.is_dir(), reason="no FAIRGATE_TEST_SDKS: make test-sdks")
ANTHROPIC = """
import json, sys
from anthropic import Anthropic

client = Anthropic(base_url=sys.argv[1].removesuffix("/v1"), api_key=sys.argv[2], max_retries=0)
add = {"name": "add", "input_schema": {"type": "object", "required": ["a", "note"],
       "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}}
asked = {"model": sys.argv[3], "max_tokens": 1000, "tools": [add]}

def whole(messages):
    return client.messages.create(messages=messages, **asked)

def streamed(messages):
    with client.messages.stream(messages=messages, **asked) as stream:
        return stream.get_final_message()

def loop(ask):
    messages, said = [{"role": "user", "content": "Call add with 3 and 'three'."}], []
    for _ in range(3):
        answer = ask(messages)
        said.append(answer.stop_reason)
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return [*said, answer.content[0].text]
        messages.append({"role": "assistant", "content": answer.content})
        messages.append({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": each.id,
             "content": f"seven of {each.input['a']} {each.input['note']}"}
            for each in calls]})

print(json.dumps([loop(whole), loop(streamed)]))
"""
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
AGENTS_BEGIN = """
import asyncio, json, sys
import agents
from agents import Agent, ModelSettings, Runner, function_tool
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)
agents.set_default_openai_client(AsyncOpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0))

async def both(agent, asked):
    streamed = Runner.run_streamed(agent, asked)
    async for _ in streamed.stream_events():
        pass
    return [await Runner.run(agent, asked), streamed]
"""
AGENTS = (
    AGENTS_BEGIN
    + """
@function_tool
def add(a: int, note: str) -> str:
    return f"seven of {a} {note}"

helper = Agent(name="helper", model=sys.argv[3])
first = Agent(name="first", model=sys.argv[3], tools=[add], handoffs=[helper])

async def main():
    tool, handoff = await both(first, "Call add with 3 and 'three'."), await both(first, "transfer_to_helper")
    print(json.dumps([[each.last_agent.name, each.final_output] for each in tool + handoff]))

asyncio.run(main())
"""
)
AGENTS_TEXT = (
    AGENTS_BEGIN
    + """
# Without `max_tokens`: an answer that is cut is an error to this client.
agent = Agent(name="own", model=sys.argv[3], model_settings=ModelSettings(temperature=0))
print(json.dumps([each.final_output for each in asyncio.run(both(agent, "Hello"))]))
"""
)
LANGGRAPH = """
import json, sys
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

@tool
def add(a: int, note: str) -> str:
    "Adds."
    return f"seven of {a} {note}"

model = ChatOpenAI(
    base_url=sys.argv[1], api_key=sys.argv[2], model=sys.argv[3], max_retries=0, use_responses_api=True
)
agent = create_react_agent(model, [add])
asked = {"messages": [{"role": "user", "content": "Call add with 3 and 'three'."}]}
whole = agent.invoke(asked)["messages"][-1].text
pieces = [piece for piece, _ in agent.stream(asked, stream_mode="messages") if piece.type.startswith("AI")]
print(json.dumps([str(whole), "".join(str(piece.text) for piece in pieces)]))
"""
INSTRUCTOR = """
import json, sys, instructor
from openai import OpenAI
from pydantic import BaseModel

class Person(BaseModel):
    name: str
    age: int

said = []
for mode in (instructor.Mode.RESPONSES_TOOLS, instructor.Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS):
    client = instructor.from_openai(OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0), mode)
    person = client.responses.create(
        model=sys.argv[3], response_model=Person, max_retries=0, input="The person 'Ada' is 36.")
    said.append(person.model_dump())
print(json.dumps(said))
"""
LITELLM = """
import asyncio, json, sys, litellm

url, key, model = sys.argv[1:]
of = {"openai": {"api_base": url, "api_key": key},
      "anthropic": {"api_base": url.removesuffix("/v1"), "api_key": key}}
add = {"type": "object", "required": ["a", "note"],
       "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}
asked = [{"role": "user", "content": "Call add with 3 and 'three'."}]

async def messages(provider, is_stream):
    answer = await litellm.anthropic.messages.acreate(
        model=f"{provider}/{model}", max_tokens=1000, messages=asked, stream=is_stream,
        tools=[{"name": "add", "input_schema": add}], **of[provider])
    if not is_stream:
        return answer["content"][0]["input"]
    lines = b"".join([each async for each in answer]).decode().splitlines()
    events = [json.loads(line[5:]) for line in lines if line.startswith("data:")]
    return json.loads("".join(each.get("delta", {}).get("partial_json", "") for each in events))

said = [asyncio.run(messages(provider, is_stream)) for provider in of for is_stream in (False, True)]
answer = litellm.responses(model=f"openai/{model}", input=asked, **of["openai"],
    tools=[{"type": "function", "name": "add", "parameters": add}])
said.append(json.loads(answer.output[0].arguments))
answer = litellm.completion(model=f"anthropic/{model}", messages=asked, max_tokens=100, **of["anthropic"])
print(json.dumps([*said, answer.choices[0].message.content]))
"""
OPENAI_NODE = """
const OpenAI = require("openai");
const { zodTextFormat } = require("openai/helpers/zod");
const { z } = require("zod");
const [url, key, model] = process.argv.slice(1);
const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
const tools = [{ type: "function", name: "add", strict: true, parameters: {
  type: "object", properties: { a: { type: "integer" }, note: { type: "string" } },
  required: ["a", "note"], additionalProperties: false } }];
const streamed = (asked) => client.responses.stream(asked).finalResponse();
const whole = (asked) => client.responses.create(asked);
async function loop(ask) {
  const input = [{ role: "user", content: "Call add with 3 and 'three'." }];
  for (let step = 0; step < 3; step++) {
    const answer = await ask({ model, input, tools });
    const calls = answer.output.filter((item) => item.type === "function_call");
    if (!calls.length) return answer.output_text;
    input.push(...answer.output);
    for (const { call_id, arguments: said } of calls) {
      const { a, note } = JSON.parse(said);
      input.push({ type: "function_call_output", call_id, output: `seven of ${a} ${note}` });
    }
  }
}
(async () => {
  const Person = z.object({ name: z.string(), age: z.number().int() });
  const parsed = await client.responses.parse({
    model, input: "The person 'Ada' is 36.", text: { format: zodTextFormat(Person, "person") } });
  console.log(JSON.stringify([await loop(whole), await loop(streamed), parsed.output_parsed]));
})();
"""
AI_SDK = """
const { generateText, streamText, tool, stepCountIs } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { z } = require("zod");
const [url, key, name] = process.argv.slice(1);
const model = createOpenAI({ baseURL: url, apiKey: key })(name);
const add = tool({
  inputSchema: z.object({ a: z.number().int(), note: z.string() }),
  execute: async ({ a, note }) => `seven of ${a} ${note}` });
const asked = { model, tools: { add }, prompt: "Call add with 3 and 'three'.",
  maxRetries: 0, stopWhen: stepCountIs(3) };
(async () => {
  const whole = await generateText(asked);
  const stream = streamText(asked);
  const messages = [{ role: "user", content: "Hi" }, ...(await stream.response).messages,
    { role: "user", content: "Hello" }];
  const refused = await generateText({ model, messages, maxRetries: 0 }).catch((error) => error.message);
  const stateless = await generateText({ model, messages, providerOptions: { openai: { store: false } } });
  console.log(JSON.stringify([whole.text, whole.steps.length, await stream.text,
    (await stream.steps).length, stateless.text, refused.includes("'store': false")]));
})();
"""
AI_SDK_TEXT = """
const { generateText, streamText } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const [url, key, name] = process.argv.slice(1);
const model = createOpenAI({ baseURL: url, apiKey: key })(name);
const asked = { model, prompt: "Hello", maxOutputTokens: 8, temperature: 0, maxRetries: 0 };
(async () => {
  console.log(JSON.stringify([(await generateText(asked)).text, await streamText(asked).text]));
})();
"""
SEVEN = "It says: seven of 3 three"
HANDED_OVER = 'It says: {"assistant": "helper"}'
ADA = {"name": "Ada", "age": 36}
CALLED = {"a": 3, "note": "three"}
CLIENTS: dict[str, tuple[str, str, Any]] = {
    "anthropic": ("anthropic", ANTHROPIC, [["tool_use", "end_turn", SEVEN]] * 2),
    "openai-agents": ("agents", AGENTS, [["first", SEVEN]] * 2 + [["helper", HANDED_OVER]] * 2),
    "langgraph": ("langgraph", LANGGRAPH, [SEVEN, SEVEN]),
    "instructor": ("instructor", INSTRUCTOR, [ADA, ADA]),
    "litellm": ("litellm", LITELLM, [*[CALLED] * 5, PARAGRAPH]),
    "openai-node": ("node", OPENAI_NODE, [SEVEN, SEVEN, ADA]),
    "ai-sdk": ("node", AI_SDK, [SEVEN, 2, SEVEN, 2, PARAGRAPH, True]),
}
"""By client: its directory, its script, and what that must say."""
TEXTS = {
    "anthropic": ("anthropic", ANTHROPIC_TEXT),
    "openai-agents": ("agents", AGENTS_TEXT),
    "ai-sdk": ("node", AI_SDK_TEXT),
}
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


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_runs_its_tools_to_the_last_word(gateway: Server, agents_key: str, client: str) -> None:
    sdk, script, expected = CLIENTS[client]
    assert run_script(sdk, script, gateway, agents_key, MODEL) == expected


@pytest.mark.parametrize("client", TEXTS)
def test_a_client_has_text_of_our_own_engine(server: Server, client: str) -> None:
    """At temperature 0 it is the same, whole and streamed."""
    sdk, script = TEXTS[client]
    said = run_script(sdk, script, server, server.tenant(f"text-of-{client}"), OWN_MODEL)
    assert said[0]
    assert len(set(said)) == 1


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
