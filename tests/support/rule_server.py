"""A stand-in for a server that calls tools and keeps to schemas: it answers by rule, without a model.

Asked with tools it calls one (the forced one, the one that the prompt names, or the first) with arguments
made from its schema; asked for JSON it makes an instance of the schema, or an object of the keys that the
prompt has in quotes; a tool's result is said back. A token is a byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.faulty_servers import Peer, PeerRequest, in_thread

MODEL = "by-rule"
CONTEXT_TOKENS = 65_536
PIECE_CHARACTERS = 7
"""Of a stream's events."""
NAMES: dict[str, Any] = {"id": "x", "created": 1, "model": MODEL}
WORD = "word"
PARAGRAPH = "This is an answer by rule."


def instance(schema: dict[str, Any], prompt: str = "", root: dict[str, Any] | None = None) -> Any:
    """A value that the schema allows, of the prompt's first number and last quoted string where it has any.
    An object has what it requires, or all of its fields where it requires none."""
    root = schema if root is None else root
    if "$ref" in schema:
        target: Any = root
        for step in schema["$ref"].removeprefix("#/").split("/"):
            target = target[step]
        return instance(target, prompt, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in schema:
            return instance(schema[choice][0], prompt, root)
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    numbers = [int(each) for each in re.findall(r"\b\d+\b", prompt)]
    quoted = re.findall(r"'([^']+)'", prompt)
    match kind:
        case "object":
            fields = schema.get("properties", {})
            chosen = schema.get("required") or fields
            return {name: instance(fields[name], prompt, root) for name in chosen}
        case "array":
            count = max(1, schema.get("minItems", 1))
            return [instance(schema.get("items", {"type": "string"}), prompt, root)] * count
        case "integer" | "number":
            return numbers[0] if numbers else schema.get("minimum", 1)
        case "boolean":
            return True
        case "null":
            return None
    return quoted[-1] if quoted else WORD


@contextmanager
def rule_server() -> Iterator[Peer]:
    """One that is up."""
    with in_thread(Peer(_answer, (MODEL,), CONTEXT_TOKENS, "vllm")) as peer:
        yield peer


async def _answer(request: PeerRequest) -> None:
    body = request.body
    message, finish = _message(body)
    text = message.get("content") or ""
    generated = text + "".join(
        call["function"]["name"] + call["function"]["arguments"] for call in message.get("tool_calls", ())
    )
    most = body.get("max_tokens") or body.get("max_completion_tokens")
    if most is not None and len(generated.encode()) > most and "tool_calls" not in message:
        message, finish = (
            {"role": "assistant", "content": text.encode()[:most].decode(errors="ignore")},
            "length",
        )
        generated = message["content"]
    prompt = json.dumps(body["messages"]) + json.dumps(body.get("tools") or "")
    usage = {"prompt_tokens": len(prompt), "completion_tokens": max(1, len(generated.encode()))}
    usage["total_tokens"] = sum(usage.values())
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": finish}
        await request.json(NAMES | {"object": "chat.completion", "choices": [choice], "usage": usage})
        return
    await request.head()
    for delta in _deltas(message):
        await request.events(_event(delta))
    await request.events(_event({}, finish), _event({}) | {"choices": [], "usage": usage}, "[DONE]")
    await request.last()


def _message(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The answer and its finish reason."""
    last = body["messages"][-1]
    prompt = _text(last.get("content"))
    choice = body.get("tool_choice") or "auto"
    tools = {each["function"]["name"]: each["function"] for each in body.get("tools") or ()}
    if tools and choice != "none" and (last["role"] != "tool" or choice != "auto"):
        named = choice["function"]["name"] if isinstance(choice, dict) else None
        name = named or next((each for each in tools if each in prompt), next(iter(tools)))
        arguments = json.dumps(instance(tools[name].get("parameters") or {}, prompt), ensure_ascii=False)
        call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
        # A named function ends with `stop`, as OpenAI's and vLLM's does.
        return {"role": "assistant", "content": None, "tool_calls": [call]}, "stop" if named else "tool_calls"
    form = body.get("response_format") or {"type": "text"}
    if form["type"] == "json_schema":
        content = json.dumps(instance(form["json_schema"]["schema"], prompt), ensure_ascii=False)
    elif form["type"] == "json_object":
        content = json.dumps(dict.fromkeys(re.findall(r"'(\w+)'", prompt) or ["answer"], WORD))
    elif last["role"] == "tool":
        content = f"It says: {prompt}"
    else:
        content = PARAGRAPH
    for stop in [body.get("stop")] if isinstance(body.get("stop"), str) else body.get("stop") or ():
        content = content.split(stop)[0]
    return {"role": "assistant", "content": content}, "stop"


def _text(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(part.get("text", "") for part in content)
    return content or ""


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    text = message.get("content") or ""
    for first in range(0, len(text), PIECE_CHARACTERS):
        yield {"content": text[first : first + PIECE_CHARACTERS]}
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        yield {
            "tool_calls": [call | {"index": index, "function": {"name": function["name"], "arguments": ""}}]
        }
        for first in range(0, len(function["arguments"]), PIECE_CHARACTERS):
            part = function["arguments"][first : first + PIECE_CHARACTERS]
            yield {"tool_calls": [{"index": index, "function": {"arguments": part}}]}


def _event(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return NAMES | {"object": "chat.completion.chunk", "choices": [choice]}
