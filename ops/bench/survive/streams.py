"""Streams of every kind that has a state of its own in an engine, and what a client receives of them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ops.bench.budgets.testbed import BudgetTenant
from ops.bench.common.http_client import HttpBroken, LoadHttpClient

COUNT = [{"role": "user", "content": "Count from 1 to 60."}]
PERSON = [{"role": "user", "content": "Ada is 36 years old. Write it as JSON with name and age."}]
ADDING = [{"role": "user", "content": "What is 3 + 4? Use add."}]
LONG = {"max_tokens": 160, "ignore_eos": True}
DRAWN = {"temperature": 1.8, "seed": 7, **LONG}
"""Hot: the shipped model counts without a mistake otherwise, whatever is drawn."""
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
TEXT = {"type": "string", "minLength": 20, "maxLength": 40}
SCHEMA = {
    "type": "object",
    "properties": {"name": TEXT, "town": TEXT, "ages": {"type": "array", "items": NUMBER, "minItems": 20}},
    "required": ["name", "town", "ages"],
}
TOOL = {"type": "object", "properties": {"left": NUMBER, "why": TEXT}, "required": ["left", "why"]}
BUDGET_TOKENS = 90
RATE_PER_S = 80.0
RATE_BURST = 20
LOGPROB_ERROR = 0.01
"""Between the same draws in batches of another size."""


@dataclass(frozen=True, slots=True)
class StreamKind:
    name: str
    fields: Mapping[str, Any]
    messages: Sequence[Mapping[str, str]] = ()
    """Empty: `COUNT`."""
    is_repeatable: bool = True
    """False: without a seed each run has draws of its own, so that only its end and its bill are compared."""


KINDS = (
    StreamKind("seeded", DRAWN),
    StreamKind("seedless", {"temperature": 1.8, **LONG}, is_repeatable=False),
    StreamKind("greedy", {"temperature": 0, **LONG}),
    StreamKind("penalties", {"frequency_penalty": 0.6, "presence_penalty": 0.4, **DRAWN}),
    # Each number begins the first one anew; the second one ends the stream.
    StreamKind("stop", {"temperature": 0, "stop": [", 4, 5, 6, 7, 9", "51, 52"], **LONG}),
    StreamKind("logprobs", {"logprobs": True, "top_logprobs": 3, **DRAWN}),
    StreamKind("n", {"n": 2, **DRAWN}),
    StreamKind(
        "schema",
        {
            "temperature": 0.9,
            "seed": 7,
            "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
        },
        PERSON,
    ),
    StreamKind(
        "tools",
        {
            "temperature": 0.9,
            "seed": 7,
            "tools": [{"type": "function", "function": {"name": "add", "parameters": TOOL}}],
            "tool_choice": "required",
        },
        ADDING,
    ),
    StreamKind("rate", DRAWN),
    StreamKind("budget", {"temperature": 1.8, "seed": 7, "ignore_eos": True}),
)


@dataclass(slots=True)
class Received:
    kind: StreamKind
    tenant_id: str
    status: int = 0
    request_id: str = ""
    failure: str = ""
    """Why it broke; empty: it came to its regular end."""
    texts: dict[int, str] = field(default_factory=dict)
    """By choice, with the calls of tools."""
    finishes: dict[int, str] = field(default_factory=dict)
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    moves: int = 0
    longest_pause_s: float = 0.0
    """Between two pieces of it."""

    def differs(self, undisturbed: Received) -> str:
        """How it is other than the undisturbed one; empty: token for token the same."""
        for name in ("texts", "finishes", "output_tokens", "input_tokens"):
            ours, theirs = getattr(self, name), getattr(undisturbed, name)
            if ours != theirs and (self.kind.is_repeatable or name == "input_tokens"):
                return f"{name} {ours}, undisturbed {theirs}"
        both = list(zip(self.logprobs, undisturbed.logprobs, strict=False))
        if any(ours != theirs or abs(one - other) > LOGPROB_ERROR for (ours, one), (theirs, other) in both):
            return "log probabilities"
        return ""


async def receive(
    client: LoadHttpClient, url: str, model: str, tenant: BudgetTenant, kind: StreamKind
) -> Received:
    """Runs one stream to its end; never raises for a server's failure."""
    got = Received(kind, tenant.tenant_id)
    body = {"model": model, "messages": kind.messages or COUNT, "stream": True, **kind.fields}
    body["stream_options"] = {"include_usage": True}
    headers = {"authorization": f"Bearer {tenant.key}"}
    is_whole, last_s = False, 0.0
    try:
        async with client.post(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers) as reply:
            got.status, got.request_id = reply.status, reply.headers.get("x-request-id", "")
            if reply.status != 200:
                got.failure = f"{reply.status} {(await reply.read())[:200].decode(errors='replace')}"
                return got
            async for line in reply.lines():
                is_whole = is_whole or line == "data: [DONE]"
                if line.startswith("data: {"):
                    take(got, json.loads(line.removeprefix("data: ")))
                    now_s = time.monotonic()
                    got.longest_pause_s = max(got.longest_pause_s, now_s - (last_s or now_s))
                    last_s = now_s
    except HttpBroken as error:
        got.failure = str(error)
    if not is_whole or not got.finishes:
        got.failure = got.failure or "the stream ended without its end"
    return got


def take(got: Received, chunk: Mapping[str, Any]) -> None:
    """Takes one event of the stream."""
    if "error" in chunk:
        got.failure = f"{chunk['error'].get('code')}: {chunk['error'].get('message')}"
    for choice in chunk.get("choices", ()):
        delta, index = choice["delta"], choice["index"]
        text = delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            text += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
        got.texts[index] = got.texts.get(index, "") + text
        if choice.get("finish_reason"):
            got.finishes[index] = choice["finish_reason"]
        shown = (choice.get("logprobs") or {}).get("content") or ()
        got.logprobs += [(token["token"], token["logprob"]) for token in shown]
    if usage := chunk.get("usage"):
        got.input_tokens, got.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    got.moves += len((chunk.get("fairgate") or {}).get("replica_moves", ()))
