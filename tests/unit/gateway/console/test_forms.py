"""Forms: what is read, and how a person is told what is wrong."""

from __future__ import annotations

import pytest

from gateway.console import formats
from gateway.console.form_errors import WHOLE_FORM, problem_of
from gateway.console.forms import MAX_FIELDS, MAX_SHOWN_CHARACTERS, parse_form, typed_fields
from gateway.console.names import names_in
from gateway.errors import ApiError
from tenants.errors import AlreadyExists, Invalid, LogInRefused, NotFound, TooManyLogIns


def test_fields_are_decoded_once_and_empty_ones_stay() -> None:
    assert parse_form(b"a=1%202&b=&c=%C3%BC+%2520") == {"a": "1 2", "b": "", "c": "ü %20"}
    assert parse_form(b"") == {}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"a=1&a=1", "twice"),
        (b"a=%ff", "UTF-8"),
        (b"\xc3\xbc=1", "UTF-8"),
        (b"a", "URL-encoded"),
        (b"name=a%00b", "'name'"),
        (b"name=a%0ab", "control character"),
        (b"name=%7f", "control character"),
        (b"&".join(b"a%d=" % number for number in range(MAX_FIELDS + 1)), f"at most {MAX_FIELDS} fields"),
    ],
)
def test_what_is_no_form_of_ours_is_refused_by_name(body: bytes, says: str) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        parse_form(body)
    assert refused.value.status == 400


def test_what_is_shown_again_is_bounded_and_only_what_is_named() -> None:
    typed = {"name": "x" * (MAX_SHOWN_CHARACTERS + 1), "password": "secret"}
    assert typed_fields(typed, "name", "role") == {"name": "x" * MAX_SHOWN_CHARACTERS, "role": ""}


FIELDS = ("name", "tenants", "password")


@pytest.mark.parametrize(
    ("error", "status", "errors"),
    [
        (Invalid("name", "is too long"), 422, {"name": "Is too long."}),
        (Invalid("person", "is the last owner."), 422, {WHOLE_FORM: "Is the last owner."}),
        (NotFound("tenant", "acme"), 422, {"tenants": "No such tenant: 'acme'."}),
        (NotFound("person", "psn_1"), 422, {WHOLE_FORM: "No such person: 'psn_1'."}),
        (AlreadyExists("person", "bo"), 409, {"name": "Person 'bo' already exists."}),
        (LogInRefused(), 403, {"password": "Wrong password."}),
        (
            TooManyLogIns(1.2),
            429,
            {WHOLE_FORM: "Too many attempts. Try again in 2 s."},
        ),
    ],
)
def test_an_error_stands_beside_its_field_or_above_the_form(
    error: Exception, status: int, errors: dict[str, str]
) -> None:
    problem = problem_of(error, fields=FIELDS)
    assert (problem.status, problem.errors) == (status, errors)


def test_who_has_to_wait_is_told_how_long_in_the_headers_too() -> None:
    assert problem_of(TooManyLogIns(0.01)).headers == {"retry-after": "1"}
    with pytest.raises(ZeroDivisionError):
        problem_of(ZeroDivisionError())


def test_names_in_one_field_are_separated_by_commas_or_spaces() -> None:
    assert names_in(" a, b c,,d ") == ["a", "b", "c", "d"]
    assert names_in(" , ") == []


@pytest.mark.parametrize(
    ("user_agent", "expected"),
    [
        ("Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/156.0 Safari/537.36", "Chrome on Linux"),
        (
            "Mozilla/5.0 (Windows NT 10.0) AppleWebKit/537.36 Chrome/156.0 Safari/537.36 Edg/156.0",
            "Edge on Windows",
        ),
        ("Mozilla/5.0 (iPhone; CPU iPhone OS 19) AppleWebKit/605 Version/19 Safari/604", "Safari on iOS"),
        ("Mozilla/5.0 (Android 16; Mobile; rv:140.0) Gecko/140.0 Firefox/140.0", "Firefox on Android"),
        ("curl/8.5", "curl/8.5"),
        ("", "unknown"),
    ],
)
def test_a_browser_is_named_in_short(user_agent: str, expected: str) -> None:
    assert formats.browser(user_agent) == expected
