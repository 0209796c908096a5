"""The events of a streamed response, in the order that clients of OpenAI's Responses API count on.

created, in_progress; for each item: output_item.added, its parts and deltas, their `done`s, output_item.done;
then completed, incomplete or failed, with usage and output. A whole answer is made by the same writer.
https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.messages import TokenLogprob
from gateway.domain.account import Account
from gateway.domain.call import Call
from gateway.domain.ids import shown_id
from gateway.errors import ApiError
from gateway.requests.dialects.chat import FINISH_REASONS, shown_logprobs
from gateway.requests.dialects.dialect import KEEP_ALIVE, Choice, server_sent
from gateway.requests.dialects.translation import Translation, with_notes
from gateway.requests.run import Begun, Closed, Event, InLine, SequenceEnded, SequenceOutput, Silence
from gateway.upstream.base import Part

AFTER_TEXT = frozenset({"refusal", "tool_calls", "function_call"})
"""Parts that follow the text in a whole answer."""
TEXTS = {"output_text": "text", "refusal": "refusal", "reasoning_text": "text", "function_call": "arguments"}
"""The field with the text of a content part or of a call."""
ITEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("msg_", {"role": "assistant"}),
    "reasoning": ("rs_", {"summary": [], "encrypted_content": None}),
    "function_call": ("fc_", {"arguments": ""}),
}
"""By type: what ids begin with, and fields."""


class _Item(msgspec.Struct):
    """An item of the output as it grows."""

    shown: dict[str, Any]
    place: dict[str, Any]
    """In events: its id and index, and the index of its last part."""
    pieces: list[str] = []
    """Of the text of its last part, or of a call's arguments."""

    def fill(self) -> dict[str, Any]:
        """Joins the pieces. Returns what they are of."""
        found: dict[str, Any] = self.shown["content"][-1] if "content" in self.shown else self.shown
        found[TEXTS[found["type"]]] = "".join(self.pieces)
        self.pieces = []
        return found


