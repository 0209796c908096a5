"""Streams of every kind that has a state of its own in an engine, and what a client receives of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ops.bench.common.attempts import ClientAttempt

HOT = {"temperature": 1.8, "max_tokens": 120, "ignore_eos": True}
"""Less hot, the shipped model counts without a mistake, whatever is drawn."""
DRAWN = {**HOT, "seed": 7}
COOL = {**HOT, "temperature": 0}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
TEXT = {"type": "string", "minLength": 20, "maxLength": 40}
SCHEMA = {
    "type": "object",
    "properties": {"name": TEXT, "town": TEXT, "ages": {"type": "array", "items": NUMBER, "minItems": 20}},
    "required": ["name", "town", "ages"],
}
TOOL = {"type": "object", "properties": {"left": NUMBER, "why": TEXT}, "required": ["left", "why"]}
LOGPROB_ERROR = 0.01
"""Between the same draws in batches of another size."""
SEEDLESS, RATE, BUDGET = "seedless", "rate", "budget"
KINDS: Mapping[str, Mapping[str, Any]] = {
    "seeded": DRAWN,
    SEEDLESS: HOT,
    "greedy": COOL,
    "penalties": {**DRAWN, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    # All but the end of the first one comes; the second one ends the stream.
    "stop": {**COOL, "stop": [", 4, 5, 6, 7, 9", "35, 36"]},
    "logprobs": {**DRAWN, "logprobs": True, "top_logprobs": 3},
    "n": {**DRAWN, "n": 2},
    "schema": {
        "seed": 7,
        "messages": [{"role": "user", "content": "Ada is 36 years old. Write it as JSON with name and age."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    },
    "tools": {
        "seed": 7,
        "messages": [{"role": "user", "content": "What is 3 + 4? Use add."}],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": TOOL}}],
        "tool_choice": "required",
    },
    RATE: DRAWN,
    BUDGET: {"temperature": 1.8, "seed": 7, "ignore_eos": True},
}
"""Further fields of the body, by kind."""


def body_of(kind: str, model: str) -> dict[str, Any]:
    asked = [{"role": "user", "content": "Count from 1 to 60."}]
    return {"model": model, "messages": asked, "stream": True, "logprobs": False, **KINDS[kind]}


class ReceivedStream:
    """Filled chunk by chunk; `attempt` is there at its end."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.attempt = ClientAttempt("")
        self.moves = 0
        self.longest_pause_s = 0.0
        """Between two chunks."""
        self._said: dict[int, str] = defaultdict(str)
        """By choice: text, calls of tools and the reason of the end."""
        self._logprobs: list[tuple[str, float]] = []
        self._last_s = 0.0

    def take(self, chunk: Mapping[str, Any]) -> None:
        now_s = time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, now_s - (self._last_s or now_s))
        self._last_s = now_s
        for choice in chunk.get("choices", ()):
            pieces = [choice["delta"].get("content"), choice.get("finish_reason")]
            for call in choice["delta"].get("tool_calls") or ():
                pieces += [call["function"].get("name"), call["function"].get("arguments")]
            self._said[choice["index"]] += "".join(filter(None, pieces))
            shown = (choice.get("logprobs") or {}).get("content") or ()
            self._logprobs += [(token["token"], token["logprob"]) for token in shown]
        self.moves += len((chunk.get("fairgate") or {}).get("replica_moves", ()))

    @property
    def failure(self) -> str:
        """Why it broke; empty: it came to its regular end."""
        attempt = self.attempt
        is_broken = attempt.status != 200 or attempt.code or not attempt.is_whole
        return f"{attempt.status} {attempt.code or 'without an end'}" if is_broken else ""

    def differs(self, undisturbed: ReceivedStream) -> str:
        """How it is other than the undisturbed one; empty: token for token the same."""
        ours, theirs = self.attempt, undisturbed.attempt
        if ours.prompt_tokens != theirs.prompt_tokens:
            return f"{ours.prompt_tokens} prompt tokens, undisturbed {theirs.prompt_tokens}"
        if self.kind == SEEDLESS:  # each run has draws of its own
            return ""
        if self._said != undisturbed._said or ours.usage_tokens != theirs.usage_tokens:
            return f"{dict(self._said)}, undisturbed {dict(undisturbed._said)}"
        both = zip(self._logprobs, undisturbed._logprobs, strict=True)
        if any(mine != its or abs(one - other) > LOGPROB_ERROR for (mine, one), (its, other) in both):
            return "its log probabilities"
        return ""
