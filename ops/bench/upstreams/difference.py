"""Compares two answers field by field: a server's own, and the same through the gateway.

Pure. A stream is joined first: texts in order, tool calls by index. Empty (null, "", [], {}) equals absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from ops.bench.upstreams.recording import ServerAnswer

ABSENT = "-"
MAX_SHOWN = 60

REPLACED = ("id", "created", "model")
"""The gateway's own in every answer: its request id, its time, the name that the client asked for."""

ADDED = ("fairgate", "service_tier")
"""Only through the gateway, or with a value of its own."""

NOT_PASSED_ON = (
    "timings",
    "choices.*.logprobs.content.*.id",
    "choices.*.logprobs.content.*.top_logprobs.*.id",
    "data.*.encoding_format",
)
"""Facts of the server's process, and what llama.cpp has beyond OpenAI's API in tokens and embeddings."""

RANDOM = ("choices.*.message.tool_calls.*.id",)
"""Another value each time a server is asked; through the gateway it is the one that the server gave."""

ZERO_IS_ABSENT = ("usage.prompt_tokens_details.*", "usage.completion_tokens_details.*")
"""The gateway sends 0 where a server sends nothing."""

LISTS = ("content", "refusal", "tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Of log probabilities: each event has the next part of them."""


class FieldDifference(msgspec.Struct, frozen=True):
    field: str
    direct: str
    through: str

    def __str__(self) -> str:
        return f"{self.field}: {self.direct} directly, {self.through} through the gateway"


def differences(
    direct: ServerAnswer,
    through: ServerAnswer,
    *,
    varies: Collection[str] = (),
    ignored: Collection[str] = (),
) -> list[FieldDifference]:
    """For a refusal only the status is compared. `varies`: fields that differ between two direct answers."""
    if direct.status != through.status:
        return [FieldDifference("status", str(direct.status), str(through.status))]
    if direct.status >= 400:
        return []
    left, right = fields(direct), fields(through)
    skipped = _pattern([*REPLACED, *ADDED, *NOT_PASSED_ON, *ignored])
    return [
        FieldDifference(field, _shown(left, field), _shown(right, field))
        for field in sorted(left.keys() | right.keys())
        if left.get(field) != right.get(field) and field not in varies and not skipped.fullmatch(field)
    ]


def fields(answer: ServerAnswer) -> dict[str, Any]:
    """The values of an answer by their path, such as `choices.0.message.content`. Raises `ValueError`."""
    content = joined(answer.body) if answer.is_stream else json.loads(answer.body)
    zero = _pattern(ZERO_IS_ABSENT)
    return {
        path: value
        for path, value in _leaves(content)
        if value not in (None, "", [], {}) and not (value == 0 and zero.fullmatch(path))
    }


def joined(body: str) -> dict[str, Any]:
    """The whole answer that a stream's events make. Raises `ValueError` without an orderly end."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    ended = False
    for line in body.splitlines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or not data:
            continue
        if data == "[DONE]":
            ended = True
            continue
        event = json.loads(data)
        for choice in event.pop("choices", []):
            ended |= choice.get("finish_reason") is not None  # transformers sends no [DONE]
            _add_choice(choices.setdefault(choice["index"], {}), choice)
        whole |= {name: value for name, value in event.items() if value is not None}
    if not ended:
        raise ValueError(f"the stream has no end: {body[-200:]!r}")
    whole["choices"] = [choices[index] for index in sorted(choices)]
    return whole


def _add_choice(whole: dict[str, Any], event: dict[str, Any]) -> None:
    for name, value in event.items():
        if value is None:
            continue
        if name == "delta":
            _add_words(whole.setdefault("message", {}), value)
        elif name == "logprobs":
            _add_logprobs(whole.setdefault("logprobs", {}), value)
        elif name in ("text", "token_ids"):
            whole[name] = whole[name] + value if name in whole else value
        else:
            whole[name] = value


def _add_words(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = whole.setdefault("tool_calls", [])
            for call in value or ():
                _add_call(calls, call)
        elif isinstance(value, str) and name != "role":
            whole[name] = (whole.get(name) or "") + value
        elif value is not None:
            whole[name] = value


def _add_call(calls: list[dict[str, Any]], event: dict[str, Any]) -> None:
    index = event["index"]
    while len(calls) <= index:
        calls.append({"function": {"name": "", "arguments": ""}})
    call = calls[index]
    for name in ("name", "arguments"):
        call["function"][name] += (event.get("function") or {}).get(name) or ""
    call |= {name: event[name] for name in ("id", "type") if event.get(name)}


def _add_logprobs(whole: dict[str, Any], event: dict[str, Any]) -> None:
    for name, value in event.items():
        if name in LISTS:
            whole[name] = (whole.get(name) or []) + (value or [])
        elif value is not None:
            whole[name] = value


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict | list) or not value:
        yield path, value
        return
    for name, child in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(child, f"{path}.{name}" if path else str(name))


def _pattern(names: Collection[str]) -> re.Pattern[str]:
    """Matches the paths of these fields and of all within them; `*` stands for one step."""
    steps = [re.escape(name).replace(r"\*", r"[^.]+") for name in names]
    return re.compile(rf"(?:{'|'.join(steps) or '(?!)'})(?:\..*)?")


def _shown(values: dict[str, Any], field: str) -> str:
    return json.dumps(values[field])[:MAX_SHOWN] if field in values else ABSENT
