"""Joins the parts of a streamed chat answer into one message, as OpenAI's clients do. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.upstream.base import Part

JOINED = ("reasoning_content", "reasoning", "refusal")


def message(text: str, parts: Sequence[Part]) -> dict[str, Any]:
    """The content is null if there are parts and no text."""
    is_null = not text and parts and not any("content" in part for part in parts)
    found: dict[str, Any] = {"role": "assistant", "content": None if is_null else text, "refusal": None}
    for name in JOINED:
        pieces = [part[name] for part in parts if name in part]
        if pieces:
            found[name] = "".join(pieces)
    functions = [part["function_call"] for part in parts if "function_call" in part]
    if functions:
        found["function_call"] = _function(functions)
    fragments = [fragment for part in parts for fragment in part.get("tool_calls", ())]
    if fragments:
        found["tool_calls"] = _tool_calls(fragments)
    annotations = [annotation for part in parts for annotation in part.get("annotations", ())]
    if annotations:
        found["annotations"] = annotations
    return found


def _tool_calls(fragments: Sequence[Part]) -> list[dict[str, Any]]:
    """By index, which may have gaps."""
    by_index: dict[int, list[Part]] = {}
    for fragment in fragments:
        by_index.setdefault(fragment["index"], []).append(fragment)
    calls: list[dict[str, Any]] = []
    for _, found in sorted(by_index.items()):
        functions = [fragment["function"] for fragment in found if "function" in fragment]
        calls.append(
            {
                "id": _first(found, "id"),
                "type": _first(found, "type") or "function",
                "function": _function(functions),
            }
        )
    return calls


def _first(fragments: Sequence[Part], name: str) -> str:
    return next((fragment[name] for fragment in fragments if fragment.get(name)), "")


def _function(fragments: Sequence[Part]) -> dict[str, str]:
    return {
        "name": "".join([fragment.get("name", "") for fragment in fragments]),
        "arguments": "".join([fragment.get("arguments", "") for fragment in fragments]),
    }
