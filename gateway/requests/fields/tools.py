"""Checks `tools`, `tool_choice` and `response_format`, and says what they need of a server. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gateway import errors
from gateway.requests.fields.bounds import require_bounded
from gateway.requests.schemas import ChatCompletionRequest
from gateway.upstream.capabilities import Capability, need_of_field

MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Of participants and functions, as OpenAI's: a template may write them into its markup."""
MOST_NAMED, MOST_CHARACTERS = 8, 64
TOOL_CHOICES = ("none", "auto", "required")
FORMATS = {
    "json_object": Capability.JSON_OBJECT.value,
    "json_schema": Capability.JSON_SCHEMA.value,
    "structural_tag": need_of_field("structural_tag"),
}
"""Types of `response_format` beside `text`, and their needs."""
_CHOICE_FORM = (
    "'tool_choice' must be 'none', 'auto', 'required', or"
    " {'type': 'function', 'function': {'name': ...}} with the name of one of the tools."
)


def require_name(name: object, path: str) -> str:
    """Raises `ApiError` for a name that a template must not write."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise errors.bad_request(
            f"Invalid '{path}': a name has 1 to 64 letters (a-z, A-Z), digits, '_' or '-'.", path
        )
    return name


def tool_fields(request: ChatCompletionRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields to pass and needs by field; none without tools: servers refuse []. Raises `ApiError`."""
    tools, choice = request.tools, request.tool_choice
    if choice is None or choice == "none" or choice == "auto":
        forced: Capability | None = None
    else:
        forced = _forced(choice, tools)
    if not tools:
        return {}, {}
    fields: dict[str, Any] = {"tools": checked_tools(tools)}
    if choice is not None:
        fields["tool_choice"] = choice
    if request.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    if choice == "none":
        return fields, {}
    return fields, {forced or Capability.TOOLS: "tools" if forced is None else "tool_choice"}


def tool_field(tools: list[dict[str, Any]] | None, *, has_messages: bool) -> dict[str, Any]:
    """Of what is only counted, not run: empty without tools. Raises `ApiError`."""
    if tools is not None and not has_messages:
        raise errors.bad_request("'tools' go with 'messages'.", "tools")
    require_bounded("tools", tools)
    return {"tools": checked_tools(tools)} if tools else {}


def checked_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what these servers ignore. Raises `ApiError`."""
    if len(tools) > MAX_TOOLS:
        raise errors.bad_request(f"'tools' holds {len(tools)} tools; the most is {MAX_TOOLS}.", "tools")
    known = set[object]()
    for index, tool in enumerate(tools):
        _require_tool(tool, f"tools[{index}]")
        if (name := _name_of(tool)) in known:
            path = f"tools[{index}].function.name"
            raise errors.bad_request(
                f"Invalid '{path}': an earlier tool has the name '{name}' too. Leave one of them out, or"
                " rename it.",
                path,
            )
        known.add(name)
    return [_without_hints(tool) for tool in tools]


def format_needs(response_format: dict[str, Any] | None) -> dict[str, str]:
    """Empty for plain text. Raises `ApiError`."""
    if response_format is None:
        return {}
    kind = response_format.get("type")
    if kind == "text":
        return {}
    if not isinstance(kind, str) or kind not in FORMATS:
        raise errors.bad_request(
            f"Invalid 'response_format.type': it must be 'text' or one of {', '.join(sorted(FORMATS))}.",
            "response_format.type",
        )
    if kind == "json_schema":
        described = response_format.get("json_schema")
        if not isinstance(described, dict) or not isinstance(described.get("schema", {}), dict):
            raise errors.bad_request(
                "'response_format.json_schema' must be an object with 'name' and 'schema'.",
                "response_format.json_schema",
            )
        require_name(described.get("name"), "response_format.json_schema.name")
    return {FORMATS[kind]: "response_format"}


def _require_tool(tool: dict[str, Any], path: str) -> None:
    if tool.get("type") != "function":
        raise errors.bad_request(
            f"Invalid '{path}.type': only tools of the type 'function' can be taken.", f"{path}.type"
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise errors.bad_request(f"'{path}.function' must be an object with 'name'.", f"{path}.function")
    require_name(function.get("name"), f"{path}.function.name")
    if not isinstance(function.get("parameters", {}), dict | None):
        raise errors.bad_request(
            f"'{path}.function.parameters' must be a JSON schema, an object.", f"{path}.function.parameters"
        )


def _forced(choice: str | dict[str, Any], tools: list[dict[str, Any]] | None) -> Capability | None:
    """The need of a choice other than `none` and `auto`. Raises `ApiError`."""
    kind: object = choice if isinstance(choice, str) else choice.get("type")
    if not tools and (isinstance(choice, dict) or choice in TOOL_CHOICES):
        raise errors.bad_request(
            "'tool_choice' asks for a call, and the request has no 'tools': send the tools, or leave it out.",
            "tool_choice",
        )
    if kind == "required":
        return Capability.FORCED_TOOLS
    if isinstance(choice, dict) and kind == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise errors.bad_request(_CHOICE_FORM, "tool_choice")
        _require_listed([name], tools or [], "tool_choice")
        return Capability.FORCED_TOOLS
    if isinstance(choice, dict) and kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        if not isinstance(listed, list) or not listed or not all(isinstance(tool, dict) for tool in listed):
            raise errors.bad_request(
                "'tool_choice.allowed_tools.tools' must list some of 'tools', each as {'type': 'function',"
                " 'function': {'name': ...}}.",
                "tool_choice.allowed_tools.tools",
            )
        _require_listed([_name_of(tool) for tool in listed], tools or [], "tool_choice.allowed_tools.tools")
        return Capability.FORCED_TOOLS if choice["allowed_tools"].get("mode") == "required" else None
    raise errors.bad_request(_CHOICE_FORM, "tool_choice")


def _require_listed(names: Sequence[object], tools: Sequence[dict[str, Any]], path: str) -> None:
    known = [_name_of(tool) for tool in tools]
    if strange := [name for name in names if name not in known]:
        listed = ", ".join(f"'{str(name)[:MOST_CHARACTERS]}'" for name in known[:MOST_NAMED])
        more = f" and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
        raise errors.bad_request(
            f"'{path}' names '{str(strange[0])[:MOST_CHARACTERS]}', which is not one of 'tools'"
            f" ({listed}{more}): name one of them.",
            path,
        )


def _without_hints(tool: dict[str, Any]) -> dict[str, Any]:
    """Without `cache_control`, which these servers ignore."""
    plain = {name: value for name, value in tool.items() if name != "cache_control"}
    plain["function"] = {name: value for name, value in tool["function"].items() if name != "cache_control"}
    return plain


def _name_of(tool: dict[str, Any]) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None
