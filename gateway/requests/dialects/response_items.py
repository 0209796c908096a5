"""Items of a Responses request as messages of a chat. Pure.

SDKs send the items of their answers back with all fields: further ones within an item are not read.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway import errors
from gateway.requests.dialects.translation import Translation, required
from gateway.requests.schemas import ChatMessage, ContentPart, InputFile, MediaUrl, ToolCall, ToolFunction

Content = str | list[ContentPart] | None
STATELESS = "Nothing is stored here: send the conversation so far in 'input', and leave it out."
ROLES = ("user", "assistant", "system", "developer")
ITEM_TYPES = (
    *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call"),
    "custom_tool_call_output",
)
LEFT_OUT = re.compile(
    "mcp_.+|.+_call|.+_call_output|tool_search_output|program(_output)?|compaction(_trigger)?|additional_tools"
    "|configuration_update"
)
"""Items of OpenAI's store, and of tools that only it runs: nothing of them reaches the model."""


class InputPart(msgspec.Struct):
    """A part of an item's content."""

    type: str = ""
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None
    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None


class InputItem(msgspec.Struct):
    """A message, a tool call, its output or an earlier answer's reasoning."""

    type: str = "message"
    role: str = ""
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    """Of reasoning."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    """Of a freeform tool's call."""
    output: str | list[InputPart] | dict[str, Any] | None = None


class InputItems:
    """Makes messages of items. An assistant's reasoning, text and calls in a row become one message."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._messages = translation.chat.messages
        self._assistant: ChatMessage | None = None
        """The last message, while what follows may belong to it."""

    def add(self, message: ChatMessage, source: str, content_source: str) -> str:
        """`source`: what it came from; `content_source`: the field with its content. Returns its place."""
        names, at = self._translation.names, f"messages[{len(self._messages)}]"
        names[at], names[f"{at}.content"] = source, content_source
        self._messages.append(message)
        self._assistant = message if message.role == "assistant" else None
        return at

    def add_item(self, item: InputItem, source: str) -> None:
        """Raises `ApiError`."""
        match item.type:
            case "message":
                self._add_message(item, source)
            case "reasoning":
                if text := _reasoning(item):
                    message = self._of_assistant(source)
                    if message.content is not None and not message.tool_calls:
                        message = self._new_message("assistant", source)
                    message.reasoning_content = "\n".join(filter(None, [message.reasoning_content, text]))
            case "function_call" | "custom_tool_call":
                self._add_call(item, source)
            case "function_call_output" | "custom_tool_call_output":
                called = required(item.call_id, f"{source}.call_id")
                place = self.add(ChatMessage("tool", tool_call_id=called), source, f"{source}.output")
                self._translation.names[f"{place}.tool_call_id"] = f"{source}.call_id"
                self._messages[-1].content = self._content(item.output, f"{source}.output", place)
            case "item_reference":
                raise errors.unsupported_parameter(
                    source, f"'{source}' refers to a stored item. {STATELESS} SDKs do with 'store': false."
                )
            case kind if LEFT_OUT.fullmatch(kind):
                self._translation.leave_out(
                    source, f"Items of the type '{kind[:64]}' belong to tools that are not run here."
                )
            case kind:
                raise errors.bad_request(
                    f"'{source}' is of type '{kind[:64]}': only items of the types"
                    f" {', '.join(map(repr, ITEM_TYPES))} can be taken.",
                    f"{source}.type",
                )

    def _add_message(self, item: InputItem, source: str) -> None:
        if item.role not in ROLES:
            raise errors.bad_request(
                f"Invalid '{source}.role': '{item.role[:64]}' is not one of {', '.join(ROLES)}. What a tool"
                " answered is an item of the type 'function_call_output'.",
                f"{source}.role",
            )
        message = self._assistant
        if item.role != "assistant" or message is None or (message.content and not message.tool_calls):
            message = self._new_message(item.role, source)
        at = f"messages[{len(self._messages) - 1}]"
        self._translation.names[f"{at}.content"] = f"{source}.content"
        content = self._content(item.content, f"{source}.content", at)
        # What was said after calls is said before them: their outputs must follow them.
        message.content = _joined(message.content, content)

    def _add_call(self, item: InputItem, source: str) -> None:
        message = self._of_assistant(source)
        message.tool_calls = message.tool_calls or []
        at = f"messages[{len(self._messages) - 1}].tool_calls[{len(message.tool_calls)}]"
        names = self._translation.names
        names |= {at: source, f"{at}.function": source, f"{at}.id": f"{source}.call_id"}
        names.setdefault(at.rpartition("[")[0], source)
        arguments = {"input": item.input} if item.type == "custom_tool_call" else item.arguments or {}
        called = ToolFunction(
            required(item.name, f"{source}.name"),
            arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode(),
        )
        message.tool_calls.append(ToolCall(required(item.call_id, f"{source}.call_id"), called))

    def _of_assistant(self, source: str) -> ChatMessage:
        return self._assistant or self._new_message("assistant", source)

    def _new_message(self, role: str, source: str) -> ChatMessage:
        message = ChatMessage(role)
        self.add(message, source, f"{source}.content")
        return message

    def _content(self, content: object, source: str, place: str) -> Content:
        if not isinstance(content, list):
            if content is None or isinstance(content, str):
                return content
            raise errors.bad_request(f"'{source}' must be text or a list of parts.", source)
        parts = [
            self._part(part, f"{source}[{position}]", f"{place}.content[{position}]")
            for position, part in enumerate(content)
        ]
        # One text as such: some templates take no parts in an assistant's or a tool's message.
        return parts[0].text if len(parts) == 1 and parts[0].type == "text" else parts

    def _part(self, part: InputPart, source: str, at: str) -> ContentPart:
        match part.type:
            case "input_text" | "output_text" | "text":
                return ContentPart("text", text=required(part.text, f"{source}.text"))
            case "refusal":
                return ContentPart("refusal", refusal=part.refusal)
            case "input_image":
                url = _kept(part.image_url, part, f"{source}.image_url")
                self._translation.names[f"{at}.image_url"] = source
                self._translation.names[f"{at}.image_url.url"] = f"{source}.image_url"
                return ContentPart("image_url", image_url=MediaUrl(url, part.detail))
            case "input_file":
                self._translation.names[f"{at}.file"] = source
                data = _kept(part.file_data, part, f"{source}.file_data")
                return ContentPart("file", file=InputFile(data, part.filename))
        raise errors.bad_request(
            f"'{source}' is of type '{part.type[:64]}': only parts of the types 'input_text', 'output_text',"
            " 'refusal', 'input_image' (with 'image_url') and 'input_file' (with 'file_data') can be taken.",
            f"{source}.type",
        )


def _kept(content: str | None, part: InputPart, path: str) -> str:
    if content is None and part.file_id is not None:
        raise errors.unsupported_parameter(
            f"{path.rpartition('.')[0]}.file_id", f"No files are stored here: send its content in '{path}'."
        )
    return required(content, path)


def _reasoning(item: InputItem) -> str:
    parts = item.content if isinstance(item.content, list) and item.content else item.summary
    return "\n".join(part.text for part in parts or () if part.text)


def _joined(before: Content, after: Content) -> Content:
    if not before or not after:
        return before or after
    if isinstance(before, str) and isinstance(after, str):
        return f"{before}\n{after}"
    listed = [[ContentPart("text", text=said)] if isinstance(said, str) else said for said in (before, after)]
    return [*listed[0], *listed[1]]
