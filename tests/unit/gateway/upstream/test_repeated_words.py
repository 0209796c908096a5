"""Whether a server's words are those of the request, which no log may have."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.upstream.base import Wording
from gateway.upstream.openai.request import MAX_COMPARED, repeats

SECRET = "the merger of Acme and Globex is on Friday"
TOOLS = {"tools": [{"type": "function", "function": {"description": SECRET}}]}


@pytest.mark.parametrize(
    ("wording", "said", "is_repeated"),
    [
        ({"prompt": SECRET}, f"bad input: {SECRET}", True),
        ({"prompt": SECRET}, "bad input: 'The MERGER of acme, and'", True),
        ({"prompt": SECRET}, "the model is not loaded", False),
        ({"prompt": SECRET}, "", False),
        ({"prompt": SECRET}, "of Acme", True),
        ({"prompt": "password"}, "value 'password' is not valid", True),
        ({"prompt": [1, 2, 3]}, "token 1, 2, 3 is out of range", False),
        ({"messages": [{"role": "user", "content": [{"text": SECRET}]}]}, f"input={SECRET[:30]}", True),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no such person", False),
        ({"messages": [{"role": "user", "content": "hi"}], "fields": TOOLS}, SECRET[-24:], True),
        ({"prompt": "x" * (MAX_COMPARED + 1)}, "the model is not loaded", True),
    ],
)
def test_words_of_the_request_are_known(wording: dict[str, Any], said: str, is_repeated: bool) -> None:
    assert repeats(Wording(**wording), said) is is_repeated
