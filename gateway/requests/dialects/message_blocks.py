"""Messages of Anthropic's API, and their blocks, as messages of a chat. Pure.

SDKs send the blocks of their answers back with all fields: further ones within a block are not read. A tool's
result says itself whether it is an error: `is_error` is not read, as vLLM does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway import errors
from gateway.requests.dialects.translation import Translation, required
from gateway.requests.schemas import ChatMessage, ContentPart, InputFile, MediaUrl, ToolCall, ToolFunction

MEDIA_TYPES = ("image", "document")
BLOCK_TYPES = ("text", *MEDIA_TYPES, "search_result", "tool_use", "tool_result", "thinking")
"""Beside `redacted_thinking`, which is taken and left out."""
BLOCK_TYPES_LEFT_OUT = ("server_tool_use", "mcp_tool_use", "container_upload", "tool_reference", "compaction")
"""Beside those that end with `_tool_result`: of tools that only Anthropic runs."""
ROLES = ("user", "assistant", "system")


class BlockSource(msgspec.Struct):
    """The content of an image or a document."""

    type: str
    media_type: str = ""
    data: str | None = None
    url: str | None = None


class Block(msgspec.Struct):
    """A block of a message's content; further fields, such as `cache_control`, are not read."""

    type: str
    text: str | None = None
    thinking: str | None = None
    source: BlockSource | str | None = None
    """A text of a `search_result`, which has a `title` and `content`, too."""
    title: str | None = None
    """Of a document."""
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    """Of a tool's call, as `id` and `name`."""
    tool_use_id: str | None = None
    content: str | list[Block] | dict[str, Any] | None = None
    """Of a tool's result."""


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[Block]


Placed = tuple[str, Block]
"""A block, after the field that it came from."""


def _placed(content: str | Sequence[Block], path: str) -> str | list[Placed]:
    if isinstance(content, str):
        return content
    return [(f"{path}[{position}]", block) for position, block in enumerate(content)]


