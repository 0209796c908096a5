"""Reads submitted forms (bounded, each field once, no control characters) and keeps one through a log-in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote_plus

import msgspec

from gateway import errors
from gateway.http.asgi import Request
from gateway.http.request_body import read_form_body

MAX_FORM_BYTES = 64 * 1024
MAX_FIELDS = 32
MAX_SHOWN_CHARACTERS = 16_000
"""Of a value that is shown again or taken from an address."""
TOKEN_FIELD = "form_token"
SECRET_FIELDS = ("password", "repeat", "current", "session_password")
"""Never kept or shown again."""
NOT_TYPED_FIELDS = (TOKEN_FIELD, "username")
"""The pages' own fields; `username` tells password managers whose password it is."""
MAX_UNSENT_BYTES = MAX_FORM_BYTES - 2_048
"""Of a kept form inside the log-in form."""


async def read_form(request: Request, timeout_s: float, lines: Collection[str] = ()) -> Mapping[str, str]:
    """The fields of the body. Raises `ApiError` (400, 408, 413, 415)."""
    return parse_form(await read_form_body(request, MAX_FORM_BYTES, timeout_s), lines)


def parse_form(body: bytes, lines: Collection[str] = ()) -> dict[str, str]:
    """`lines`: multi-line fields. Raises `ApiError` (400), which names the field."""
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
            f"The form cannot be read. It must be URL-encoded UTF-8 with at most {MAX_FIELDS} fields."
        ) from None
    values = dict(pairs)
    if len(values) < len(pairs):
        raise errors.bad_request("The form has the same field twice.")
    for name in values.keys() & lines:
        values[name] = values[name].replace("\r\n", "\n")
    for name, value in values.items():
        if any(
            (character < " " and not (character == "\n" and name in lines)) or character == "\x7f"
            for character in value
        ):
            raise errors.bad_request(f"The field {name[:64]!r} contains a control character.", name[:64])
    return values


@dataclass(frozen=True)
class UnsentForm:
    """A form submitted after the session had ended. It is never submitted automatically, only shown again."""

    path: str
    values: Mapping[str, str]
    secrets: tuple[str, ...]
    """Fields whose values were not kept; asked for again."""


def unsent(path: str, values: Mapping[str, str]) -> str:
    """The form as a value for a hidden field; empty: it is too long."""
    kept = {name: value for name, value in values.items() if name not in (*NOT_TYPED_FIELDS, *SECRET_FIELDS)}
    form = UnsentForm(path, kept, tuple(name for name in values if name in SECRET_FIELDS))
    text = msgspec.json.encode(form).decode()
    return text if len(quote_plus(text)) <= MAX_UNSENT_BYTES else ""


def unsent_of(text: str) -> UnsentForm | None:
    """Inverse of `unsent`; None: there is no form."""
    try:
        return msgspec.json.decode(text, type=UnsentForm) if text else None
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def typed_fields(values: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: values.get(name, "")[:MAX_SHOWN_CHARACTERS] for name in names}
