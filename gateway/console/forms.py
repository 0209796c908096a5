"""Reads a submitted form: bounded, each field once, without control characters; and keeps one that came
without a session until its person has logged in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote_plus

import msgspec
from litestar import Request

from gateway import errors
from gateway.http.request_body import read_form_body

MAX_FORM_BYTES = 64 * 1024
MAX_FIELDS = 32
MAX_SHOWN_CHARACTERS = 16_000
"""Of a value that is shown again, or taken from an address."""
TOKEN_FIELD = "form_token"
SECRET_FIELDS = ("password", "repeat", "current", "session_password")
"""Of all forms; what was typed there is never kept."""
NOT_TYPED_FIELDS = (TOKEN_FIELD, "username")
"""The pages' own; the second one tells password managers whose password is asked for."""
MAX_UNSENT_BYTES = MAX_FORM_BYTES - 2_048
"""Of a form in the form of the log-in."""


async def read_form(
    request: Request[Any, Any, Any], timeout_s: float, lines: Collection[str] = ()
) -> Mapping[str, str]:
    """The fields of the body. Raises `ApiError` (400, 408, 413, 415)."""
    return parse_form(await read_form_body(request, MAX_FORM_BYTES, timeout_s), lines)


def parse_form(body: bytes, lines: Collection[str] = ()) -> dict[str, str]:
    """The fields of a body. `lines`: names of those that may have several lines. Raises `ApiError` (400),
    which names the field."""
    try:
        pairs = parse_qsl(
            body.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(body),
            encoding="utf-8",
            errors="strict",
            max_num_fields=MAX_FIELDS,
        )
    except (ValueError, UnicodeError):
        raise errors.bad_request(
            f"The form cannot be read: it must be URL-encoded UTF-8 with at most {MAX_FIELDS} fields."
        ) from None
    values = dict(pairs)
    if len(values) < len(pairs):
        raise errors.bad_request("The form has a field twice.")
    for name in values.keys() & lines:
        values[name] = values[name].replace("\r\n", "\n")
    for name, value in values.items():
        if any(
            (character < " " and not (character == "\n" and name in lines)) or character == "\x7f"
            for character in value
        ):
            raise errors.bad_request(f"The field {name[:64]!r} holds a control character.", name[:64])
    return values


@dataclass(frozen=True)
class UnsentForm:
    """A form that was not taken, because the session had ended. It is never taken by itself: it is shown to
    the person who logs in, who sends it or does not."""

    path: str
    values: Mapping[str, str]
    secrets: tuple[str, ...]
    """Fields whose values were not kept; they are asked for again."""


def unsent(path: str, values: Mapping[str, str]) -> str:
    """The form as the value of a field of the log-in; empty: it is too long to be kept."""
    kept = {name: value for name, value in values.items() if name not in (*NOT_TYPED_FIELDS, *SECRET_FIELDS)}
    form = UnsentForm(path, kept, tuple(name for name in values if name in SECRET_FIELDS))
    text = msgspec.json.encode(form).decode()
    return text if len(quote_plus(text)) <= MAX_UNSENT_BYTES else ""


def unsent_of(text: str) -> UnsentForm | None:
    """The form that `unsent` wrote; None: there is none."""
    try:
        return msgspec.json.decode(text, type=UnsentForm) if text else None
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def typed_fields(values: Mapping[str, str], *names: str) -> dict[str, str]:
    """What was typed into these fields; they are never those of passwords."""
    return {name: values.get(name, "")[:MAX_SHOWN_CHARACTERS] for name in names}
