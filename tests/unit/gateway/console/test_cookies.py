"""Cookies of the console: which is read, and when a client speaks https."""

from __future__ import annotations

from typing import Any, cast

import pytest
from litestar.types import Scope

from gateway.console import cookies
from tenants.networks import network_of

PROXIES = (network_of("10.0.0.0/8"),)


def scope(peer: str | None, *headers: tuple[bytes, bytes], scheme: str = "http") -> Scope:
    client = None if peer is None else (peer, 1)
    return cast(Scope, cast(Any, {"scheme": scheme, "client": client, "headers": list(headers)}))


@pytest.mark.parametrize(
    ("peer", "said", "expected"),
    [
        ("10.0.0.1", [b"https"], True),
        ("10.0.0.1", [b"HTTPS , http"], True),
        ("10.0.0.1", [b"http, https"], False),
        ("10.0.0.1", [b"http"], False),
        ("10.0.0.1", [], False),
        ("192.0.2.1", [b"https"], False),
        (None, [b"https"], False),
    ],
)
def test_only_a_trusted_proxy_says_that_a_client_speaks_https(
    peer: str | None, said: list[bytes], expected: bool
) -> None:
    asked = scope(peer, *((b"x-forwarded-proto", value) for value in said))
    assert cookies.is_https(asked, PROXIES) is expected
    assert cookies.is_https(scope(peer, scheme="https"), PROXIES) is True


@pytest.mark.parametrize(
    ("header", "secure", "expected"),
    [
        (b"fairgate_session=abc", False, "abc"),
        (b"a=1; fairgate_session=abc;b=2", False, "abc"),
        (b"fairgate_session=abc; fairgate_session=abc", False, "abc"),
        (b"fairgate_session=abc; fairgate_session=evil", False, ""),
        (b"fairgate_session=abc", True, ""),
        (b"__Host-fairgate_session=abc; fairgate_session=evil", True, "abc"),
        (b"__Host-fairgate_session=abc", False, ""),
        (b"xfairgate_session=abc", False, ""),
        (b"fairgate_session=\xff", False, ""),
        (b"fairgate_session=" + b"x" * 300, False, ""),
        (b"", False, ""),
    ],
)
def test_one_cookie_of_its_exact_name_is_read(header: bytes, secure: bool, expected: str) -> None:
    assert cookies.read(scope("192.0.2.1", (b"cookie", header)), cookies.SESSION, secure=secure) == expected


def test_cookies_in_several_headers_are_one_list() -> None:
    asked = scope("192.0.2.1", (b"cookie", b"fairgate_form=a"), (b"cookie", b"fairgate_form=b"))
    assert cookies.read(asked, cookies.FORM, secure=False) == ""
