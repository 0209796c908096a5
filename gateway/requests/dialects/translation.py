"""A request of another dialect as a chat completion; refusals in that dialect's own field names. Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import msgspec

from gateway.domain.call import Call
from gateway.errors import ApiError
from gateway.requests.parse import RequestContext, parse_chat
from gateway.requests.schemas import ChatCompletionRequest

_QUOTED = re.compile(r"'([a-z_]+[^' ]*)'")


class LeftOut(NamedTuple):
    """What of a request was not passed on, for the answer's `fairgate.left_out`."""

    param: str
    why: str

    def as_json(self) -> dict[str, str]:
        return self._asdict()


class Translation(msgspec.Struct):
    """What a request of another dialect asks for."""

    chat: ChatCompletionRequest
    names: dict[str, str]
    """Fields of `chat` and those that they came from, such as `messages[2].content`: `input[1].output`. What
    lies within a field is named likewise."""
    left_out: list[LeftOut]

    def parse(self, context: RequestContext) -> Call:
        """Raises `ApiError` in the request's own field names."""
        try:
            return parse_chat(self.chat, context)
        except ApiError as error:
            raise self.in_own_words(error) from None

    def in_own_words(self, error: ApiError) -> ApiError:
        """The refusal of `chat` as one of the request that it came from."""
        message = _QUOTED.sub(lambda found: f"'{self._own(found[1])}'", error.message)
        return replace(error, message=message, param=error.param and self._own(error.param))

    def _own(self, field: str) -> str:
        prefix = field
        while prefix not in self.names:
            cut = max(prefix.rfind("."), prefix.rfind("["))
            if cut < 0:
                return field
            prefix = prefix[:cut]
        return self.names[prefix] + field[len(prefix) :]