class ResponseWriter:
    """Of one response. Text and reasoning follow each other; calls may run side by side."""

    def __init__(self, call: Call, response: dict[str, Any], translation: Translation) -> None:
        """`response`: the object as it is in progress."""
        self._call = call
        self._response = response
        self._translation = translation
        self._number = 0
        self._has_begun = False
        self._items: list[_Item] = []
        self._open: _Item | None = None
        """The item that is open beside the calls: a message or reasoning."""
        self._calls: dict[int, _Item] = {}
        """By the index that the server gave them."""
        self._ended: SequenceEnded | None = None

    def write(self, event: Event, refusal: ApiError | None = None) -> bytes:
        match event:
            case InLine():
                return b""
            case Silence():
                return KEEP_ALIVE
            case Begun():
                return self._begin()
            case SequenceOutput(text=text, logprobs=logprobs, parts=parts):
                found = [self._part(part) for part in parts]
                if text or logprobs:
                    found.append(self._text("message", "output_text", text, logprobs))
                return b"".join(found)
            case SequenceEnded():
                self._ended = event
                return self._close_all()
            case Closed(account=account):
                return self._end(account, refusal)

    def whole(self, choice: Choice, account: Account) -> dict[str, Any]:
        """The response of a whole answer: reasoning, text with what is about it, then calls and the like."""
        after = [part for part in choice.parts if not AFTER_TEXT.isdisjoint(part)]
        before = [part for part in choice.parts if AFTER_TEXT.isdisjoint(part)]
        self.write(SequenceOutput(0, "".join(choice.text), choice.logprobs, before))
        self.write(SequenceOutput(0, "", (), after))
        self.write(SequenceEnded(0, choice.finish or "", choice.outcome))
        return self._final(account)

    def _final(self, account: Account, refusal: ApiError | None = None) -> dict[str, Any]:
        details: dict[str, Any] = {}
        if refusal is not None:
            status = "failed"
            details["error"] = self._translation.in_own_words(refusal).late_payload()["error"]
        elif (reason := self._cut_by()) is not None:
            status, details["incomplete_details"] = "incomplete", {"reason": reason}
        else:
            status = "completed"
            details["completed_at"] = self._call.created + round(account.times.e2e_s or 0)
        details |= {"status": status, "output": [item.shown for item in self._items]}
        details |= {"usage": usage(account), "fairgate": with_notes(account, self._translation.left_out)}
        return self._response | details

    def _begin(self) -> bytes:
        self._has_begun = True
        return self._event("response.created", response=self._response) + self._event(
            "response.in_progress", response=self._response
        )

    def _end(self, account: Account, refusal: ApiError | None) -> bytes:
        # A client reads no response before it was created, not even a failed one.
        before = b"" if self._has_begun else self._begin()
        # What a failure leaves open is shown as far as it came, without events: no client runs half a call.
        for item in self._items:
            if item.shown["status"] == "in_progress":
                item.fill()
                item.shown["status"] = "incomplete"
        response = self._final(account, refusal)
        return before + self._event(f"response.{response['status']}", response=response)

    def _cut_by(self) -> str | None:
        """Why the answer is not complete; None: it is."""
        if self._ended is None:
            return None
        outcome = self._ended.outcome
        if outcome is not None and outcome.finish_word == "content_filter":
            return "content_filter"
        return "max_output_tokens" if FINISH_REASONS.get(self._ended.finish) == "length" else None

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return server_sent(event, kind)

    # ------------------------------------------------------------ messages and reasoning

    def _text(
        self, item_type: str, part_type: str, text: str, logprobs: Sequence[TokenLogprob] = ()
    ) -> bytes:
        opened, item = self._open_part(item_type, part_type)
        item.pieces.append(text)
        said: dict[str, Any] = {"delta": text}
        if part_type == "output_text":
            said["logprobs"] = shown_logprobs(logprobs, has_top=bool(self._call.sampling.logprobs))
            item.shown["content"][-1]["logprobs"] += said["logprobs"]
        return opened + self._event(f"response.{part_type}.delta", **item.place, **said)

    def _open_part(self, item_type: str, part_type: str) -> tuple[bytes, _Item]:
        """Opens an item and its part, unless they are open; closes others."""
        item, found = self._open, b""
        if item is None or item.shown["type"] != item_type:
            found = self._close_text()
            added, item = self._add_item(item_type, content=[])
            self._open = item
            found += added
        elif item.shown["content"][-1]["type"] == part_type:
            return b"", item
        else:
            found = self._close_part(item)
        part: dict[str, Any] = {"type": part_type, TEXTS[part_type]: ""}
        if part_type == "output_text":
            part |= {"annotations": [], "logprobs": []}
        item.place["content_index"] = len(item.shown["content"])
        item.shown["content"].append(part)
        return found + self._event("response.content_part.added", **item.place, part=part), item

    def _close_part(self, item: _Item) -> bytes:
        part = item.fill()
        said = {name: part[name] for name in (TEXTS[part["type"]], "logprobs") if name in part}
        done = self._event(f"response.{part['type']}.done", **item.place, **said)
        return done + self._event("response.content_part.done", **item.place, part=part)

    def _close_text(self) -> bytes:
        item, self._open = self._open, None
        return b"" if item is None else self._close_part(item) + self._done(item)

    # ------------------------------------------------------------ parts other than text

    def _part(self, part: Part) -> bytes:
        found = b""
        if reasoning := part.get("reasoning_content") or part.get("reasoning"):
            found += self._text("reasoning", "reasoning_text", reasoning)
        if refusal := part.get("refusal"):
            found += self._text("message", "refusal", refusal)
        if content := part.get("content"):
            found += self._text("message", "output_text", content)
        for annotation in part.get("annotations", ()):
            found += self._annotation(annotation)
        for fragment in part.get("tool_calls", ()):
            found += self._call_fragment(
                fragment["index"], fragment.get("id", ""), fragment.get("function", {})
            )
        if function := part.get("function_call"):
            found += self._call_fragment(0, "", function)
        return found

    def _annotation(self, annotation: Part) -> bytes:
        opened, item = self._open_part("message", "output_text")
        # A chat has it in a field named as its type.
        said = annotation.get(str(annotation.get("type")))
        shown = {"type": annotation.get("type")} | said if isinstance(said, dict) else annotation
        annotations = item.shown["content"][-1]["annotations"]
        annotations.append(shown)
        place = item.place | {"annotation_index": len(annotations) - 1}
        return opened + self._event("response.output_text.annotation.added", **place, annotation=shown)

    def _call_fragment(self, index: int, call_id: str, function: Part) -> bytes:
        found, item, name = b"", self._calls.get(index), function.get("name") or ""
        if item is None:
            call_id = call_id or shown_id(self._call.request_id, "call_") + f"_{index}"
            found = self._close_text()
            added, item = self._add_item("function_call", call_id=call_id, name=name)
            self._calls[index] = item
            found += added
        else:
            item.shown["name"] += name
        if arguments := function.get("arguments"):
            item.pieces.append(arguments)
            found += self._event("response.function_call_arguments.delta", **item.place, delta=arguments)
        return found

    # ------------------------------------------------------------ items

    def _add_item(self, item_type: str, **fields: Any) -> tuple[bytes, _Item]:
        number = len(self._items)
        prefix, more = ITEMS[item_type]
        item_id = shown_id(self._call.request_id, prefix) + (f"_{number}" if number else "")
        shown = {"id": item_id, "type": item_type, "status": "in_progress"} | more | fields
        item = _Item(shown, {"item_id": item_id, "output_index": number})
        self._items.append(item)
        return self._event("response.output_item.added", output_index=number, item=shown), item

    def _done(self, item: _Item) -> bytes:
        item.shown["status"] = "incomplete" if self._cut_by() else "completed"
        place = item.place["output_index"]
        return self._event("response.output_item.done", output_index=place, item=item.shown)

    def _close_all(self) -> bytes:
        """An answer without anything is a message without text."""
        found = b"" if self._items else self._open_part("message", "output_text")[0]
        found += self._close_text()
        for item in self._calls.values():
            call = item.fill()
            said = {name: call[name] for name in ("name", "arguments")}
            found += self._event("response.function_call_arguments.done", **item.place, **said)
            found += self._done(item)
        return found


def usage(account: Account) -> dict[str, Any]:
    input_tokens, output_tokens = account.charged.input_tokens, account.charged.output_tokens
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": account.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": min(account.reasoning_tokens, output_tokens)},
        "total_tokens": input_tokens + output_tokens,
    }
