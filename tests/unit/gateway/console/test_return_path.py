"""Where a log-in leads."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest

from gateway.console.return_path import MAX_CHARACTERS, START, log_in_for, safe, with_query


@pytest.mark.parametrize(
    "path",
    [
        "/console", "/console?a=1", "/console/people", "/console/people/psn_1?done=role",
        "/console/people?name=a%40b",
    ],
)  # fmt: skip
def test_pages_of_the_console_are_kept(path: str) -> None:
    assert safe(path) == path


@pytest.mark.parametrize(
    "wanted",
    [
        "", "/", "/v1/models", "/consoles", "/console.evil.example", "//console", "https://evil.example/console",
        "console", "/console/../v1", "/console/%2E%2e/v1", "/console/.%2e/v1", "/console/..%2fv1",
        "/console/.",
        "/console\\evil", "/console/%5c..", "/console/\n", "/console/\x00", "/console/ä",
        "/console/a b", "/console#x",
        "javascript:alert(1)", "/console/" + "x" * MAX_CHARACTERS,
    ],
)  # fmt: skip
def test_everything_else_becomes_the_start_page(wanted: str) -> None:
    assert safe(wanted) == START


def test_a_page_with_what_was_typed_goes_through_the_log_in_and_comes_back() -> None:
    page = with_query("/console/people", {"name": "a&b=c@example.org", "role": "", "tenants": "x, y"})
    assert safe(page) == page
    way = urlsplit(log_in_for(page))
    assert way.path == "/console/log-in"
    back = urlsplit(parse_qs(way.query)["next"][0])
    assert parse_qs(back.query) == {"name": ["a&b=c@example.org"], "tenants": ["x, y"]}
    assert log_in_for(START) == "/console/log-in"
