"""Request headers are read as sent, by either accessor."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.http.asgi import headers_of
from gateway.http.request_body import content_type, declared_length


def scope(*headers: tuple[bytes, bytes]) -> Any:
    return {"state": {}, "headers": list(headers)}


def test_of_a_header_that_comes_twice_the_first_counts() -> None:
    asked = scope((b"authorization", b"Bearer one"), (b"x", b"\xe9"), (b"authorization", b"Bearer two"))
    assert headers_of(asked) == {"authorization": "Bearer one", "x": "é"}
    assert headers_of(asked) is headers_of(asked), "made once"


@pytest.mark.parametrize(
    ("sent", "length"),
    [(b"17", 17), (b"", None), (b"-1", None), (b"1e3", None), (b"\xb2", None), (b"9" * 19, None)],
)
def test_a_length_is_a_plain_number_or_none(sent: bytes, length: int | None) -> None:
    assert declared_length(scope((b"content-length", sent))) == length
    assert declared_length(scope()) is None


def test_a_media_type_has_no_parameters_and_no_case() -> None:
    assert content_type(scope((b"content-type", b"Application/JSON; charset=utf-8"))) == "application/json"
    assert content_type(scope()) == ""
