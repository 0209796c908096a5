"""Tools of other dialects as a chat's functions. Pure.

What is no function is left out with a note, unless the request insists on it: only its maker runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway import errors
from gateway.requests.dialects.translation import Translation

Choice = str | dict[str, Any] | None
_OF_FUNCTION = ("name", "description", "parameters", "strict")


def set_tools(
    translation: Translation,
    tools: Sequence[Mapping[str, Any]],
    choice: Choice,
    parallel: bool | None,
    *,
    schema_field: str,
) -> None:
    """`tools` and `choice` as the Responses API has them; `schema_field`: the client's name of a function's
    `parameters`. Raises `ApiError`."""
    chat, functions, known = translation.chat, list[dict[str, Any]](), set[str]()
    for index, tool in enumerate(tools):
        source, kind = f"tools[{index}]", tool.get("type")
        if not isinstance(kind, str):
            raise errors.bad_request(
                f"Missing required parameter: '{source}.type'; a function's is 'function'.", f"{source}.type"
            )
        if kind != "function":
            translation.leave_out(source, f"Tools of type '{kind[:64]}' are not run here, only functions.")
            continue
        at, name = f"tools[{len(functions)}]", tool.get("name")
        translation.names |= {at: source, f"{at}.function": source}
        translation.names[f"{at}.function.parameters"] = f"{source}.{schema_field}"
        if isinstance(name, str):
            known.add(name)
        function = {key: tool[key] for key in _OF_FUNCTION if tool.get(key) is not None}
        functions.append({"type": "function", "function": function})
    chosen = _chosen(choice, known)
    if functions:
        chat.tools, chat.tool_choice, chat.parallel_tool_calls = functions, chosen, parallel


def _chosen(choice: Choice, known: set[str]) -> Choice:
    """As a chat has it. Raises `ApiError` for a tool that cannot be called."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if choice is None or kind in ("auto", "none"):
        return kind
    if isinstance(choice, str):
        if choice != "required":
            raise errors.bad_request(
                f"Invalid 'tool_choice': '{choice[:64]}' is not one of auto, none, required.", "tool_choice"
            )
        if known:
            return choice
    elif kind == "allowed_tools":
        listed, mode = choice.get("tools"), choice.get("mode", "auto")
        tools = [tool for tool in listed if isinstance(tool, dict)] if isinstance(listed, list) else []
        allowed = [named for tool in tools if (named := _named(tool, known))]
        if allowed and mode in ("auto", "required"):
            return {"type": kind, "allowed_tools": {"mode": mode, "tools": allowed}}
        if mode == "auto":
            return "none"
    elif named := _named(choice, known):
        return named
    raise errors.bad_request(
        "'tool_choice' asks for what cannot be called here: only functions of 'tools' can, which the client"
        " runs. Send 'auto', or one of them.",
        "tool_choice",
    )


def _named(tool: Mapping[str, Any], known: set[str]) -> dict[str, Any] | None:
    """The function that it names, as a chat names it; None: there is none."""
    name = tool.get("name")
    if tool.get("type") != "function" or not isinstance(name, str) or name not in known:
        return None
    return {"type": "function", "function": {"name": name}}
