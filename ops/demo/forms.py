"""Answers in a form after the replay: JSON by a schema, calls of tools, and JSON that `max_tokens` cuts."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import httpx

from ops.demo.prompts.instructions import make_instruction
from ops.demo.prompts.phrases import Instruction
from ops.demo.prompts.structured import compact_json
from ops.sandbox.server import LocalServer

ASKED = 24
AT_ONCE = 8
MAX_TOKENS = 120
CUT_TOKENS = 2
"""Beside those of the empty form: what is cut there can be closed, and most answers are longer."""
_KINDS = {bool: "boolean", int: "integer", str: "string"}
_TYPES = {"boolean": (bool,), "integer": (int,), "number": (int, float), "string": (str,)}


class FormQuestion(NamedTuple):
    form: str
    body: dict[str, Any]
    right: str
    """The answer, as the model writes it."""
    schema: dict[str, Any]
    """Of an answer in JSON; empty: a call is wanted."""


async def forms(server: LocalServer, key: str, seed: int) -> dict[str, dict[str, Any]]:
    """Of each form: how many were asked for, valid, right, and the first. Raises `httpx.HTTPError`."""
    questions = list(_questions(random.Random(f"forms:{seed}")))
    headers = {"authorization": f"Bearer {key}"}
    turn = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60.0) as client:

        async def ask(number: int, question: FormQuestion) -> dict[str, Any]:
            async with turn:
                body = {"model": server.model, "max_tokens": MAX_TOKENS, "seed": number, **question.body}
                response = await client.post("/v1/chat/completions", json=body)
            response.raise_for_status()
            answer: dict[str, Any] = response.json()
            return answer

        answers = await asyncio.gather(*(ask(number, one) for number, one in enumerate(questions)))
    found: dict[str, dict[str, Any]] = {}
    for question, answer in zip(questions, answers, strict=True):
        row = found.setdefault(question.form, {"asked": 0, "valid": 0, "right": 0, "closed": 0})
        message = answer["choices"][0]["message"]
        text = message["content"] if question.schema else _call(message)
        row["asked"] += 1
        row["valid"] += _is_valid(text, question)
        row["right"] += text == question.right
        row["closed"] += bool(answer["fairgate"].get("closed"))
        row.setdefault("first", [question.body["messages"][-1]["content"], text])
    return found


def is_promised(form: str) -> bool:
    return form != "plain"


def lines(found: Mapping[str, Mapping[str, Any]]) -> str:
    rows = {
        form: f"{row['valid']} of {row['asked']} valid, {row['right']} right" for form, row in found.items()
    }
    cut = found["cut"]
    shown = "".join(
        f'\n  "{found[form]["first"][0]}"{" cut" * (form == "cut")} -> {found[form]["first"][1]}'
        for form in ("json", "cut", "calls")
    )
    return (
        f"At temperature 1. JSON by a schema: {rows['json']} (the same without it: {rows['plain']}); cut by"
        f" max_tokens: {cut['valid']} of {cut['asked']} valid, {cut['closed']} closed. Calls of tools:"
        f" {rows['calls']}.{shown}"
    )


def _questions(rng: random.Random) -> Iterator[FormQuestion]:
    for _ in range(ASKED):
        row = _drawn("json", rng, lambda row: bool(_schema(json.loads(row.answer))))
        value = json.loads(row.answer)
        schema = _schema(value)
        form = {"name": "answer", "strict": True, "schema": schema}
        plain: dict[str, Any] = {"messages": row.chat()}
        body = {**plain, "response_format": {"type": "json_schema", "json_schema": form}}
        # No token has less than a byte.
        empty = compact_json({name: type(each)() for name, each in value.items()})
        yield FormQuestion("json", body, row.answer, schema)
        yield FormQuestion("plain", plain, row.answer, schema)
        yield FormQuestion("cut", body | {"max_tokens": len(empty.encode()) + CUT_TOKENS}, row.answer, schema)
        row = _drawn("tools", rng, lambda row: row.answer.count("<tool_call>") == 1)
        body = {"messages": row.chat()[1:], "tools": _tools(row.messages[0].content)}
        body |= {"tool_choice": "required", "parallel_tool_calls": False}
        yield FormQuestion("calls", body, row.answer, {})


def _drawn(family: str, rng: random.Random, suits: Callable[[Instruction], bool]) -> Instruction:
    while True:
        # A tool's result would need the call before it: one question each.
        row = make_instruction(family, rng, held_out=True)
        if suits(row) and row.messages[-1].role == "user" and len(row.messages) <= 1 + (family == "tools"):
            return row


def _schema(value: object) -> dict[str, Any]:
    """Of an object of plain values; empty: it is another."""
    if not isinstance(value, dict) or not all(type(each) in _KINDS for each in value.values()):
        return {}
    properties = {name: {"type": _KINDS[type(each)]} for name, each in value.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(value),
        "additionalProperties": False,
    }


def _tools(text: str) -> list[dict[str, Any]]:
    """The tools of a line as the chat template writes it."""
    tools = []
    for name, arguments in re.findall(r"(\w+)\(([^)]*)\)", text):
        kinds = dict(argument.split(": ") for argument in arguments.split(", ") if argument)
        properties = {argument: {"type": kind} for argument, kind in kinds.items()}
        parameters = {"type": "object", "properties": properties, "required": list(kinds)}
        tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    return tools


def _call(message: Mapping[str, Any]) -> str:
    """The call as the model writes it; empty: there is none."""
    if not message.get("tool_calls"):
        return ""
    function = message["tool_calls"][0]["function"]
    return f'<tool_call>{{"name":"{function["name"]}","arguments":{function["arguments"]}}}</tool_call>'


def _is_valid(text: str, question: FormQuestion) -> bool:
    try:
        value = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        if question.schema:
            return _schema(value) == question.schema
        functions = {tool["function"]["name"]: tool["function"] for tool in question.body["tools"]}
        wanted = functions[value["name"]]["parameters"]["properties"]
        said = {name: type(each) for name, each in value["arguments"].items()}
    except (AttributeError, LookupError, TypeError, ValueError):
        return False
    return said.keys() == wanted.keys() and all(said[name] in _TYPES[wanted[name]["type"]] for name in said)
