"""A request of another dialect as a chat completion; refusals in that dialect's own field names. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from gateway import errors
from gateway.domain.account import Account
from gateway.domain.call import Call
from gateway.errors import ApiError
from gateway.requests.parse import RequestContext, parse_chat
from gateway.requests.schemas import ChatCompletionRequest

MOST_NOTES = 32
_NAMED = re.compile(r"(?<=')[a-z_]+[^' ]*(?=')|\bmax_tokens\b")


class LeftOut(NamedTuple):
    """What of a request was not passed on, for the answer's `fairgate.left_out`."""

    param: str
    why: str


def with_notes(account: Account, left_out: Sequence[LeftOut]) -> dict[str, Any]:
    """The `fairgate` object of an answer."""
    notes = {"left_out": [each._asdict() for each in left_out]} if left_out else {}
    return account.as_json() | notes


class Translation(msgspec.Struct):
    """What a request of another dialect asks for."""

    chat: ChatCompletionRequest
    names: dict[str, str]
    """Fields of `chat` and those that they came from, such as `messages[2].content`: `input[1].output`. What
    lies within a field is named likewise."""
    left_out: list[LeftOut]

    def leave_out(self, param: str, why: str) -> None:
        """Notes it, of what is left out for the same reason the first."""
        if len(self.left_out) < MOST_NOTES and all(note.why != why for note in self.left_out):
            self.left_out.append(LeftOut(param, why))

    def parse(self, context: RequestContext) -> Call:
        """Raises `ApiError` in the request's own field names."""
        try:
            call = parse_chat(self.chat, context)
        except ApiError as error:
            raise self.in_own_words(error) from None
        if not call.not_enforced:
            return call
        notes = (note.partition(": ") for note in call.not_enforced)
        said = tuple(self._own(field) + colon + what for field, colon, what in notes)
        return msgspec.structs.replace(call, not_enforced=said)

    def in_own_words(self, error: ApiError) -> ApiError:
        """The refusal of `chat` as one of the request that it came from."""
        message = _NAMED.sub(lambda found: self._own(found[0]), error.message)
        return replace(error, message=message, param=error.param and self._own(error.param))

    def _own(self, field: str) -> str:
        prefix = field
        while prefix not in self.names:
            cut = max(prefix.rfind("."), prefix.rfind("["))
            if cut < 0:
                return field
            prefix = prefix[:cut]
        return self.names[prefix] + field[len(prefix) :]


def required(value: str | None, path: str) -> str:
    """Raises `ApiError` for a field that is left out."""
    if value is None:
        raise errors.bad_request(
            f"Missing required parameter: '{path}'.", path, code="missing_required_parameter"
        )
    return value