class Turns:
    """Makes messages of a chat. Tools' results become messages of their own, before the rest of theirs: they
    must follow the calls."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._messages = translation.chat.messages

    def add_all(self, system: str | list[Block] | None, messages: Sequence[Message]) -> None:
        """Raises `ApiError`."""
        if system:
            self._translation.names["messages[0].content"] = "system"
            self._add(ChatMessage("system"), "system", _placed(system, "system"))
        for index, message in enumerate(messages):
            at = f"messages[{index}]"
            if message.role not in ROLES:
                raise errors.bad_request(
                    f"Invalid '{at}.role': '{message.role[:64]}' is not one of {', '.join(ROLES)}.",
                    f"{at}.role",
                )
            content = _placed(message.content, f"{at}.content")
            if message.role == "user" and not isinstance(content, str):
                content = self._add_results(content)
                if not content and message.content:
                    continue
            self._add(ChatMessage(message.role), at, content)

    def _add_results(self, blocks: Sequence[Placed]) -> list[Placed]:
        """Returns the other blocks, with what a tool's message cannot hold: in OpenAI's API it is text."""
        rest: list[Placed] = []
        for path, block in blocks:
            if block.type != "tool_result":
                rest.append((path, block))
                continue
            if isinstance(block.content, dict):
                raise errors.bad_request(
                    f"'{path}.content' must be text or a list of blocks.", f"{path}.content"
                )
            content = _placed(block.content or "", f"{path}.content")
            if not isinstance(content, str):
                rest += [each for each in content if each[1].type in MEDIA_TYPES]
                content = [each for each in content if each[1].type not in MEDIA_TYPES]
            result = ChatMessage("tool", tool_call_id=required(block.tool_use_id, f"{path}.tool_use_id"))
            self._add(result, path, content)
        return rest

    def _add(self, message: ChatMessage, source: str, content: str | Sequence[Placed]) -> None:
        """`source`: the field that it came from."""
        at, names = f"messages[{len(self._messages)}]", self._translation.names
        names |= {at: source, f"{at}.tool_calls": f"{source}.content"}
        names[f"{at}.tool_call_id"] = f"{source}.tool_use_id"
        if isinstance(content, str):
            message.content = content
        else:
            message.content = []
            for block_path, block in content:
                self._add_block(message, block, block_path)
            if message.role == "assistant":
                message.content = message.content or None
                message.reasoning_content = "".join(block.thinking or "" for _, block in content) or None
        self._messages.append(message)

    def _add_block(self, message: ChatMessage, block: Block, path: str) -> None:
        """Adds to a message that will be the next one. Raises `ApiError`."""
        names, at = self._translation.names, f"messages[{len(self._messages)}]"
        assert isinstance(message.content, list), "it has blocks"
        match block.type:
            case "text":
                part = ContentPart("text", text=required(block.text, f"{path}.text"))
            case "image" | "document":
                part = _media(block, path)
            case "search_result":
                said = block.content if isinstance(block.content, list) else []
                part = _text(block.title, block.source, *(each.text for each in said))
            case "tool_use" if message.role == "assistant":
                message.tool_calls = message.tool_calls or []
                call_at = f"{at}.tool_calls[{len(message.tool_calls)}]"
                names |= {call_at: path, f"{call_at}.function": path}
                names[f"{call_at}.function.arguments"] = f"{path}.input"
                arguments = msgspec.json.encode(block.input or {}).decode()
                function = ToolFunction(required(block.name, f"{path}.name"), arguments)
                message.tool_calls.append(ToolCall(required(block.id, f"{path}.id"), function))
                return
            case "thinking" | "redacted_thinking" if message.role == "assistant":
                return  # `_add` has joined it
            case kind if kind in BLOCK_TYPES_LEFT_OUT or kind.endswith("_tool_result"):
                why = f"Blocks of the type '{kind[:64]}' belong to what is not run here."
                self._translation.leave_out(path, why)
                return
            case kind:
                raise errors.bad_request(
                    f"'{path}' is of type '{kind[:64]}': only blocks of the types"
                    f" {', '.join(map(repr, BLOCK_TYPES))} can be taken, calls and thinking from the"
                    " assistant, results from the user.",
                    f"{path}.type",
                )
        part_at = f"{at}.content[{len(message.content)}]"
        names[part_at] = path
        if block.type in MEDIA_TYPES:
            kind = block.source.type if isinstance(block.source, BlockSource) else ""
            names[f"{part_at}.image_url.url"] = f"{path}.source.{'url' if kind == 'url' else 'data'}"
            names[f"{part_at}.file.file_data"] = f"{path}.source.data"
            names[f"{part_at}.file.filename"] = f"{path}.title"
        message.content.append(part)


def _media(block: Block, path: str) -> ContentPart:
    """Raises `ApiError`."""
    match block.type, block.source:
        case "document", BlockSource(type="text", data=str(data)):
            return _text(block.title, data)
        case "document", BlockSource(type="base64", media_type=media_type, data=str(data)):
            return ContentPart("file", file=InputFile(f"data:{media_type};base64,{data}", block.title))
        case "image", BlockSource(type="base64", media_type=media_type, data=str(data)):
            return ContentPart("image_url", image_url=MediaUrl(f"data:{media_type};base64,{data}"))
        case "image", BlockSource(type="url", url=str(url)):
            return ContentPart("image_url", image_url=MediaUrl(url))
    raise errors.bad_request(
        f"Invalid '{path}.source': it must be of type 'base64' with 'media_type' and 'data', an image's also"
        " of type 'url' with 'url', and a document's of type 'text' with 'data'.",
        f"{path}.source",
    )


def _text(*lines: object) -> ContentPart:
    return ContentPart("text", text="\n".join(line for line in lines if line and isinstance(line, str)))
